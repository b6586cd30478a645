"""Predict memory, speed and goodput of a run, and search for layouts, before anything runs."""

"""Predict memory, speed and goodput of a training, and search for layouts, before anything runs."""

"""Predict memory, speed and goodput of a run before it starts, and search for layouts."""

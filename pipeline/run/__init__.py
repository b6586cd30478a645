"""The run directory: its files, its code, its stages, points of a sweep, metrics, what a failing rank leaves."""

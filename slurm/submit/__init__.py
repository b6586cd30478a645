"""Submission from the login node: batch scripts, chains of jobs and sweeps, and the same stages on this machine."""

"""Submit jobs from the login node: batch scripts, chains and sweeps. Run the same stages on this machine."""

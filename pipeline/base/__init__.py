"""Modules that all other packages use: errors and exit codes, files, signals, and the rank of this process."""

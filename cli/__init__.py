"""The command line: one module for each command of `python submit.py`."""

VERSION = "0.1.0"

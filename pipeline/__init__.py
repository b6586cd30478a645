"""The code of a run: its config, its directory, its stages, and the code that the ranks execute."""

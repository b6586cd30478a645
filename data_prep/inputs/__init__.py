"""Input files: which there are, how documents are read from them, and whether they are still what was seen."""

"""The search of a sweep: which trials run, when they pause, and which of them continue."""

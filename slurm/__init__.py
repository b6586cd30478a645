"""Submit and supervise the jobs of a run, and query their state. No module of this package imports torch."""

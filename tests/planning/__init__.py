"""Planning: what is said before a job runs, against what is known."""

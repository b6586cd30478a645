"""The supervisor of a job: it starts ranks, decides after each attempt, and requeues or hands over."""

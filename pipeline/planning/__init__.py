"""What can be known before a job waits in a queue: rehearsal at any size, and what failures will cost."""

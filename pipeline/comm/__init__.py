"""Process groups, and the assignment of GPUs to ranks."""

"""What a run came to: the report in the terminal, and as a page of pictures that needs nothing else."""

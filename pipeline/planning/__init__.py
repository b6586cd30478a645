"""What a training will need and how fast it will be, before it is queued."""

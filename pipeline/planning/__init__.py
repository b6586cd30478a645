"""What a training will need, how fast it will be and what failures will cost, before it is queued."""

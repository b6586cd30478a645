"""What keeps a training alive or ends it well: stops, bad numbers, hangs, bad nodes, stragglers."""

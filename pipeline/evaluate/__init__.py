"""The evaluate stage: measure checkpoints on held-out data and task files."""

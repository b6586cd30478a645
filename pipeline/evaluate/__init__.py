"""The stage evaluate: held-out loss of checkpoints."""

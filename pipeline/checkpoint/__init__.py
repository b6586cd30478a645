"""Checkpoints: saving, what is saved, verifying."""

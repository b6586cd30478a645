"""Save, verify and restore checkpoints, and determine to which run a checkpoint belongs."""

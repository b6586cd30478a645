"""Data to be trained on: the stages prepare and shard, for text (`text/`) and for arrays of a user's own model."""

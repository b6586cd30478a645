"""The stages prepare and shard: convert the user's files to shards of tokens, or list the samples of a custom model."""

"""Read data in the train stage: the manifest of shards, the order of samples, and memory-mapped tokens and arrays."""

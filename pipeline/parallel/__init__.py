"""Data, tensor and pipeline parallelism and the synchronization of replicas, without code for a specific model."""

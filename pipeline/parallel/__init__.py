"""Parallelism that knows no model: data, tensor and pipeline parallel, and what replicas send."""

"""What is trained: the decoder, and the task that stands between a model and the engine."""

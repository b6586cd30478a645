"""The decoder, and the `Task` classes through which the engine, the trainer and the evaluator use a model."""

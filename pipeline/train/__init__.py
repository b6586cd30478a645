"""The train stage: training loop, callbacks, engine, optimizer, metrics and profiler."""

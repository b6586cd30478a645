"""The run directory: config, code, stages, sweep points, events, metrics, and the error reports of ranks."""

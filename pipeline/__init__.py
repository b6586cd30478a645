"""The pipeline: config, run directory, stages, and what the ranks compute."""

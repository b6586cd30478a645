"""Define the sections of a config, and read and check configs."""

"""What a config may say, section by section, and reading it."""

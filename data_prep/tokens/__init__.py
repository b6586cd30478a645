"""Tokens that people have already: which formats there are, and a data folder that takes them where they lie."""

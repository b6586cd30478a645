"""Process groups, and the account of what a step sends."""

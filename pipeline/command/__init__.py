"""Stages that run a command of the user."""

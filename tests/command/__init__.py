"""Tests of stages that run a command."""

"""Tests of predictions, memory estimates and goodput before a job runs."""

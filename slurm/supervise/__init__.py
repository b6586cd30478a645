"""Supervise a job: start its ranks, determine why they stopped, and restart, requeue, hand over or end the stage."""

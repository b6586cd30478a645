"""The stage train: loop, engine, optimizer."""

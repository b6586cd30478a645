"""Keep a run alive, or end it safely: stops, bad steps, hangs, bad nodes, stragglers."""

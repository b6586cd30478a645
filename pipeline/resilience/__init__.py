"""Handle what interrupts a run: stop requests, bad steps, hangs, failed nodes and stragglers."""

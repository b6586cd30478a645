"""Follow a run directory and report it: trackers, telemetry of nodes, the HTML report."""

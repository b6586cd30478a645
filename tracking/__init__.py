"""Read a run directory and report its progress: trackers, telemetry of nodes, and the HTML report."""

"""Read the state of jobs, nodes and sites from Slurm and from the run directory, without changing anything."""

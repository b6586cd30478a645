"""Looking only: what Slurm and the run directory say of jobs, nodes and sites."""

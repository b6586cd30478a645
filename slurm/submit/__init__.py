"""From the login node: jobs written and submitted, chains, sweeps, dry runs, and the same without Slurm."""

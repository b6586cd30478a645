"""From documents to HDF5 shards of tokens. No torch, no Slurm."""

"""A torch.distributed process group over MPI, for torch wheels without MPI."""

"""A process group over MPI for the stock torch wheel."""

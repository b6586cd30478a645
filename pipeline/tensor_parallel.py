"""The name that a tensor plan of a user's own model imports: `pipeline.tensor_parallel.Replicated()`."""

from pipeline.parallel.tensor_parallel import Replicated as Replicated

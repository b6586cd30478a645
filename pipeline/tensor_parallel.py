"""Public names for the tensor plan of a custom model: `pipeline.tensor_parallel.Replicated()`."""

from pipeline.parallel.tensor_parallel import Replicated as Replicated

"""The states of an iterable dataset in a checkpoint.

A checkpoint contains the state of each worker of each data-parallel rank after the last batch that the training used.
Batches that workers have read ahead are not part of it. The states are base64 texts in the manifest of the checkpoint,
so they should be small: positions and states of generators, not buffers of samples.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from pipeline.base.errors import UserError
from pipeline.comm.groups import all_gather_results

MAX_STATE_BYTES = 1 << 20
"""Maximum size of the state of a worker."""


def gather_states(group: dist.ProcessGroup, rank: int, size: int, states: Sequence[bytes]) -> dict[str, Any]:
    """Return the states of all data-parallel ranks, as JSON values. All ranks must call this function.

    Args:
        group: the group of all ranks.
        rank: the data-parallel rank.
        size: the data-parallel size.
        states: the state of each worker of this rank.

    Raises UserError if a state is too large.
    """

    def encode_states() -> tuple[int, list[str]]:
        """Return the data-parallel rank and its encoded states."""
        largest = max(map(len, states))
        if largest > MAX_STATE_BYTES:
            raise UserError(
                "data.large_state",
                f"dataset: state_dict returns {largest:,} bytes, more than the limit of {MAX_STATE_BYTES:,} for a "
                "checkpoint: return positions instead of samples",
            )
        return rank, [base64.b64encode(state).decode() for state in states]

    # Several ranks have the same data-parallel rank if the model is split among them. Their states are equal.
    by_rank = dict(all_gather_results(group, encode_states))
    return {"workers": len(states), "states": [by_rank[number] for number in range(size)]}


def select_states(saved: Mapping[str, Any], step: int, rank: int, size: int, workers: int) -> list[bytes]:
    """Return the state of each worker of a data-parallel rank.

    Args:
        saved: the result of :func:`gather_states`.
        step: the step of the checkpoint.
        rank: the data-parallel rank.
        size: the data-parallel size.
        workers: `data.workers`.

    Raises UserError if the checkpoint has states for another number of data-parallel ranks or workers.
    """
    states = saved["states"]
    if (len(states), saved["workers"]) != (size, workers):
        raise UserError(
            "data.other_streams",
            f"checkpoint {step} has the state of an iterable dataset for {len(states)} data-parallel ranks with "
            f"{saved['workers']} workers each, but there are now {size} ranks with {workers} workers. Resume with the "
            f"former number of ranks and data.workers={saved['workers']}, or start a new run. A map-style dataset can "
            "resume on any number of ranks",
        )
    return [base64.b64decode(state) for state in states[rank]]

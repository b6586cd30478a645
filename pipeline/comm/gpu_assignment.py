"""Which GPU each rank computes on: dealt out from what all ranks see, before any of them uses one.

Slurm may show a rank all GPUs of its node, one, or those next to its cores (`--gpu-bind=closest`), and it deals ranks
out over sockets in turn: a rank's number on its node does not say which of those that it sees nobody else takes. So
ranks tell host and UUIDs; who sees few chooses first, each the GPU that the fewest have, in the order of local ranks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from socket import gethostname
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import NodeError, UserError


class VisibleGpus(NamedTuple):
    """What one rank sees."""

    host: str
    local_rank: int
    gpus: list[str]
    """UUIDs in the order of their numbers; none without GPUs."""


def read_visible_gpus(place: RankInfo) -> VisibleGpus:
    """What this rank sees; no GPU is used for it."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    uuids = [str(torch.cuda.get_device_properties(number).uuid) for number in range(count)]
    return VisibleGpus(gethostname(), place.local_rank, uuids)


def assign_gpus(everyone: Sequence[VisibleGpus], alone: bool) -> list[int | None]:
    """The number, among those that it sees, of each rank's GPU; None for one that sees none.

    `alone`: NCCL's ranks share no GPU. Raises UserError where they would, NodeError where only some ranks see one.
    """
    holders: dict[tuple[str, str], list[int]] = {}
    chosen: list[int | None] = [None] * len(everyone)
    order = sorted(range(len(everyone)), key=lambda rank: (len(everyone[rank].gpus), everyone[rank].local_rank))
    for rank in order:
        host, _, gpus = everyone[rank]
        if gpus:
            taken = [len(holders.get((host, uuid), ())) for uuid in gpus]
            chosen[rank] = taken.index(min(taken))
            holders.setdefault((host, gpus[taken.index(min(taken))]), []).append(rank)
    if alone and holders:
        if None in chosen:
            rank, other = chosen.index(None), next(seen for seen in everyone if seen.gpus)
            host = everyone[rank].host
            raise NodeError(
                f"{host}: torch sees no GPU there (rank {rank}), but {len(other.gpus)} on {other.host}: nvidia-smi "
                "tells why; ask for GPUs on every node (site.gpus_per_node), or for CPUs with parallel.backend: gloo",
                host=host,
            )
        shared = {where: sorted(ranks) for where, ranks in holders.items() if len(ranks) > 1}
        if shared:
            raise UserError(_describe_shared_gpu(everyone, *min(shared.items(), key=lambda item: item[1])))
    return chosen


def _describe_shared_gpu(everyone: Sequence[VisibleGpus], where: tuple[str, str], ranks: list[int]) -> str:
    host, uuid = where
    there = Counter(gpu for seen in everyone if seen.host == host for gpu in set(seen.gpus))
    count = sum(seen.host == host for seen in everyone)
    found = f"ranks {', '.join(map(str, ranks))} on {host} would share GPU {uuid}, and NCCL needs one for each rank"
    if count > len(there):
        return (
            f"{found}: {count} ranks run there and see {len(there)} in all: lower stages.*.tasks_per_node, raise "
            "site.gpus_per_node where the node has more, or use parallel.backend: gloo"
        )
    return (
        f"{found}: {there[uuid]} ranks are bound to it, though they see {len(there)} in all: let each see all of them "
        "with site.srun: {gpu-bind: none}, or see that nothing in site.setup sets CUDA_VISIBLE_DEVICES"
    )


def assign_gpu_over_store(place: RankInfo, store: dist.Store, alone: bool) -> int | None:
    """This rank's number of :func:`deal`, which rank 0 calls for all; every rank calls it, and raises what it raises.

    Over the store, for NCCL has to know the GPU when it starts.
    """
    store.set(f"gpus/{place.rank}", json.dumps(read_visible_gpus(place)))
    if place.rank == 0:
        seen = store.multi_get([f"gpus/{rank}" for rank in range(place.world_size)])
        answer: dict[str, Any]
        try:
            answer = {"dealt": assign_gpus([VisibleGpus(*json.loads(one)) for one in seen], alone)}
        except UserError as error:
            answer = {"words": str(error), "host": getattr(error, "host", None)}
        store.set("gpus", json.dumps(answer))
    answer = json.loads(store.get("gpus"))
    if "words" in answer:
        store.set(f"gpus/{place.rank}/told", "")
        if place.rank == 0:  # with it goes the store
            store.wait([f"gpus/{rank}/told" for rank in range(place.world_size)])
        raise UserError(answer["words"]) if answer["host"] is None else NodeError(answer["words"], host=answer["host"])
    number: int | None = answer["dealt"][place.rank]
    return number

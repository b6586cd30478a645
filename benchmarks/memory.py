"""What each ZeRO level holds on a rank, measured: it must fall as 1/ranks where the level says so.

    python -m benchmarks.memory [--ranks 2 4]

A model of 27 M parameters on each of the given numbers of ranks, two micro-batches in a step. Bytes are those of
the tensors that exist: weights and optimizer state between steps; gradients, and weights gathered whole, at the
moment between the two micro-batches. (The peak of a process on the CPU says little: code that is loaded on first
use outweighs all.)
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.table import write_table
from pipeline.base.dist_env import RankInfo
from pipeline.config.read import parse_config
from pipeline.config.sections import Config
from tests.support.ranks import run_ranks

VOCAB = 8192
LEVELS: list[tuple[str, dict[str, Any]]] = [
    ("0 (DDP)", {}),
    ("1", {"zero": 1}),
    ("2, reduced per step", {"zero": 2, "reduce": "step"}),
    ("2, reduced per micro-batch", {"zero": 2}),
    ("3, reduced per step", {"zero": 3, "reduce": "step"}),
    ("3, reduced per micro-batch", {"zero": 3}),
]


def config_of(ranks: int, parallel: dict[str, Any]) -> Config:
    return parse_config(
        {
            "run": {"name": "memory"},
            "data": {"sequence_length": 64, "tokenizer": {"vocab_size": VOCAB}},
            "model": {"dim": 512, "layers": 6, "heads": 8},
            "parallel": parallel,
            "train": {"steps": 2, "global_batch": 2 * ranks, "micro_batch": 1},
            "stages": {"train": {"tasks_per_node": ranks}},
        },
        "memory",
    )


def local_bytes(tensor: Any) -> int:
    return 0 if tensor is None else int(getattr(tensor, "_local_tensor", tensor).nbytes)


def measure(rank_info: RankInfo, config: Config) -> tuple[int, int, int, int]:
    """Bytes of weights, optimizer, gradients, gathered weights."""
    import torch
    from torch.distributed.fsdp import FSDPModule

    from pipeline.comm import groups
    from pipeline.model.task import DecoderTask
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train.engine import Engine

    groups.configure_determinism(config)
    world = groups.join_process_group(rank_info, config)
    layout = resolve_layout(config)
    engine = Engine(config, layout, world, DecoderTask(config, VOCAB))
    state = engine.state_dict()
    between: list[tuple[int, int]] = []

    states = {id(m._get_fsdp_state()): m for m in engine.model.modules() if isinstance(m, FSDPModule)}
    groups_of = [module._get_fsdp_state()._fsdp_param_group for module in states.values()]
    sharded = [parameter for group in groups_of if group is not None for parameter in group.fsdp_params]

    def look(phase: str) -> None:
        gradients = 0 if sharded else sum(local_bytes(p.grad) for p in engine.model.parameters())
        gathered = 0
        for parameter in sharded:
            gradients += local_bytes(parameter.sharded_param.grad) + local_bytes(parameter.unsharded_accumulated_grad)
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None:
                gradients += local_bytes(whole.grad)
                gathered += whole.untyped_storage().nbytes()
        between.append((gradients, gathered))

    for step in (1, 2):
        tokens = torch.zeros((2, config.data.sequence_length + 1), dtype=torch.int64)
        engine.backward({"tokens": tokens}, step, look)
        engine.update_weights(engine.clip_gradients(1.0).item())
    gradients, gathered = between[-3]  # forward, backward, *forward*, backward, reduce
    weights = sum(local_bytes(t) for name, t in state.items() if name.startswith("model."))
    optimizer = sum(local_bytes(t) for name, t in state.items() if "exp_avg" in name)
    return weights, optimizer, gradients, gathered


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    rows = []
    for name, parallel in LEVELS:
        for ranks in parser.parse_args().ranks:
            results = run_ranks(ranks, measure, config_of(ranks, parallel))
            most = (f"{max(column) / 1e6:.1f}" for column in zip(*results, strict=True))
            rows.append([name, f"{ranks}", *most])
    write_table(
        "memory",
        "Memory by ZeRO level",
        "MB on the fullest rank, 27 M parameters in fp32; `python -m benchmarks.memory`.",
        ["level", "ranks", "weights", "optimizer", "gradients, between micro-batches", "weights gathered, then"],
        rows,
    )


if __name__ == "__main__":
    main()

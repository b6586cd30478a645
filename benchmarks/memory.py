"""Measure the memory that each ZeRO level needs on a rank. Sharded memory must be proportional to 1 / ranks.

    python -m benchmarks.memory [--ranks 2 4]

A model of 27 M parameters runs on each number of ranks, with two micro-batches per step. The results are the bytes of
existing tensors. Weights and optimizer state are measured between steps. Gradients and gathered weights are measured
between the two micro-batches. The peak memory of a CPU process would not be useful, because loaded libraries need
much more memory than these tensors.
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


def make_config(ranks: int, parallel: dict[str, Any]) -> Config:
    """Return a config of the model on `ranks` ranks, with the keys of `parallel` in the section `parallel`."""
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


def count_local_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor, or of this rank's part of a DTensor; 0 for None."""
    return 0 if tensor is None else int(getattr(tensor, "_local_tensor", tensor).nbytes)


def measure_rank_memory(rank_info: RankInfo, config: Config) -> tuple[int, int, int, int]:
    """Train two steps on this rank.

    Returns:
        The rank's bytes of weights, optimizer state, gradients and gathered weights.
    """
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
    phase_bytes: list[tuple[int, int]] = []
    """Bytes of gradients and of gathered weights at the start of each phase."""

    # Modules that were sharded together share one FSDP state, which counts once.
    modules = {id(m._get_fsdp_state()): m for m in engine.model.modules() if isinstance(m, FSDPModule)}
    parameter_groups = [module._get_fsdp_state()._fsdp_param_group for module in modules.values()]
    fsdp_parameters = [parameter for group in parameter_groups if group is not None for parameter in group.fsdp_params]

    def record_phase(phase: str) -> None:
        """Record the bytes of gradients and gathered weights. The engine calls this function before each phase."""
        # Without ZeRO, there are no FSDP parameters, and the gradients are those of the model's parameters.
        gradients = 0 if fsdp_parameters else sum(count_local_bytes(p.grad) for p in engine.model.parameters())
        gathered = 0
        for parameter in fsdp_parameters:
            gradients += count_local_bytes(parameter.sharded_param.grad) + count_local_bytes(
                parameter.unsharded_accumulated_grad
            )
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None:
                gradients += count_local_bytes(whole.grad)
                gathered += whole.untyped_storage().nbytes()
        phase_bytes.append((gradients, gathered))

    for step in (1, 2):
        tokens = torch.zeros((2, config.data.sequence_length + 1), dtype=torch.int64)
        engine.backward({"tokens": tokens}, step, record_phase)
        engine.update_weights(engine.clip_gradients(1.0).item())
    # The phases of a step are forward, backward, forward, backward, reduce. The third phase starts between the
    # micro-batches.
    gradients, gathered = phase_bytes[-3]
    weights = sum(count_local_bytes(t) for name, t in state.items() if name.startswith("model."))
    optimizer = sum(count_local_bytes(t) for name, t in state.items() if "exp_avg" in name)
    return weights, optimizer, gradients, gathered


def main() -> None:
    """Measure each ZeRO level on each number of ranks, and write benchmarks/results/memory.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    rows = []
    for name, parallel in LEVELS:
        for ranks in parser.parse_args().ranks:
            results = run_ranks(ranks, measure_rank_memory, make_config(ranks, parallel))
            maxima = (f"{max(column) / 1e6:.1f}" for column in zip(*results, strict=True))
            rows.append([name, f"{ranks}", *maxima])
    write_table(
        "memory",
        "Memory by ZeRO level",
        "MB on the rank that needs the most, 27 M parameters in fp32. Method: `benchmarks/memory.py`.",
        [
            "ZeRO level",
            "ranks",
            "weights",
            "optimizer state",
            "gradients between micro-batches",
            "gathered weights between micro-batches",
        ],
        rows,
    )


if __name__ == "__main__":
    main()

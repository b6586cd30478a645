"""Measure how evenly the work of a step is divided among ranks, with and without `train.balance`.

    python -m benchmarks.balance

Documents have lengths from a Pareto distribution, and are packed into samples. The samples of each global batch are
assigned to ranks in their order, and balanced. Then forward and backward of each rank's samples are computed one after
the other, on one core, so that the ranks do not disturb each other. The table has the CPU time of the slowest rank
divided by the mean of all ranks, summed over the steps.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from benchmarks.table import write_table
from pipeline.config.sections import ModelConfig
from pipeline.data.sample_order import assign_to_ranks
from pipeline.data.samples import DocumentEnds
from pipeline.model.decoder import Decoder, init_weights

RANKS = 4
STEPS = 12
GLOBAL_BATCH = 32
LENGTH = 2048
EOS = 0
PARETO_SHAPE = 1.1
"""Shape of the distribution of lengths: many short documents, and some that fill a sample."""
MIN_DOCUMENT = 24
"""Length of the shortest document, in tokens."""


def make_tokens(generator: np.random.Generator, samples: int) -> np.ndarray:
    """Return packed documents: uint16, shape (samples, LENGTH + 1)."""
    tokens = generator.integers(1, 256, samples * LENGTH + 1, dtype=np.uint16)
    position = 0
    while position < len(tokens):
        position += int(MIN_DOCUMENT * (1 + generator.pareto(PARETO_SHAPE)))
        tokens[position - 1 : position] = EOS
    return np.lib.stride_tricks.sliding_window_view(tokens, LENGTH + 1)[::LENGTH]


def measure_cpu_s(model: Decoder, tokens: np.ndarray) -> float:
    """Return the CPU seconds of forward and backward of these samples, one after the other."""
    tokens_BT = torch.from_numpy(tokens.astype(np.int64))
    start = time.process_time()
    for sample_T in tokens_BT:
        inputs = sample_T[None, :-1]
        loss = model(inputs, targets_BT=sample_T[None, 1:], starts_BT=inputs.roll(1, dims=1) == EOS)
        loss.backward()
    return time.process_time() - start


def main() -> None:
    """Measure both assignments in turn, and write benchmarks/results/balance.md."""
    torch.set_num_threads(1)
    model = Decoder(ModelConfig(dim=128, layers=2, heads=4), 256, LENGTH)
    init_weights(model, 1, 0.02)
    assert model.lm_head is not None
    model.lm_head.chunk = 512
    generator = np.random.default_rng(1)
    ends = DocumentEnds(EOS, eos_starts_next=False)
    measure_cpu_s(model, make_tokens(generator, 1))
    slowest = {"in order": 0.0, "balanced": 0.0}
    means = dict(slowest)
    squares = {name: [0.0, 0.0] for name in slowest}
    for _ in range(STEPS):
        tokens = make_tokens(generator, GLOBAL_BATCH)
        costs = ends.measure_work({"tokens": tokens})
        in_order = np.arange(GLOBAL_BATCH).reshape(RANKS, -1)
        for name, assigned in (("in order", in_order), ("balanced", assign_to_ranks(costs, RANKS))):
            seconds = [measure_cpu_s(model, tokens[rows]) for rows in assigned]
            slowest[name] += max(seconds)
            means[name] += sum(seconds) / RANKS
            squares[name][0] += float(costs[assigned].sum(axis=1).max())
            squares[name][1] += float(costs.sum()) / RANKS
    rows = [
        [name, f"{slowest[name] / means[name]:.3f}", f"{squares[name][0] / squares[name][1]:.3f}"] for name in slowest
    ]
    note = (
        f"{RANKS} ranks, {STEPS} steps of {GLOBAL_BATCH} samples with {LENGTH:,} tokens, document lengths from a "
        f"Pareto distribution (shape {PARETO_SHAPE}, at least {MIN_DOCUMENT} tokens); a model with 2 blocks of width "
        "128. Forward and backward, on one core, one rank after the other."
    )
    header = ["samples", "slowest rank / mean, CPU time", "slowest rank / mean, squared document lengths"]
    write_table("balance", "Balance between ranks on packed documents", note, header, rows)


if __name__ == "__main__":
    main()

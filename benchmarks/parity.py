"""How near every way to split a training is to one process: losses and gradient norms of ten steps, fp32.

    python -m benchmarks.parity

The model and the batches are those of tests/parallel/test_parallel.py, which fails beyond 1e-5; this writes down what
the differences are. Then one training moves from layout to layout: each loads what the one before it saved.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import write_table
from tests.parallel.test_parallel import FEW, HYBRID, LAYOUTS, SCHEDULES, moving, one_process
from tests.support.ranks import run_ranks
from tests.support.tiny_training import STEPS, change_layout_rank, tiny_config, train_rank

ALL = {"pipeline": 2, "tensor": 2}
CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        *({"zero": zero} for zero in range(4)),
        {"tensor": 2},
        *({"pipeline": 2, "schedule": name, "virtual_stages": n} for name, n in SCHEDULES if n < 4),
    ],
    4: [
        *({"zero": zero} for zero in range(4)),
        *({"zero": zero, **HYBRID} for zero in (1, 3)),
        {"tensor": 4},
        {"pipeline": 4},
        {"pipeline": 2, "zero": 3},
        {"tensor": 2, "zero": 3},
    ],
    8: [ALL, *({**ALL, "virtual_stages": 2, "schedule": name} for name in ("interleaved_1f1b", "zbv"))],
}
LIMIT_S = 500


def words(parallel: dict[str, Any]) -> str:
    """A layout as one types it."""
    values = {key: value for key, value in parallel.items() if (key, value) != ("virtual_stages", 1)}
    return ", ".join(f"{key} {value}".replace("'", "") for key, value in values.items()) or "zero 0"


def largest(ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> list[str]:
    """Largest relative difference of losses, and of norms."""
    pairs = zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)
    return [f"{max(abs(a - b) / b for a, b in zip(*pair, strict=True)):.1e}" for pair in pairs]


def main() -> None:
    rows = []
    for ranks, cases in CASES.items():
        trains = [FEW if "tensor" in case else {} for case in cases]
        configs = [tiny_config(ranks, parallel=case, train=few) for case, few in zip(cases, trains, strict=True)]
        found = run_ranks(ranks, train_rank, configs, timeout=LIMIT_S)[0]
        for case, few, trained in zip(cases, trains, found, strict=True):
            rows.append([f"{ranks}", words(case), *largest(trained, one_process({"train": few})), ""])
    first, *others = [moving(parallel, {}) for parallel in LAYOUTS]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (first, [*others, first], Path(folder), 3, STEPS)
        (digest, expected), *moves = run_ranks(4, change_layout_rank, *arguments, timeout=LIMIT_S)[0]
    for before, after, (again, trained) in zip(LAYOUTS, [*LAYOUTS[1:], LAYOUTS[0]], moves, strict=True):
        same = "the same" if again == digest else "DIFFERENT"
        rows.append(["4", f"{words(before)} → {words(after)}", *largest(trained, expected), same])
    note = (
        f"Largest relative difference over {STEPS} steps from one process; after a move (→), from the training that "
        "did not move, with the digest of weights and optimizer state saved again. fp32, Gloo. "
        "`python -m benchmarks.parity`."
    )
    write_table("parity", "Layouts against one process", note, ["ranks", "layout", "loss", "norm", "digest"], rows)


if __name__ == "__main__":
    main()

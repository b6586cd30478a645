"""Compare each parallel layout with one process: losses and gradient norms of ten steps in fp32.

    python -m benchmarks.parity

The model and the batches are those of tests/parallel/test_parallel.py, which fails if a difference exceeds 1e-5. This
benchmark records the differences. Then one run changes its layout repeatedly. Each layout loads the checkpoint that the
previous layout saved.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import write_table
from tests.parallel.test_parallel import (
    FEW_BATCHES,
    HYBRID_SHARDING,
    LAYOUTS,
    SCHEDULES,
    make_layout_config,
    train_one_process,
)
from tests.support.ranks import run_ranks
from tests.support.tiny_training import STEPS, change_layouts_on_rank, tiny_config, train_configs

ALL = {"pipeline": 2, "tensor": 2}
"""All kinds of parallelism: on 8 ranks, there are also two data-parallel ranks."""
CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        *({"zero": zero} for zero in range(4)),
        {"tensor": 2},
        *({"pipeline": 2, "schedule": name, "virtual_stages": n} for name, n in SCHEDULES if n < 4),
    ],
    4: [
        *({"zero": zero} for zero in range(4)),
        *({"zero": zero, **HYBRID_SHARDING} for zero in (1, 3)),
        {"tensor": 4},
        {"pipeline": 4},
        {"pipeline": 2, "zero": 3},
        {"tensor": 2, "zero": 3},
    ],
    8: [ALL, *({**ALL, "virtual_stages": 2, "schedule": name} for name in ("interleaved_1f1b", "zbv"))],
}
"""Sections `parallel` of the compared layouts, by number of ranks."""
LIMIT_S = 500
"""Time limit for the layouts of one number of ranks."""


def format_layout(parallel: dict[str, Any]) -> str:
    """Return the keys and values of a layout, such as "pipeline 2, tensor 2"."""
    values = {key: value for key, value in parallel.items() if (key, value) != ("virtual_stages", 1)}
    return ", ".join(f"{key} {value}".replace("'", "") for key, value in values.items()) or "zero 0"


def format_largest_differences(
    actual: Sequence[tuple[float, float]], expected: Sequence[tuple[float, float]]
) -> list[str]:
    """Return the largest relative difference of the losses, and the largest relative difference of the norms.

    Args:
        actual: loss and gradient norm of each step of a layout.
        expected: loss and gradient norm of each step of one process.
    """
    pairs = zip(zip(*actual, strict=True), zip(*expected, strict=True), strict=True)
    return [f"{max(abs(a - b) / b for a, b in zip(*pair, strict=True)):.1e}" for pair in pairs]


def main() -> None:
    """Train all layouts and one run that changes its layout, and write benchmarks/results/parity.md."""
    rows = []
    for ranks, cases in CASES.items():
        # Layouts with tensor parallelism train on fewer and larger micro-batches, as in test_parallel.py.
        train_sections = [FEW_BATCHES if "tensor" in case else {} for case in cases]
        configs = [
            tiny_config(ranks, parallel=case, train=train) for case, train in zip(cases, train_sections, strict=True)
        ]
        results = run_ranks(ranks, train_configs, configs, timeout=LIMIT_S)[0]
        for case, train, steps in zip(cases, train_sections, results, strict=True):
            differences = format_largest_differences(steps, train_one_process({"train": train}))
            rows.append([f"{ranks}", format_layout(case), *differences, ""])
    first, *others = [make_layout_config(parallel, {}) for parallel in LAYOUTS]
    with tempfile.TemporaryDirectory() as folder:
        first_steps = 3  # before the first change of the layout
        arguments = (first, [*others, first], Path(folder), first_steps, STEPS)
        (digest, expected_steps), *changes = run_ranks(4, change_layouts_on_rank, *arguments, timeout=LIMIT_S)[0]
    for before, after, (saved_digest, steps) in zip(LAYOUTS, [*LAYOUTS[1:], LAYOUTS[0]], changes, strict=True):
        result = "equal" if saved_digest == digest else "DIFFERENT"
        layouts = f"{format_layout(before)} → {format_layout(after)}"
        rows.append(["4", layouts, *format_largest_differences(steps, expected_steps), result])
    note = (
        f"Largest relative difference to one process over {STEPS} steps. After a change of layout (→): difference to a "
        "run that kept its layout. The digest is a hash of weights and optimizer state, saved again after the change. "
        "fp32, Gloo."
    )
    write_table(
        "parity", "Layouts compared with one process", note, ["ranks", "layout", "loss", "norm", "digest"], rows
    )


if __name__ == "__main__":
    main()

"""Measure this machine with two layouts of the quickstart's model, and predict the step time of other layouts.

    python -m benchmarks.measure [ROUNDS]   # default 7: ten minutes on two idle cores; writes measure.md

First, `python -m planning.calibrate` measures the machine. Then the steps of every layout are timed in
rounds. Each round times all layouts in turn, in new processes. The result of a layout is the median of its rounds. If a
layout has more ranks than the machine has cores, ranks share cores.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.table import write_table
from pipeline.base.dist_env import RankInfo
from pipeline.config.read import load_config
from pipeline.config.sections import Config
from pipeline.parallel.mesh import resolve_layout
from planning.machine import Machine, load_machine
from planning.predict import predict_step
from planning.workload import workload_from_config
from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs/quickstart.yaml"
MEASURED = ((2, ()), (4, ("parallel.tensor=2",)))
"""Number of ranks and config overrides of the layouts with which the machine is measured."""
PREDICTED = (
    (1, ()), (2, ("parallel.tensor=2",)), (2, ("parallel.pipeline=2",)), (2, ("parallel.zero=3",)),
    (2, ("train.micro_batch=2",)), (2, ("parallel.activation_checkpointing=full",)), (4, ()),
    (4, ("parallel.pipeline=2",)), (4, ("parallel.tensor=2", "parallel.pipeline=2")),
)  # fmt: skip
"""Number of ranks and config overrides of the layouts whose step time is predicted."""
ROUNDS = int(sys.argv[1]) if sys.argv[1:] else 7
LIMIT_S = 300
"""Time limit of one measurement of one layout."""


def load_quickstart(ranks: int, overrides: tuple[str, ...]) -> Config:
    """Return the quickstart's config on `ranks` ranks."""
    return load_config(CONFIG, [f"stages.train.tasks_per_node={ranks}", *overrides])


def time_step_on_rank(rank_info: RankInfo, config: Config) -> float:
    """Return the seconds of a real step. All ranks of the layout must call this function."""
    from pipeline.comm import groups
    from planning.calibrate import time_step

    groups.configure_determinism(config)
    world = groups.join_process_group(rank_info, config)
    layout = resolve_layout(config)
    work = workload_from_config(config, layout, config.data.tokenizer.vocab_size)
    return time_step(config, layout, world, work).seconds


def measure_machine() -> Machine:
    """Measure this machine with the layouts of `MEASURED`, one after the other, and return the resulting machine."""
    with tempfile.TemporaryDirectory() as folder:
        previous: list[str] = []
        for number, (ranks, overrides) in enumerate(MEASURED):
            file = Path(folder, f"measured-{number}.yaml")
            arguments = [str(CONFIG), f"--out={file}", *previous, *overrides, f"stages.train.tasks_per_node={ranks}"]
            command = [sys.executable, "-m", "planning.calibrate", *arguments]
            subprocess.run(command, cwd=ROOT, timeout=2 * LIMIT_S, check=True)
            previous = [f"--machine={file}"]
        return load_machine(str(file))


def main() -> None:
    """Measure, predict, and write the table."""
    cases = (*MEASURED, *PREDICTED)
    load = os.getloadavg()[0]
    machine = measure_machine()
    step_times: dict[int, list[float]] = {number: [] for number in range(len(cases))}
    for _ in range(ROUNDS):
        for number, case in enumerate(cases):
            rank_times = run_ranks(case[0], time_step_on_rank, load_quickstart(*case), timeout=LIMIT_S)
            step_times[number].append(rank_times[0])
    rows: list[list[str]] = []
    errors: list[float] = []
    for number, (ranks, overrides) in enumerate(cases):
        config = load_quickstart(ranks, overrides)
        layout = resolve_layout(config)
        work = workload_from_config(config, layout, config.data.tokenizer.vocab_size)
        measured = statistics.median(step_times[number])
        predicted = predict_step(work, machine.with_gpus_per_node(layout.ranks_per_node)).step
        error = predicted / measured - 1
        was_calibrated = number < len(MEASURED)
        if not was_calibrated:
            errors.append(abs(error))
        name = ", ".join(override.split(".", 1)[1].replace("=", " ") for override in overrides) or "data parallel"
        spread = f"{min(step_times[number]):.3f} – {max(step_times[number]):.3f}"
        error_text = f"{100 * error:+.0f} %" + (" (calibrated)" if was_calibrated else "")
        rows.append([f"{ranks}", name, f"{measured:.3f}", spread, f"{predicted:.3f}", error_text])
    note = (
        f"Seconds of a step of the quickstart's model: medians of {ROUNDS} rounds, each of which times all layouts. "
        f"Load average {load:.1f} before the run. The machine file was measured with the first two layouts. Errors of "
        f"the others: median {100 * statistics.median(errors):.0f} %, largest {100 * max(errors):.0f} %, "
        f"{sum(error <= 0.15 for error in errors)} of {len(errors)} within 15 %. Fitted constants: "
        f"{machine.measured}. Method: `benchmarks/measure.py`."
    )
    write_table(
        "measure",
        "Prediction from measurements of this machine",
        note,
        ["ranks", "layout", "measured", "range", "predicted", "error"],
        rows,
    )


if __name__ == "__main__":
    main()

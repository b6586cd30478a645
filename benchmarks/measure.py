"""`plan --measure` on two layouts of the quickstart's model, and what it then predicts of others, on this machine.

    python -m benchmarks.measure [rounds]   # seven rounds: ten minutes on two quiet cores; writes measure.md

The machine is measured through the door, with the run's own ranks. Then the real step of every layout is timed: rounds
in which all take turns, each time in new processes; the figure is the median of the rounds. Layouts with more ranks
than cores share them.
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
from planning.machine import load_machine
from planning.predict import predict_step
from planning.workload import workload_from_config
from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs/quickstart.yaml"
MEASURED = ((2, ()), (4, ("parallel.tensor=2",)))
PREDICTED = (
    (1, ()), (2, ("parallel.tensor=2",)), (2, ("parallel.pipeline=2",)), (2, ("parallel.zero=3",)),
    (2, ("train.micro_batch=2",)), (2, ("parallel.activation_checkpointing=full",)), (4, ()),
    (4, ("parallel.pipeline=2",)), (4, ("parallel.tensor=2", "parallel.pipeline=2")),
)  # fmt: skip
ROUNDS = int(sys.argv[1]) if sys.argv[1:] else 7
LIMIT_S = 300


def config_of(ranks: int, overrides: tuple[str, ...]) -> Config:
    return load_config(CONFIG, [f"stages.train.tasks_per_node={ranks}", *overrides])


def step_of(rank_info: RankInfo, config: Config) -> float:
    """Seconds of a real step, on one rank of those that make it."""
    from pipeline.comm import groups
    from planning.calibrate import time_step

    groups.configure_determinism(config)
    world, layout = groups.join_process_group(rank_info, config), resolve_layout(config)
    work = workload_from_config(config, layout, config.data.tokenizer.vocab_size)
    return time_step(config, layout, world, work).seconds


def main() -> None:
    cases, load = (*MEASURED, *PREDICTED), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        files: list[Path] = []
        for ranks, overrides in MEASURED:
            before = [f"--machine={files[-1]}"] if files else []
            files.append(Path(folder, f"measured-{len(files)}.yaml"))
            words = ["plan", str(CONFIG), f"--measure={files[-1]}", *before, f"run.root={folder}", *overrides]
            words.append(f"stages.train.tasks_per_node={ranks}")
            subprocess.run([sys.executable, "submit.py", *words], cwd=ROOT, timeout=2 * LIMIT_S, check=True)
        machine = load_machine(str(files[-1]))
    timed: dict[int, list[float]] = {number: [] for number in range(len(cases))}
    for _ in range(ROUNDS):
        for number, case in enumerate(cases):
            timed[number].append(run_ranks(case[0], step_of, config_of(*case), timeout=LIMIT_S)[0])
    rows, errors = [], []
    for number, case in enumerate(cases):
        config = config_of(*case)
        layout, real = resolve_layout(config), statistics.median(timed[number])
        work = workload_from_config(config, layout, config.data.tokenizer.vocab_size)
        found = predict_step(work, machine.in_nodes_of(layout.ranks_per_node)).step
        known = number < len(MEASURED)
        errors += [] if known else [abs(found / real - 1)]
        name = ", ".join(word.split(".", 1)[1].replace("=", " ") for word in case[1]) or "data parallel"
        spread = f"{min(timed[number]):.3f} – {max(timed[number]):.3f}"
        error = f"{100 * (found / real - 1):+.0f} %" + (" (measured)" if known else "")
        rows.append([f"{case[0]}", name, f"{real:.3f}", spread, f"{found:.3f}", error])
    note = (
        f"Seconds of a step of the quickstart's model; medians of {ROUNDS} rounds in which all take turns, load "
        f"average {load:.1f} before. `plan --measure` saw the first two. The others: median error "
        f"{100 * statistics.median(errors):.0f} %, worst {100 * max(errors):.0f} %, "
        f"{sum(error <= 0.15 for error in errors)} of {len(errors)} within 15 %. Fitted: {machine.measured}. "
        "`python -m benchmarks.measure`."
    )
    write_table(
        "measure",
        "Predicting from what was measured",
        note,
        ["ranks", "layout", "real", "least – most", "predicted", "error"],
        rows,
    )


if __name__ == "__main__":
    main()

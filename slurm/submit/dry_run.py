"""`--dry-run`: what a config would run, printed before anything is made: resolved config, sbatch scripts, and last,
where it is on the screen, the plan.

What is printed is meant to be pasted into tickets and chats, so what may be secret is masked
(pipeline/config/masking.py). The scripts that are submitted are the same, unmasked. What cannot
work is refused before (slurm/submit/rehearsal.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pipeline.base.ownership import replaceable
from pipeline.config.layout import layout_of
from pipeline.config.masking import exposed, masked
from pipeline.config.read import dump_config
from pipeline.config.sections import Config
from pipeline.config.user_model import found_for
from pipeline.data.manifest import steps_words
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from slurm.submit.rehearsal import short_time
from slurm.submit.sbatch import script


def print_plan(config: Config, on_slurm: bool, console: Console, notes: Sequence[str] = ()) -> None:
    """Print the config and, `on_slurm`, the sbatch script that each job runs; then the run, `notes` and its stages.

    Needs no Slurm. Raises UserError where a script cannot be written.
    """
    values = config.sweep.points() if config.sweep else []
    points = len(values)
    warning = exposed(config)
    config = Config.model_validate(masked(config.model_dump(mode="json")))
    run, train = Run(config.run.root / config.run.name), config.train
    warnings = filter(None, (warning, replaceable(run.path)))
    own = found_for(config, [Path.cwd(), CODE_ROOT])
    model, length, sources = config.model, config.data.sequence_length, ", ".join(config.data.sources)
    if config.data.mixture is not None:
        sources = str(config.data.mixture)
    arrays, unit = f"sequences of {length} tokens", f"sequences ({train.global_batch * length:,} tokens)"
    what = f"{model.layers} layers, dim {model.dim}, {model.heads} heads ({model.num_kv_heads} kv)"
    if own is not None:
        arrays, unit, what = ", ".join(own.arrays), "samples", f"{own.target} ({own.root})"
    lines = [
        "",
        "# ---- the plan",
        *warnings,
        f"run       {run.name}" + (" (exists)" if run.config_file.exists() else ""),
        f"data      {sources}: {arrays}",
        f"model     {what}, {train.precision}",
        f"training  {steps_words(config, run.data)} of {train.global_batch} {unit}: "
        f"{config.stages.train.ranks} ranks × {layout_of(config).micro_batches} micro-batches of {train.micro_batch}",
        *(
            f"point {number:03} {', '.join(f'{k} {v}' for k, v in point.items())}"
            for number, point in enumerate(values)
        ),
        *notes,
        "",
    ]
    jobs = []
    for stage, row in config.rows.items():
        wanted, nodes = config.stages.of(stage), ""
        if wanted.most_nodes > 1:
            fewest = f"{wanted.fewest_nodes} to " if wanted.fewest_nodes < wanted.most_nodes else ""
            nodes = f"{fewest}{wanted.most_nodes} × {wanted.per_node} = {fewest and 'at most '}"
        after = "".join(f", after {parent}" for parent in row.needs)
        each = f", for each of {points} points" if points and row.per_point else ""
        words = f"{wanted.ranks} process{'es' if wanted.ranks > 1 else ''}, {wanted.time}{after}{each}"
        lines += [f"{stage:9} {nodes}{words}", f"          python -m slurm {stage} {shlex.quote(run.name)}"]
        if warning := short_time(config, stage):
            lines.append(f"          {warning}")
        tasks = (points or 1) if row.per_point else wanted.array_tasks
        jobs.append((stage, stage, tasks))
        if row.array and tasks > 1:
            jobs.append((stage, f"{stage}, behind the array: does what it left, validates", 1))
        elif row.trains and not points and not config.site.requeue:
            jobs.append((stage, f"{stage}, its successor: takes over if it does not end well", 1))
    above = ["# ---- config, resolved", dump_config(config).rstrip()]
    for stage, heading, tasks in jobs if on_slurm else ():
        above += ["", f"# ---- on Slurm: {heading}", script(run, config, stage, tasks).rstrip()]
    console.print("\n".join([*above, *lines]), soft_wrap=True)

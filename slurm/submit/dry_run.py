"""`--dry-run`: what a config would run, printed before anything is made: plan, resolved config, sbatch scripts.

It is meant to be pasted into tickets and chats, so secrets are masked: in `setup` and `sbatch` of the site, which alone
may hold any, everything after a name that looks like one (`WANDB_API_KEY=…`, `--password …`, `Bearer …`) and passwords
in URLs. Too much may be masked, so that too little is not. The scripts that are submitted are the same, unmasked.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from rich.console import Console

from pipeline.config.layout import layout_of
from pipeline.config.read import dump_config
from pipeline.config.sections import Config
from pipeline.config.stages import STAGES
from pipeline.config.user_model import found_for
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run, with_absolute_paths
from slurm.submit.sbatch import script

_MASK = "*****"
_SECRET = re.compile(
    r"((?:token|secret|pass|pwd|key|credential|auth|bearer|cookie|login)[\w.-]*[\"']?(?:\s*[=:]\s*|\s+))\S.*",
    re.IGNORECASE | re.DOTALL,
)
_URL_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")


def mask(text: str) -> str:
    """A shell line without its secrets: what follows a name like one, to the end, and passwords in URLs."""
    return _URL_PASSWORD.sub(rf"\g<1>{_MASK}@", _SECRET.sub(rf"\g<1>{_MASK}", text))


def masked(config: Config) -> Config:
    """The config without secrets, to be shown."""
    site = config.site
    options, more = (
        {key: value if mask(f"{key}={value}") == f"{key}={value}" else _MASK for key, value in given.items()}
        for given in (site.sbatch, site.data_jobs.sbatch)
    )
    jobs = site.data_jobs.model_copy(update={"sbatch": more})
    shown = {"setup": [mask(line) for line in site.setup], "sbatch": options, "data_jobs": jobs}
    return config.model_copy(update={"site": site.model_copy(update=shown)})


def print_plan(config: Config, scripts: bool, console: Console) -> None:
    """Print the run, its stages and its config, and the sbatch script that each job runs; needs no Slurm.

    Raises UserError where a script cannot be written.
    """
    points = len(config.sweep.points()) if config.sweep else 0
    config = masked(with_absolute_paths(config))
    run, train = Run(config.run.root / config.run.name), config.train
    own = found_for(config, [Path.cwd(), CODE_ROOT])
    model, length, sources = config.model, config.data.sequence_length, ", ".join(config.data.sources)
    arrays, unit = f"sequences of {length} tokens", f"sequences ({train.global_batch * length:,} tokens)"
    what = f"{model.layers} layers, dim {model.dim}, {model.heads} heads ({model.num_kv_heads} kv)"
    if own is not None:
        arrays, unit, what = ", ".join(own.arrays), "samples", f"{own.target} ({own.root})"
    lines = [
        f"run       {run.name}" + (" (exists)" if run.config_file.exists() else ""),
        f"data      {sources}: {arrays}",
        f"model     {what}, {train.precision}",
        f"training  {train.steps} steps of {train.global_batch} {unit}: {config.stages.train.ranks} ranks × "
        f"{layout_of(config).micro_batches} micro-batches of {train.micro_batch}",
        "",
    ]
    on_slurm = []
    for stage, row in STAGES.items():
        wanted, nodes = config.stages.of(stage), ""
        if wanted.most_nodes > 1:
            fewest = f"{wanted.fewest_nodes} to " if wanted.fewest_nodes < wanted.most_nodes else ""
            nodes = f"{fewest}{wanted.most_nodes} × {wanted.per_node} = {fewest and 'at most '}"
        after = "".join(f", after {parent}" for parent in row.needs)
        each = f", for each of {points} points" if points and row.per_point else ""
        words = f"{wanted.ranks} process{'es' if wanted.ranks > 1 else ''}, {wanted.time}{after}{each}"
        lines += [f"{stage:9} {nodes}{words}", f"          python -m slurm {stage} {shlex.quote(run.name)}"]
        tasks = (points or 1) if row.per_point else wanted.array_tasks
        on_slurm.append((stage, stage, tasks))
        if row.array and tasks > 1:
            on_slurm.append((stage, f"{stage}, behind the array: does what it left, validates", 1))
        elif row.trains and not points and not config.site.requeue:
            on_slurm.append((stage, f"{stage}, its successor: takes over if it does not end well", 1))
    lines += ["", "# ---- config, resolved", dump_config(config).rstrip()]
    for stage, heading, tasks in on_slurm if scripts else ():
        lines += ["", f"# ---- on Slurm: {heading}", script(run, config, stage, tasks).rstrip()]
    console.print("\n".join(lines), soft_wrap=True)

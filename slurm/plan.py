"""`--dry-run`: what a config would run, printed before anything is made."""

from __future__ import annotations

import shlex

from rich.console import Console

from pipeline.config import Config, check_batch
from pipeline.run import Run, with_absolute_paths
from pipeline.stages import STAGES


def print_plan(config: Config, scripts: bool, console: Console) -> None:
    """Print the run, its stages, and the line or the sbatch script that each job runs."""
    config = with_absolute_paths(config)
    run = Run(config.run.root / config.run.name)
    train, ranks = config.train, config.stages.train.ranks
    lines = [
        f"run       {run.name}" + (" (exists)" if run.config_file.exists() else ""),
        f"data      {', '.join(config.data.sources)}: sequences of {config.data.sequence_length} tokens",
        f"model     {config.model.layers} layers, dim {config.model.dim}, {config.model.heads} heads "
        f"({config.model.num_kv_heads} kv), {train.precision}",
        f"training  {train.steps} steps of {train.global_batch} sequences "
        f"({train.global_batch * config.data.sequence_length:,} tokens): {ranks} ranks × "
        f"{check_batch(config, ranks)} micro-batches of {train.micro_batch}",
        "",
    ]
    for stage in STAGES:
        wanted = getattr(config.stages, stage)
        lines.append(f"{stage:9} {wanted.ranks} process{'es' if wanted.ranks > 1 else ''}")
        lines.append(f"          python -m slurm {stage} {shlex.quote(run.name)}")
    if scripts:
        from slurm.sbatch import script

        for stage in STAGES:
            tasks = config.stages.shard.tasks if stage == "shard" else 1
            lines += ["", f"# ---- on Slurm: {stage}", script(run, config, stage, tasks).rstrip()]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)

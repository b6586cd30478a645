"""Whatever can be known to go wrong with a config, told before anything is made or queued.

submit.py asks before it makes a run, and `--dry-run` before it prints a plan: what the one refuses the other refuses.
"""

from __future__ import annotations

import os

from pipeline.config.sections import Config
from pipeline.config.stages import STAGES
from pipeline.run import stages
from pipeline.run.directory import Run
from slurm.query.site_variables import refuse_unready


def rehearse(config: Config, on_slurm: bool) -> None:
    """Raise UserError where the run of `config` cannot be made, its inputs not be used, or its jobs not be written.

    Inputs are looked at where they have yet to be read, and not inside a container, whose folders are its own.
    """
    run = Run.rehearse(config)
    if config.site.container is None:
        stages.refuse_inputs(run)
    if on_slurm:
        from slurm.submit.sbatch import parameters

        refuse_unready(config.site, os.environ)
        for stage in STAGES:
            parameters(run, run.config, stage, None)
    if not run.config_file.exists():
        run.try_code()  # it may take seconds, so it comes last

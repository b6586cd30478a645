"""What the ranks of a job run in: this Python, the site's, or a container; and what srun is told for that.

The supervisor stays outside, and with it srun, the logs and Slurm's commands, which an image need not have. The run's
folders are mounted at their own paths, so nothing that a rank reads or writes has another name inside; so are
`site.scratch` and, on nodes that have it, `site.local_disk`: a mount of what is not there would end the stage, and
ranks without the folder go on. So enroot is told `nofail` (bin/enroot-mount.c), and a shell asks for apptainer, which
has no such word. The image brings Python and what Sluice imports; Sluice itself is the run's copy,
as ever.

pyxis is a plugin of srun (https://github.com/NVIDIA/pyxis), apptainer a program that each rank is started through.
Variables of the job are set inside unless the image sets them: those that must not be its own are named to both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.base.errors import UserError
from pipeline.run.directory import Run
from slurm.submit.site_environment import job_python

_IF_THERE = 'test -d "$0" && set -- "--bind=$0:$0" "$@"; exec apptainer exec "$@"'


@dataclass(frozen=True)
class RankCommand:
    """How the program of a rank is started."""

    program: tuple[str, ...]
    """The words up to the interpreter; its arguments follow."""
    srun: tuple[str, ...] = ()
    """Options of the srun that starts it."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """What it must find in its environment."""


def get_rank_command(run: Run, stage: str) -> RankCommand:
    """Where the ranks of a stage run in a job on Slurm. Raises UserError for a path that cannot be mounted."""
    site = run.config.resolve_site(stage)
    given = {key: value for key, value in site.srun.items() if value is not False}
    options = [f"--{key}" if value is True else f"--{key}={value}" for key, value in given.items()]
    box, code = site.container, str(run.code_dir)
    if box is None:
        return RankCommand((job_python(site),), tuple(options))
    disk = Path(os.path.expandvars(site.local_disk or ""))
    folders = dict.fromkeys((run.path, run.code_dir.resolve().parent, run.data_dir.resolve(), site.scratch))
    own = [str(folder) for folder in folders if folder is not None]
    local = [str(disk)] if disk.is_absolute() and "$" not in str(disk) and str(disk) not in own else []
    if awkward := [path for path in own + local if re.search(r"[,:\s]", path)]:
        raise UserError(
            "site.unmountable_path",
            f"site.container: {awkward[0]} cannot be mounted: choose a path without ',', ':' and blanks",
        )
    mounts = [path if ":" in path else f"{path}:{path}" for path in (*own, *box.mounts)]
    named = os.environ.keys() & re.findall(r"\$\{?(\w+)", site.local_disk or "")  # which ranks expand themselves
    variables = {"PYTHONPATH": code, "PYTHONSAFEPATH": "1"} | {name: os.environ[name] for name in sorted(named)}
    if box.runtime == "pyxis":
        mounted = ",".join(mounts + [f"{path}:{path}:nofail" for path in local])
        options += [f"--container-image={box.image}", f"--container-mounts={mounted}", f"--container-workdir={code}"]
        return RankCommand((box.python,), (*options, f"--container-env={','.join(variables)}"), variables)
    program = ["sh", "-c", _IF_THERE, *local] if local else ["apptainer", "exec"]
    program += [*(["--nv"] if site.gpus_per_node else []), f"--bind={','.join(mounts)}", f"--pwd={code}"]
    variables |= {f"APPTAINERENV_{name}": value for name, value in variables.items()}
    return RankCommand((*program, box.image, box.python), tuple(options), variables)

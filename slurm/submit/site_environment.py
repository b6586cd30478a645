"""What a site's profile puts into a job's environment, and what must be there for it when a job is submitted."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pipeline.base.errors import ExitCode, UserError
from pipeline.config.site import SiteConfig
from slurm.query.job_states import require_single_cluster

SETUP_NOT_RUN = "site.setup is not run here: put its lines into the shell or script that this was started from"
_PRIVATE = (0o600, 0o400)


def site_environment(site: SiteConfig) -> dict[str, str]:
    """What the site profile puts into a job's environment (NCCL's and Gloo's manuals; tempfile's TMPDIR)."""
    interface = site.network_interface
    named = {} if interface is None else {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
    return named if site.scratch is None else {**named, "TMPDIR": str(site.scratch)}


def job_python(site: SiteConfig) -> str:
    """The Python of the site's jobs. A folder that only the nodes have is told from a file by its name."""
    if site.python is None:
        return sys.executable
    program = re.fullmatch(r"python[\d.]*", site.python.name) and not site.python.is_dir()
    return str(site.python if program else site.python / "bin/python")


def export_option(site: SiteConfig) -> str | None:
    """The `--export` of the site's jobs (sbatch(1)); None where nothing is to be said of it."""
    if not site.pass_:
        return None if site.export == "all" else "NONE"
    return ",".join([*(["ALL"] if site.export == "all" else ["HOME", "PATH", "USER"]), *site.pass_])


def check_job_environment(site: SiteConfig, env: Mapping[str, str]) -> None:
    """Raise UserError where a variable of `site.pass` is not set in `env`, or `site.secrets` is not ours alone.

    And where `env` leads to another cluster.
    """
    require_single_cluster(env)
    if missing := [name for name in site.pass_ if not env.get(name)]:
        raise UserError(
            "site.variable_not_set",
            f"site.pass: {', '.join(missing)} not set in this environment: export it and repeat the command, or "
            "remove it from site.pass",
        )
    if site.secrets is None:
        return
    path = site.secrets.expanduser()
    try:
        found = path.stat()
    except OSError as error:
        raise UserError(
            "site.unreadable_secrets", f"site.secrets: {path}: {error.strerror}: create it or remove it from the config"
        ) from error
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or mode not in _PRIVATE:
        raise UserError(
            "site.secrets_readable", f"{_describe_exposure(path)} (it is of uid {found.st_uid}, mode {mode:o})"
        )


def secrets_script_lines(site: SiteConfig) -> list[str]:
    """Shell that runs `site.secrets` and exports what it sets; it ends the job where the file is not its user's alone.

    :func:`refuse_unready` looked before, but the job may start days later. The file is opened once: what is checked
    is what is run, whatever the path leads to meanwhile.
    """
    if site.secrets is None:
        return []
    path = site.secrets.expanduser()
    quoted, words = shlex.quote(str(path)), shlex.quote(f"error: {_describe_exposure(path)}")
    return [
        f"{{ [[ -f {quoted} ]] && exec {{sluice_fd}}< {quoted} && "
        # our own, an ordinary file (81..), mode 0600 or 0400
        """[[ $(stat -Lc '%u %f' "/proc/self/fd/$sluice_fd") == "$EUID 81"[08]0 ]]; } || """
        f"{{ echo {words} >&2; exit {int(ExitCode.USER_ERROR)}; }}",
        'set -a; . "/proc/self/fd/$sluice_fd"; set +a; exec {sluice_fd}<&-; unset sluice_fd',
    ]


def apply_site_environment(site: SiteConfig, job_id: str | None) -> None:
    """Set the variables of the site profile in this process, if no batch script has.

    That is the case inside salloc, and in jobs that the user wrote.

    Args:
        site: the site's config.
        job_id: the job of this process.

    Raises:
        UserError: if a variable of `site.pass` is not set, or others can read `site.secrets`.
    """
    os.environ.pop("SLURM_EXPORT_ENV", None)  # of a job with --export=NONE: its steps would get no variables either
    check_job_environment(site, os.environ)
    if os.environ.get("SLUICE_JOB_ID") == job_id:  # the batch script did this, and ran site.setup after it
        return
    os.environ.update(site_environment(site))
    if script_lines := secrets_script_lines(site):
        shell = ["bash", "-c", "\n".join([*script_lines, "env -0"])]
        output = subprocess.run(shell, stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout
        for line in output.split("\0"):
            name, _, value = line.partition("=")
            os.environ[name or "_"] = value
    if site.setup:
        print(SETUP_NOT_RUN, flush=True)


def _describe_exposure(path: Path) -> str:
    return f"site.secrets: {path} must be a file of your own that nobody else can read: chmod 600 {path}"

"""The environment of a site's jobs: variables, secrets and Python, as the site profile (`site:`) defines them.

:func:`check_job_environment` checks the environment when a job is submitted. The batch script sets it
(slurm/submit/sbatch.py). If no batch script has run, :func:`apply_site_environment` sets it in the process itself.
"""

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
from slurm.query.slurm_commands import require_single_cluster

SETUP_NOT_RUN = "site.setup is not run here: put its lines into the shell or the script that starts this command"
"""Printed if stages run where no batch script of Sluice has run the commands of `site.setup`."""
_PRIVATE_MODES = (0o600, 0o400)
"""File modes that a file of secrets may have: only its owner can read the file."""


def build_site_environment(site: SiteConfig) -> dict[str, str]:
    """Return the environment variables that the site profile sets: network interface of NCCL and Gloo, and TMPDIR."""
    environment: dict[str, str] = {}
    if site.network_interface is not None:
        environment |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), site.network_interface)
    if site.scratch is not None:
        environment["TMPDIR"] = str(site.scratch)
    return environment


def get_job_python(site: SiteConfig) -> str:
    """Return the Python interpreter of the site's jobs.

    `site.python` is an interpreter or a virtual environment. The path may exist on the compute nodes only. If the last
    part of the path looks like `python3.11`, the path is an interpreter, unless it is a directory on this machine.
    """
    if site.python is None:
        return sys.executable
    is_interpreter = re.fullmatch(r"python[\d.]*", site.python.name) and not site.python.is_dir()
    return str(site.python if is_interpreter else site.python / "bin/python")


def build_export_option(site: SiteConfig) -> str | None:
    """Return sbatch's option `--export` for the site's jobs; None for the default, which exports all variables."""
    if not site.pass_:
        return None if site.export == "all" else "NONE"
    # with a list of variables instead of NONE, a job does not start with the environment of a login shell
    return ",".join([*(["ALL"] if site.export == "all" else ["HOME", "PATH", "USER"]), *site.pass_])


def check_job_environment(site: SiteConfig, env: Mapping[str, str]) -> None:
    """Check that a job with this environment can start.

    Args:
        site: the site's config.
        env: the environment in which the job is submitted.

    Raises:
        UserError: if a variable of `site.pass` is unset or empty, or `env` selects another cluster. Also if
            `site.secrets` cannot be found, is not a file, belongs to another user, or has a mode other than 0600 and
            0400.
    """
    require_single_cluster(env)
    if unset := [name for name in site.pass_ if not env.get(name)]:
        raise UserError(
            "site.variable_not_set",
            f"site.pass: {', '.join(unset)} not set in this environment: export it and repeat the command, or "
            "remove it from site.pass",
        )
    if site.secrets is None:
        return
    path = site.secrets.expanduser()
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(
            "site.unreadable_secrets", f"site.secrets: {path}: {error.strerror}: create it or remove it from the config"
        ) from error
    mode = stat.S_IMODE(status.st_mode)
    is_own_file = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own_file or mode not in _PRIVATE_MODES:
        raise UserError(
            "site.secrets_readable",
            f"{_describe_exposure(path)} (its owner has uid {status.st_uid}, its mode is {mode:o})",
        )


def secrets_script_lines(site: SiteConfig) -> list[str]:
    """Return shell lines that run `site.secrets` and export the variables that it sets.

    The lines end the job if the file is not private to its user. :func:`check_job_environment` also checks this at
    submission, but the job may start days later. The path is opened only once. The check and the shell then use the
    open file descriptor, so the shell runs the file that was checked, even if the path is replaced after the check.
    """
    if site.secrets is None:
        return []
    path = site.secrets.expanduser()
    quoted = shlex.quote(str(path))
    message = shlex.quote(f"error: {_describe_exposure(path)}")
    return [
        f"{{ [[ -f {quoted} ]] && exec {{sluice_fd}}< {quoted} && "
        # %u is the owner's uid in decimal, %f the type and mode in hexadecimal: 8180 is a regular file with mode 0600,
        # 8100 one with 0400
        """[[ $(stat -Lc '%u %f' "/proc/self/fd/$sluice_fd") == "$EUID 81"[08]0 ]]; } || """
        f"{{ echo {message} >&2; exit {int(ExitCode.USER_ERROR)}; }}",
        'set -a; . "/proc/self/fd/$sluice_fd"; set +a; exec {sluice_fd}<&-; unset sluice_fd',
    ]


def apply_site_environment(site: SiteConfig, job_id: str | None) -> None:
    """Set the variables of the site profile in this process, unless the batch script has already set them.

    Inside salloc, and in batch scripts that users write, no script of Sluice has set the variables. The commands of
    `site.setup` are not run there either, and a message says so.

    Args:
        site: the site's config.
        job_id: the id of this process's job. If SLUICE_JOB_ID has the same value, Sluice submitted the job, and the
            batch script has set the variables.

    Raises:
        UserError: as :func:`check_job_environment`.
    """
    # in a job with --export=NONE, Slurm sets this variable, and srun would pass no variables to the job's steps
    os.environ.pop("SLURM_EXPORT_ENV", None)
    check_job_environment(site, os.environ)
    if os.environ.get("SLUICE_JOB_ID") == job_id:  # the batch script has set the variables and run site.setup
        return
    os.environ.update(build_site_environment(site))
    if script_lines := secrets_script_lines(site):
        shell = ["bash", "-c", "\n".join([*script_lines, "env -0"])]
        output = subprocess.run(shell, stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout
        for line in output.split("\0"):
            name, _, value = line.partition("=")
            os.environ[name or "_"] = value  # after the last "\0" there is an empty text, which has no name
    if site.setup:
        print(SETUP_NOT_RUN, flush=True)


def _describe_exposure(path: Path) -> str:
    """Return an error message about a file of secrets that is not private to its user."""
    return f"site.secrets: {path} must be your own file and readable only by you: chmod 600 {path}"

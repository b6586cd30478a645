"""What a job may ask Slurm for, as a site says it for all jobs, and a stage for its own.

`site.partition` holds for every stage, `stages.evaluate.partition` for one. Options that every cluster has are keys, so
that they are checked before anything is submitted; the rest is a mapping of sbatch's own long options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PositiveInt, SerializerFunctionWrapHandler, model_serializer

from pipeline.config.types import NonNegativeInt, PositiveFloat, Section

_OPTION = re.compile(r"[a-z][a-z0-9]+(-[a-z0-9]+)*")

OWN_OPTIONS = {
    "account": "site.account", "constraint": "site.constraint", "cpus-per-task": "site.cpus_per_task",
    "distribution": "site.distribution", "gpus-per-node": "site.gpus_per_node", "gres": "site.gpus_per_node",
    "mem": "site.mem_gb", "nodes": "stages.STAGE.nodes", "ntasks-per-node": "stages.STAGE.tasks_per_node",
    "partition": "site.partition", "qos": "site.qos", "signal": "site.signal_s", "switches": "site.switches",
    "time": "stages.STAGE.time",
    "array": "", "chdir": "", "clusters": "a login node of that cluster: all jobs of a run are on one", "comment": "",
    "dependency": "", "error": "", "export": "site.export", "export-file": "site.secrets",
    "get-user-env": "", "ignore-pbs": "", "job-name": "", "kill-on-invalid-dep": "", "no-requeue": "site.requeue",
    "open-mode": "", "output": "", "parsable": "", "requeue": "site.requeue", "test-only": "", "uid": "", "wait": "",
    "wrap": "",
}  # fmt: skip
"""Options of sbatch that Sluice sets, and the key (or whatever else) to use instead where there is one."""
OWN_SRUN_OPTIONS = {
    "container-env": "site.container", "container-image": "site.container", "container-mounts": "site.container",
    "container-workdir": "site.container", "cpus-per-task": "site.cpus_per_task", "distribution": "site.distribution",
    "mpi": "SLURM_MPI_TYPE in site.setup", "nodes": "stages.STAGE.nodes", "ntasks-per-node":
    "stages.STAGE.tasks_per_node", "chdir": "", "clusters": OWN_OPTIONS["clusters"], "error": "",
    "export": "site.export", "input": "", "jobid": "", "kill-on-bad-exit": "", "label": "", "multi-prog": "",
    "ntasks": "", "open-mode": "", "output": "", "pty": "", "unbuffered": "", "wait": "",
}  # fmt: skip
"""The same of srun."""


def _options(program: str, own: Mapping[str, str]) -> BeforeValidator:
    """A check that a mapping holds long options of `program`, and none of its `own` that Sluice sets."""

    def check(value: Any) -> Any:
        for key in value if isinstance(value, dict) else ():
            if not isinstance(key, str) or not _OPTION.fullmatch(key):
                raise ValueError(
                    f"{key!r} is no long option of {program}; write it as {program} does, without dashes in front"
                )
            meant = key if key in own else next((option for option in own if option.startswith(key)), None)
            if meant is not None:  # abbreviations are taken, too
                instead = f"use {own[meant]}" if own[meant] else f"Sluice sets --{meant} itself"
                raise ValueError(f"{key}: {instead}")
        return value

    return BeforeValidator(check)


SbatchOptions = Annotated[dict[str, str | int | bool], _options("sbatch", OWN_OPTIONS)]
SrunOptions = Annotated[dict[str, str | int | bool], _options("srun", OWN_SRUN_OPTIONS)]


class JobRequest(Section):
    """What some jobs ask for instead of what `site` says; null: what that says."""

    partition: str | None = None
    """Slurm partition."""
    account: str | None = None
    """Slurm account that is charged."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that the nodes must have; "": none."""
    cpus_per_task: PositiveInt | None = None
    """CPUs of each process; the tokenizer uses them all."""
    mem_gb: PositiveFloat | None = None
    """Memory per node in GB."""
    gpus_per_node: NonNegativeInt | None = None
    """GPUs asked for on each node; null: one for each rank, at most `site.gpus_per_node`, and none for prepare and
    shard."""
    sbatch: SbatchOptions = Field(default_factory=dict)
    """Options of sbatch on top of those before; `exclusive: false` takes that one back."""

    @model_serializer(mode="wrap")
    def _what_is_said(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Only that, or each stage would be a column of nulls."""
        return {key: value for key, value in write(self).items() if value is not None and value != {}}

    def over(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """The values of `base` with what is said here in their place."""
        own = {name: getattr(self, name) for name in JobRequest.model_fields}
        said = {name: value for name, value in own.items() if value is not None}
        return {**base, **said, "sbatch": {**base["sbatch"], **self.sbatch}}

"""The `site` section: settings that differ between clusters, written once in `configs/sites/NAME.yaml`.

A run refers to this file with `site: {extends: sites/mycluster.yaml}`. Options of sbatch that every cluster has are
separate keys, so that they are checked before anything is submitted. Options that only some clusters have go into
`sbatch`, a mapping of the long options of sbatch(1). slurm/submit/sbatch.py writes the job script from these keys.

A stage can override many of the keys (:class:`JobRequest`): `site.partition` applies to every stage, and
`stages.evaluate.partition` applies only to the stage `evaluate`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, SerializerFunctionWrapHandler, model_serializer

from pipeline.config.types import NonNegativeInt, Policy, PositiveFloat, SecretReference, Section, must_match

_DISTRIBUTION = re.compile(
    r"(\*|block|cyclic|plane=[1-9]\d*)(:(\*|block|cyclic|fcyclic)){0,2}(,(Pack|NoPack))?", re.IGNORECASE
)
_SWITCHES = re.compile(r"[1-9]\d*(@(\d+-)?\d+(:\d\d){0,2})?")
_INTERFACES = re.compile(r"[A-Za-z0-9_.-]{1,15}(,[A-Za-z0-9_.-]{1,15})*")
_POOL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

_OPTION = re.compile(r"[a-z][a-z0-9]+(-[a-z0-9]+)*")

OWN_OPTIONS = {
    "account": "site.account", "constraint": "site.constraint", "cpus-per-task": "site.cpus_per_task",
    "distribution": "site.distribution", "gpus-per-node": "site.gpus_per_node", "gres": "site.gpus_per_node",
    "mem": "site.mem_gb", "nodes": "stages.STAGE.nodes", "ntasks-per-node": "stages.STAGE.tasks_per_node",
    "partition": "site.partition", "qos": "site.qos", "signal": "site.signal_s", "switches": "site.switches",
    "time": "stages.STAGE.time",
    "array": "", "chdir": "", "clusters": "a login node of that cluster: all jobs of a run are on one cluster",
    "comment": "",
    "dependency": "", "error": "", "export": "site.export", "export-file": "site.secrets",
    "get-user-env": "", "ignore-pbs": "", "job-name": "", "kill-on-invalid-dep": "", "no-requeue": "site.requeue",
    "open-mode": "", "output": "", "parsable": "", "requeue": "site.requeue", "test-only": "", "uid": "", "wait": "",
    "wrap": "",
}  # fmt: skip
"""Options of sbatch that Sluice sets itself, and the config key to use instead; "" if there is none."""
OWN_SRUN_OPTIONS = {
    "container-env": "site.container", "container-image": "site.container", "container-mounts": "site.container",
    "container-workdir": "site.container", "cpus-per-task": "site.cpus_per_task", "distribution": "site.distribution",
    "mpi": "SLURM_MPI_TYPE in site.setup", "nodes": "stages.STAGE.nodes", "ntasks-per-node":
    "stages.STAGE.tasks_per_node", "chdir": "", "clusters": OWN_OPTIONS["clusters"], "error": "",
    "export": "site.export", "input": "", "jobid": "", "kill-on-bad-exit": "", "label": "", "multi-prog": "",
    "ntasks": "", "open-mode": "", "output": "", "pty": "", "unbuffered": "", "wait": "",
}  # fmt: skip
"""Options of srun that Sluice sets itself, and the config key to use instead; "" if there is none."""


def _check_options(program: str, reserved: Mapping[str, str]) -> BeforeValidator:
    """Return a validator for a mapping of long options of `program`.

    Args:
        program: the name of the program, for messages.
        reserved: option that Sluice sets itself → the key to use instead; "" if there is none. These options are
            errors.
    """

    def check_names(value: Any) -> Any:
        """Return `value`. Raises ValueError if a key is not a long option, or is an option that Sluice sets."""
        for key in value if isinstance(value, dict) else ():
            if not isinstance(key, str) or not _OPTION.fullmatch(key):
                raise ValueError(
                    f"{key!r} is not a long option of {program}: write the name as {program} does, without dashes in "
                    "front"
                )
            # sbatch and srun accept abbreviated options, so an abbreviation of a reserved option is also an error
            option = key if key in reserved else next((name for name in reserved if name.startswith(key)), None)
            if option is not None:
                hint = f"use {reserved[option]}" if reserved[option] else f"Sluice sets --{option} itself"
                raise ValueError(f"{key}: {hint}")
        return value

    return BeforeValidator(check_names)


SbatchOptions = Annotated[dict[str, str | int | bool], _check_options("sbatch", OWN_OPTIONS)]
SrunOptions = Annotated[dict[str, str | int | bool], _check_options("srun", OWN_SRUN_OPTIONS)]


class Request(Section):
    """Options that jobs request from Slurm. If a key of a stage is null, the key of `site` applies. If that key is also
    null, the default of the cluster applies."""

    partition: str | None = None
    """Slurm partition."""
    account: str | None = None
    """Slurm account to charge."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that the nodes must have, in the syntax of `sbatch --constraint`. "": request no features, even if
    another section requests some."""
    cpus_per_task: PositiveInt | None = None
    """Number of CPUs for each process (rank). A process that tokenizes uses all of its CPUs."""
    mem_gb: PositiveFloat | None = None
    """Memory per node in GB."""
    sbatch: Annotated[SbatchOptions, Policy.OPTIONS] = Field(default_factory=dict)
    """More options of sbatch, by their long names. Write `true` for an option without a value, and `false` to omit an
    option that `site` sets. The options of a stage are added to the options in `site.sbatch`."""


class JobRequest(Request):
    """Options that some jobs request instead of the options in `site`; null: use the value of `site`."""

    gpus_per_node: NonNegativeInt | None = None
    """Number of GPUs to request on each node. null: none for the stages prepare, shard and publish, and for
    arrays of commands; for other stages, one for each process on the node, but at most `site.gpus_per_node`."""

    @model_serializer(mode="wrap")
    def _omit_unset_keys(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the values without null, {} and []. Otherwise, config.yaml would contain many nulls for each stage."""
        return {key: value for key, value in serialize(self).items() if value not in (None, {}, [])}

    def override(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """Return `base` with the values that are set in this section. The `sbatch` options of both are merged."""
        values = {name: getattr(self, name) for name in JobRequest.model_fields}
        set_values = {name: value for name, value in values.items() if value is not None}
        return {**base, **set_values, "sbatch": {**base["sbatch"], **self.sbatch}}


class StripeConfig(Section):
    """How shards are striped on Lustre (`lfs setstripe`). This section has no effect on other file systems."""

    count: Annotated[int, Field(ge=-1)] = 1
    """Number of storage targets for each shard (`-c`). 1 is a good value for many shards of 1 GB. -1: all targets. 0:
    the default of the file system."""
    size_mb: PositiveInt | None = None
    """Size of a stripe in MiB (`-S`); null: the default of the file system."""
    pool: Annotated[str, must_match(_POOL, "write the name of a pool, as `lfs pool_list` shows it")] | None = None
    """Pool of storage targets (`-p`), such as `flash`; null: any targets."""


AbsolutePath = Annotated[
    Path,
    must_match(
        re.compile("(?s)/.*"),
        "write an absolute path; to use variables, write a line such as `export TMPDIR=…` in site.setup",
    ),
]
SecretsFile = Annotated[
    Path, must_match(re.compile(r"(?s)(/|~/).*"), "write an absolute path, or one that starts with ~/")
]
VariableName = Annotated[
    str, must_match(re.compile("[A-Za-z_][A-Za-z0-9_]*"), "write the name of a variable, without a value")
]


_MOUNT = re.compile(r"/[^,:\s]*(:/[^,:\s]*(:[a-z]+)?)?")
Mount = Annotated[str, must_match(_MOUNT, "write /PATH, /OUTSIDE:/INSIDE or /OUTSIDE:/INSIDE:ro")]
ImageName = Annotated[
    str, must_match(re.compile(r"[^-\s]\S*"), "write a name without spaces that does not start with a dash")
]


class Container(Section):
    """A container for the ranks. The supervisor of the job runs outside the container (slurm/supervise/launch.py)."""

    runtime: Literal["pyxis", "apptainer"]
    """Program that starts the container: `pyxis` (the plugin of srun) or `apptainer` (`apptainer exec`)."""
    image: ImageName
    """Image in the syntax of the runtime: `/shared/torch.sqsh`, `nvcr.io#nvidia/pytorch:25.06-py3`,
    `/shared/torch.sif`."""
    mounts: list[Mount] = Field(default_factory=list)
    """More paths to mount, such as the files of `data.source`: `/PATH`, `/OUTSIDE:/INSIDE` or `/OUTSIDE:/INSIDE:ro`.
    The run directory, its data, `site.scratch` and `site.local_disk` are always mounted."""
    python: ImageName = "python3"
    """Python interpreter in the container. All packages that Sluice imports must be installed for this interpreter."""


class SiteConfig(Request):
    """The cluster. `extends: sites/mycluster.yaml` reads it from a separate file."""

    gpus_per_node: NonNegativeInt = 0
    """Number of GPUs of a node. By default, a stage requests one GPU for each rank on the node, but at most this
    number."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of each GPU in GiB, as `nvidia-smi` shows it (MiB / 1024). `plan` rejects a layout that needs more."""
    machine: str | None = None
    """Machine file for the predictions of `plan`: the name of a file in configs/machines, such as `h100`, or the
    absolute path of another machine file (docs/planning.md)."""
    gpus_as: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """How GPUs are requested: with `--gpus-per-node`, with `--gres=gpu:N`, or not at all (`none`). Use `none` if jobs
    get whole nodes with all GPUs."""
    gpu_type: str | None = None
    """Type of GPU to request, such as `h100`."""
    distribution: (
        Annotated[str, must_match(_DISTRIBUTION, "write it as in sbatch: block, cyclic or plane=4")] | None
    ) = None
    """Distribution of the ranks over nodes (`--distribution`), such as `block:cyclic`; null: the default of the
    cluster."""
    switches: Annotated[str, must_match(_SWITCHES, 'write "COUNT" or "COUNT@TIME", such as "1@00:05:00"')] | None = None
    """Largest number of leaf switches that connect the nodes of a job, and how long to wait for such nodes
    (`--switches`), such as `1@00:05:00`."""
    network_interface: (
        Annotated[str, must_match(_INTERFACES, "write the name of an interface such as ib0, or ib0,ib1")] | None
    ) = None
    """Network interface that ranks use, such as `ib0`. Jobs receive its name as NCCL_SOCKET_IFNAME and
    GLOO_SOCKET_IFNAME."""
    scratch: AbsolutePath | None = None
    """Directory for temporary files. The directory must exist on every node, preferably on a local disk. Jobs receive
    its path as TMPDIR."""
    local_disk: str | None = None
    """Directory on the local disk of each node, such as `$TMPDIR` or `/local/$SLURM_JOB_ID`. During training, Sluice
    copies shards to this directory and then reads the copies. null: no copies."""
    stripe: StripeConfig = StripeConfig()
    """How shards are striped on Lustre."""
    data_jobs: JobRequest = JobRequest()
    """Options for the jobs of the stages `prepare`, `shard` and `publish`. By default, these jobs use no GPUs. These
    options override the options in `site`."""
    python: AbsolutePath | None = None
    """Python interpreter on the nodes, or the directory of a conda or virtual environment. All packages that Sluice
    imports must be installed for this interpreter. null: the interpreter that submits the jobs."""
    container: Container | None = None
    """Container for the ranks; null: ranks run directly on the nodes."""
    srun: Annotated[SrunOptions, Policy.OPTIONS] = Field(default_factory=dict)
    """More options of the srun command that starts the ranks, by their long names, such as `cpu-bind: cores`."""
    signal_s: Annotated[int, Field(ge=10, le=65535)] = 90
    """Number of seconds before the time limit at which Slurm sends a signal, so that the ranks save a checkpoint and
    exit."""
    requeue: bool = True
    """Whether jobs may be requeued. Set false if the cluster rejects `--requeue`, or if preemption cancels jobs instead
    of requeueing them. A successor job then continues training when the job of the train stage stops. Requeueing also
    works on clusters with JobRequeue=0, because jobs request `--requeue`."""
    setup: Annotated[list[str], Policy.SHELL] = Field(default_factory=list)
    """Shell lines that each job runs first, such as `module load`. Do not write secrets here, because they would be
    stored in config.yaml. Use `secrets` or `pass` instead."""
    secrets: Annotated[SecretsFile | None, SecretReference("None|~?/.*")] = None
    """Shell file with secrets. You must own this file, and its mode must be 0600 or 0400. Each job runs the file before
    `setup` and exports all variables that the file sets."""
    pass_: Annotated[list[VariableName], SecretReference(r"[A-Za-z_]\w*")] = Field(default_factory=list, alias="pass")
    """Environment variables of the submitting shell that jobs receive, such as WANDB_API_KEY. The variables are passed
    with `sbatch --export`, and Sluice writes their values to no file. If a variable is not set in the shell, `submit`
    and `resume` fail."""
    export: Literal["all", "none"] = "all"
    """Which other environment variables of the submitting shell jobs receive. `none` is for sites that require
    `--export=NONE`. A job then starts with the environment of a login shell. If `pass` is also set, the job starts only
    with HOME, PATH, USER and the variables of `pass`."""

    @model_serializer(mode="wrap")
    def _remove_underscore(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the values with the key `pass`. The field is named `pass_`, because `pass` is a keyword of Python."""
        return {key.rstrip("_"): value for key, value in serialize(self).items()}

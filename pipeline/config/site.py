"""The `site` section: what differs from cluster to cluster, written once in `configs/sites/NAME.yaml`.

A run says `site: {extends: sites/mycluster.yaml}`. Options of sbatch that every cluster has are keys of their own, so
that they are checked before anything is submitted; what only some clusters have goes into `sbatch`, a mapping of
sbatch's own long options (sbatch(1)). slurm/submit/sbatch.py turns all of it into a job. Much of it a stage may say for
itself: `site.partition` holds for every stage, `stages.evaluate.partition` for one (:class:`JobRequest`).
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


class Request(Section):
    """What jobs ask of Slurm; null: what stands above, `site` above its stages and the cluster above that."""

    partition: str | None = None
    """Slurm partition."""
    account: str | None = None
    """Slurm account that is charged."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that the nodes must have, as sbatch takes them; "": none."""
    cpus_per_task: PositiveInt | None = None
    """CPUs of each process (rank); the tokenizer uses them all."""
    mem_gb: PositiveFloat | None = None
    """Memory per node in GB."""
    sbatch: Annotated[SbatchOptions, Policy.OPTIONS] = Field(default_factory=dict)
    """More options of sbatch, by their long names: a value, `true` for an option without one, `false` for one that is
    not given after all. A stage's come on top of the site's."""


class JobRequest(Request):
    """What some jobs ask for instead of what `site` says; null: what that says."""

    gpus_per_node: NonNegativeInt | None = None
    """GPUs asked for on each node; null: one for each rank, at most `site.gpus_per_node`, and none for prepare and
    shard."""

    @model_serializer(mode="wrap")
    def _what_is_said(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Only that, or each stage would be a column of nulls."""
        return {key: value for key, value in write(self).items() if value is not None and value != {}}

    def override(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """The values of `base` with what is said here in their place."""
        own = {name: getattr(self, name) for name in JobRequest.model_fields}
        said = {name: value for name, value in own.items() if value is not None}
        return {**base, **said, "sbatch": {**base["sbatch"], **self.sbatch}}


class StripeConfig(Section):
    """How shards are striped where they lie on Lustre (`lfs setstripe`); elsewhere it has no effect."""

    count: Annotated[int, Field(ge=-1)] = 1
    """Storage targets of each shard (`-c`); 1 suits many shards of 1 GB, -1 means all, 0 what the system says."""
    size_mb: PositiveInt | None = None
    """Bytes written to one target before the next, in MiB (`-S`); null: what the system says."""
    pool: Annotated[str, must_match(_POOL, "write the name of a pool, as `lfs pool_list` does")] | None = None
    """Pool of storage targets (`-p`), such as `flash`; null: any."""


AbsolutePath = Annotated[
    Path,
    must_match(
        re.compile("(?s)/.*"), "write an absolute path; one with variables goes into site.setup: export TMPDIR=…"
    ),
]
SecretsFile = Annotated[Path, must_match(re.compile(r"(?s)(/|~/).*"), "write an absolute path, or one from ~/")]
VariableName = Annotated[str, must_match(re.compile("[A-Za-z_][A-Za-z0-9_]*"), "write names of variables, no values")]


_MOUNT = re.compile(r"/[^,:\s]*(:/[^,:\s]*(:[a-z]+)?)?")
Mount = Annotated[str, must_match(_MOUNT, "write /PATH, /OUTSIDE:/INSIDE or /OUTSIDE:/INSIDE:ro")]
ImageName = Annotated[str, must_match(re.compile(r"[^-\s]\S*"), "write an image as the runtime takes it")]


class Container(Section):
    """An image that ranks run in; their supervisor runs outside (slurm/supervise/launch.py)."""

    runtime: Literal["pyxis", "apptainer"]
    """What starts it: the plugin of srun, or `apptainer exec`."""
    image: ImageName
    """As the runtime takes it: `/shared/torch.sqsh`, `nvcr.io#nvidia/pytorch:25.06-py3`, `/shared/torch.sif`."""
    mounts: list[Mount] = Field(default_factory=list)
    """What ranks see of the nodes besides the run, its data, `site.scratch` and `site.local_disk`: the files of
    data.source, for one."""
    python: ImageName = "python3"
    """The interpreter inside, with all that Sluice imports."""


class SiteConfig(Request):
    """The cluster. `extends: sites/mycluster.yaml` keeps it in a file of its own."""

    gpus_per_node: NonNegativeInt = 0
    """GPUs of a node: a stage asks for one for each of its ranks there, at most so many."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of each GPU in GiB, as `nvidia-smi` says (MiB / 1024): `plan` refuses a layout that needs more."""
    machine: str | None = None
    """What `plan` predicts for: a name in configs/machines, such as `h100`, or the absolute path of such a file."""
    gpus_as: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """How GPUs are asked for: `--gpus-per-node`, `--gres=gpu:N`, or `none` where whole nodes come with theirs."""
    gpu_type: str | None = None
    """Type of GPU to ask for, such as `h100`."""
    distribution: (
        Annotated[str, must_match(_DISTRIBUTION, "write it as sbatch does: block, cyclic or plane=4")] | None
    ) = None
    """How ranks are spread over nodes (`--distribution`), such as `block:cyclic`; null: what the site does."""
    switches: Annotated[str, must_match(_SWITCHES, 'write "COUNT" or "COUNT@TIME", such as "1@00:05:00"')] | None = None
    """Most leaf switches a job may span, and how long to wait for so few (`--switches`), such as `1@00:05:00`."""
    network_interface: (
        Annotated[str, must_match(_INTERFACES, "write the name of an interface such as ib0, or ib0,ib1")] | None
    ) = None
    """Interface that ranks talk over: jobs get it as NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME."""
    scratch: AbsolutePath | None = None
    """Folder for temporary files that exists on every node, best on its own disk: jobs get it as TMPDIR."""
    local_disk: str | None = None
    """Folder on each node's own disk, such as `$TMPDIR` or `/local/$SLURM_JOB_ID`, that shards are copied to while
    training runs, and read from then on."""
    stripe: StripeConfig = StripeConfig()
    """How shards are striped on Lustre."""
    data_jobs: JobRequest = JobRequest()
    """What prepare and shard ask for instead: each job is one process, without a GPU. Short for both stages."""
    python: AbsolutePath | None = None
    """Interpreter on the nodes, or the folder of a conda or virtual environment there, with all that Sluice imports;
    null: the one that submits."""
    container: Container | None = None
    """What ranks run in; null: nothing but the node."""
    srun: Annotated[SrunOptions, Policy.OPTIONS] = Field(default_factory=dict)
    """More options of the srun that starts the ranks, by their long names, such as `cpu-bind: cores`."""
    signal_s: Annotated[int, Field(ge=10, le=65535)] = 90
    """How many seconds before the time limit Slurm tells the ranks to save and leave."""
    requeue: bool = True
    """Whether jobs may be put back into the queue; false where the site refuses `--requeue` or its preemption cancels:
    then a successor job waits for the training's end and takes over. (Jobs ask for it: JobRequeue=0 is no obstacle.)"""
    setup: Annotated[list[str], Policy.SHELL] = Field(default_factory=list)
    """Shell lines run in each job before anything else (modules, variables). No place for secrets: they would stand in
    config.yaml; take `secrets` or `pass`."""
    secrets: Annotated[SecretsFile | None, SecretReference("None|~?/.*")] = None
    """A shell file of your own that nobody else can read (mode 0600); each job runs it before `setup`, and exports all
    variables that it sets."""
    pass_: Annotated[list[VariableName], SecretReference(r"[A-Za-z_]\w*")] = Field(default_factory=list, alias="pass")
    """Variables such as WANDB_API_KEY that jobs get from the shell that submits them, by sbatch's own `--export`: their
    values are written nowhere. Nothing is submitted, or resumed, from a shell that has not all of them."""
    export: Literal["all", "none"] = "all"
    """What else of the submitting shell's environment jobs get; `none` for sites that ask for `--export=NONE`: a job
    begins as a login does, or with HOME, PATH, USER and `pass`."""

    @model_serializer(mode="wrap")
    def _as_it_is_written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """`pass` is a word of Python's own, and no name for a field."""
        return {key.rstrip("_"): value for key, value in write(self).items()}

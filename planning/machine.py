"""Describe the machine that a prediction is for: a GPU, the links inside a node, and the links between nodes.

Files in `configs/machines/` describe common machines. You can write a file with the same keys for another machine, or
measure a machine with `python -m planning.calibrate`.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError, model_validator

from pipeline.base.errors import UserError, make_printable
from pipeline.config.types import Section
from pipeline.run.code import CODE_ROOT
from planning.workload import Workload

MACHINES = CODE_ROOT / "configs" / "machines"


class Link(Section):
    """The connection of one GPU to other GPUs."""

    bandwidth: PositiveFloat
    """Bytes per second in one direction."""
    latency: PositiveFloat
    """Seconds per message, and per hop of a collective."""


class Attention(Section):
    """FLOP/s of fused attention: forward, causal, head size 128."""

    portable: PositiveFloat
    """With FlashAttention 2, which most frameworks use."""
    native: PositiveFloat
    """With kernels that are written for this generation of GPUs: cuDNN, FlashAttention 3."""


class Overheads(Section):
    """Overheads that planning.calibrate fits to timed steps.

    `eager` replaces `Constants.eager` (planning/predict.py).
    """

    eager: PositiveFloat
    """Memory traffic of unfused operators, as a multiple of the traffic of fused operators."""
    call: NonNegativeFloat
    """Seconds of host time per collective, in addition to the time on the link."""


class Exchange(Section):
    """A timed collective, or a timed message (`send`). All ranks took part at the same time."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "send"]
    size: PositiveInt
    """Bytes of the whole tensor, not of a shard."""
    ranks: PositiveInt
    """Number of ranks of the group."""
    between: bool
    """Whether each rank of the group is on a different node."""
    seconds: PositiveFloat


class Step(Section):
    """A timed training step."""

    work: Workload
    ranks_per_node: PositiveInt
    seconds: PositiveFloat

    @model_validator(mode="after")
    def _check_sizes(self) -> Step:
        """Raise ValueError if an integer of the workload is less than 1, except integers that may be 0."""
        may_be_zero = ("head_size", "experts", "zero", "trained_from")
        # `isinstance` is not used, because a bool is also an instance of int.
        sizes = {name: size for name, size in vars(self.work).items() if type(size) is int and name not in may_be_zero}
        if invalid := [name for name, size in sizes.items() if size < 1]:
            raise ValueError(f"work.{invalid[0]} is {sizes[invalid[0]]}")
        return self


class Timings(Section):
    """Timings that all ranks measured at the same time: medians on the slowest rank, in seconds."""

    products: list[tuple[PositiveInt, PositiveInt, PositiveInt, PositiveFloat]]
    """Rows, columns, inner size and seconds of matrix products in the precision of the first step."""
    attention: PositiveFloat
    """Seconds of the attention of one block of the first step, forward."""
    copied: tuple[PositiveInt, PositiveFloat]
    """Bytes and seconds of a copy."""
    exchanges: list[Exchange]
    steps: Annotated[list[Step], Field(min_length=1)]


class Machine(Section):
    """The content of a machine file."""

    gpu: str
    """Name of the GPU."""
    memory_gib: PositiveFloat
    """Memory of a GPU in GiB."""
    bandwidth: PositiveFloat
    """Bytes per second of the GPU's memory."""
    multiprocessors: PositiveInt
    """Number of multiprocessors of a GPU."""
    peak: Annotated[dict[str, PositiveFloat], Field(min_length=1)]
    """FLOP/s by precision, dense, from the vendor's data sheet."""
    achievable: dict[str, PositiveFloat]
    """FLOP/s of a large matrix product, by precision."""
    attention: Attention
    gpus_per_node: PositiveInt
    """Number of GPUs that the links inside a node connect."""
    inside: Link
    """The links between GPUs of one node."""
    between: Link
    """The links between nodes, for each GPU."""
    cores: PositiveInt | None = None
    """For CPUs: number of ranks that a node runs at full speed. Further ranks share the cores, and communication does
    not overlap with computation. null: each rank has a GPU."""
    measured: Overheads | None = None
    """Overheads fitted to steps on this machine. If set, the other figures are also measured, and predictions do not
    scale them with `Constants`."""
    timings: Timings | None = None
    """The timings to which the figures were fitted. Predictions do not use these timings."""

    def rate(self, precision: str) -> float:
        """Return the achievable FLOP/s in a precision. If fp16 is not listed, bf16 is used instead, and the reverse.

        Raises:
            UserError: The machine does not support the precision.
        """
        substitute = {"fp16": "bf16", "bf16": "fp16"}.get(precision, precision)
        for name in (precision, substitute):
            if name in self.achievable:
                return self.achievable[name]
        supported = ", ".join(self.achievable)
        raise UserError("plan.unsupported_precision", f"{self.gpu} has no {precision}; it has {supported}")

    def with_gpus_per_node(self, ranks: int) -> Machine:
        """Return the machine with `ranks` GPUs per node.

        If the links inside connect more than 8 GPUs, the machine is a rack of several nodes and is returned unchanged.
        This does not apply to CPUs.
        """
        is_rack = self.gpus_per_node > 8 and self.cores is None
        return self if is_rack else self.model_copy(update={"gpus_per_node": ranks})

    @property
    def ranks_per_core(self) -> float:
        """Number of ranks that share one core; 1 if each rank has a core or a GPU."""
        return max(1.0, self.gpus_per_node / self.cores) if self.cores else 1.0

    @property
    def peak_bf16(self) -> float:
        """Peak FLOP/s to which MFU is relative: those of bf16, otherwise of fp16, otherwise the highest ones."""
        return self.peak.get("bf16") or self.peak.get("fp16") or max(self.peak.values())


def load_machine(name: str) -> Machine:
    """Load the machine `name` of configs/machines. If there is none, load the machine file with the path `name`.

    Raises:
        UserError: There is no such machine, or its file is invalid.
    """
    names = sorted(path.stem for path in MACHINES.glob("*.yaml"))
    path = MACHINES / f"{name}.yaml" if name in names else Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(name.lower(), names, 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else "."
        message = f"{name}: no such machine or file{hint} The machines are {', '.join(names)}"
        raise UserError("plan.no_such_machine", make_printable(message))
    try:
        return Machine.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError("plan.unreadable_file", make_printable(f"{path}: {error}")) from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        message = f"{path}: {key}: {first['msg']}; configs/machines/h100.yaml is a complete example"
        raise UserError("plan.invalid_machine", make_printable(message)) from None

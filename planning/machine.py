"""A machine as the prediction sees it: one GPU, the links inside a node, those between nodes.

`configs/machines/NAME.yaml` has some; a file of one's own, with the same keys, describes any other.
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
    """One GPU's way to others."""

    bandwidth: PositiveFloat
    """Bytes per second in one direction."""
    latency: PositiveFloat
    """Seconds of one message, and of one hop of a collective."""


class Attention(Section):
    """FLOP/s of fused attention, forward, causal, heads of 128."""

    portable: PositiveFloat
    """Of FlashAttention 2, which most frameworks take."""
    native: PositiveFloat
    """Of kernels that were made for this GPU: cuDNN's, FlashAttention 3."""


class Overheads(Section):
    """What `plan --measure` fits to real steps, in place of what Constants (predict.py) assume."""

    eager: PositiveFloat
    """Times that operators between matrix products move what fused ones do."""
    call: NonNegativeFloat
    """Seconds of host time per collective, beyond the links'."""


class Exchange(Section):
    """One kind of communication, timed between ranks that all took part at the same time."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "send"]
    size: PositiveInt
    """Bytes: of the whole, not of a shard."""
    ranks: PositiveInt
    between: bool
    """Whether each rank is on a node of its own."""
    seconds: PositiveFloat


class Step(Section):
    """One training step that was timed."""

    work: Workload
    ranks_per_node: PositiveInt
    seconds: PositiveFloat

    @model_validator(mode="after")
    def _has_sizes(self) -> Step:
        may_be_none = ("head_size", "experts", "zero", "trained_from")
        sizes = {name: size for name, size in vars(self.work).items() if type(size) is int and name not in may_be_none}
        if wrong := [name for name, size in sizes.items() if size < 1]:
            raise ValueError(f"work.{wrong[0]} is {sizes[wrong[0]]}")
        return self


class Timings(Section):
    """What was timed, on all ranks at once; medians, in seconds."""

    products: list[tuple[PositiveInt, PositiveInt, PositiveInt, PositiveFloat]]
    """Rows, columns, inner size of matrix products in the first step's precision, and how long one takes."""
    attention: PositiveFloat
    """Of one block of the first step, forward."""
    copied: tuple[PositiveInt, PositiveFloat]
    """Bytes, and how long their copy took."""
    exchanges: list[Exchange]
    steps: Annotated[list[Step], Field(min_length=1)]


class Machine(Section):
    """What a file of a machine says."""

    gpu: str
    memory_gib: PositiveFloat
    bandwidth: PositiveFloat
    """Bytes per second of the GPU's memory."""
    multiprocessors: PositiveInt
    peak: Annotated[dict[str, PositiveFloat], Field(min_length=1)]
    """FLOP/s by precision, dense, of the vendor's sheet."""
    achievable: dict[str, PositiveFloat]
    """FLOP/s of a long matrix product."""
    attention: Attention
    gpus_per_node: PositiveInt
    """GPUs that share the links inside."""
    inside: Link
    between: Link
    cores: PositiveInt | None = None
    """Of CPUs: how many ranks a node runs at full speed; more share them. Nothing runs beside computing there. null:
    each rank has a GPU."""
    measured: Overheads | None = None
    """Fitted to steps on this machine. The figures above are measured then, and taken whole."""
    timings: Timings | None = None
    """What they were fitted to; nothing else reads it."""

    def rate(self, precision: str) -> float:
        """Achievable FLOP/s; of fp16 and bf16 one stands for the other. Raises UserError where it has none."""
        other = {"fp16": "bf16", "bf16": "fp16"}.get(precision, precision)
        for name in (precision, other):
            if name in self.achievable:
                return self.achievable[name]
        raise UserError(f"{self.gpu} has no {precision}; it has {', '.join(self.achievable)}")

    def in_nodes_of(self, ranks: int) -> Machine:
        """The same with so many GPUs in a node; where links inside reach beyond a node, as a rack's do, it stays."""
        beyond = self.gpus_per_node > 8 and self.cores is None
        return self if beyond else self.model_copy(update={"gpus_per_node": ranks})

    @property
    def crowd(self) -> float:
        """Ranks that share the time of one core; 1 where each has its own, or a GPU."""
        return max(1.0, self.gpus_per_node / self.cores) if self.cores else 1.0

    @property
    def peak_bf16(self) -> float:
        """FLOP/s that MFU is a share of."""
        return self.peak.get("bf16") or self.peak.get("fp16") or max(self.peak.values())


def load_machine(name: str) -> Machine:
    """The machine NAME of configs/machines, or in file `name`. Raises UserError with the way out."""
    known = sorted(path.stem for path in MACHINES.glob("*.yaml"))
    path = MACHINES / f"{name}.yaml" if name in known else Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(name.lower(), known, 1, 0.5)
        told = f"; did you mean {near[0]}?" if near else ""
        raise UserError(make_printable(f"{name}: no such machine or file{told or '.'} There are {', '.join(known)}"))
    try:
        return Machine.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(make_printable(f"{path}: {error}")) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(
            make_printable(f"{path}: {where}: {first['msg']}; configs/machines/h100.yaml is complete")
        ) from None

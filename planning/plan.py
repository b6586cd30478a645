"""`plan CONFIG`: what a layout means, before anything runs: mesh, memory, pipeline, communication, speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from traceback import extract_tb

from pipeline.base.errors import UserError, printable
from pipeline.config.sections import Config
from pipeline.config.user_model import UserModel, found_for
from pipeline.data.manifest import steps_words
from pipeline.parallel.mesh import Layout, resolve_layout
from pipeline.parallel.traffic import count_traffic
from pipeline.run.code import CODE_ROOT
from planning.machine import Machine
from planning.memory import GB, MEMORY_KINDS, Memory, describe_overflow, gpu_fit, memories
from planning.predict import predict
from planning.search import node_counts, own_choice, search, write_choice
from planning.timeline import actions, timeline
from planning.workload import workload_of

COLUMNS = 100
"""Width of the timeline's picture; a longer one is cut."""
_SHOWN = 32
"""So many of the first ranks, and of the last ones, have a line."""


def _own_parameters(config: Config, layout: Layout, facts: UserModel) -> Iterator[int]:
    """Values of each pipeline rank's stages of a model of the user's own, which is built without memory."""
    import torch

    options = config.model.all_options
    for rank in range(layout.pp):
        try:
            module = facts.load(facts.root.parent)
            with torch.device("meta"):
                parts = [module.build(options, layout.stage_layers[stage]) for stage in layout.stages_on_rank(rank)]
            count = sum(parameter.numel() for part in parts for parameter in part.parameters())
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # it is anybody's code
            at = extract_tb(error.__traceback__)[-1]
            told = f"{facts.target} fails at {at.filename}:{at.lineno}: {type(error).__name__}: {error}"
            raise UserError(printable(f"model.target: {told}")) from error
        yield count


def _room(config: Config, layout: Layout, ranks: Sequence[Memory]) -> str:
    """What is left of a GPU, in words. Raises UserError where it is nothing."""
    gib = config.site.gpu_memory_gib or 0
    fit = gpu_fit(config, layout, ranks, gib)
    if not fit.fits:
        raise UserError(describe_overflow(config, fit, f"{gib:g} GiB, by --machine or site.gpu_memory_gib"))
    left = (fit.size - fit.needed - fit.reserved) / GB
    own = f"some {fit.reserved / GB:.1f} for CUDA and NCCL"
    return f"a GPU has {fit.size / GB:.3f} GB: {own}, {left:.3f} are left for fragmentation"


def predicted(config: Config, layout: Layout, vocab: int, machine: Machine) -> Iterator[str]:
    """What a step takes on a machine."""
    found = predict(workload_of(config, layout, vocab), machine.in_nodes_of(layout.ranks_per_node))
    yield f"predicted for {machine.gpu}: a step in {found.step:.3g} s, {found.tokens_per_gpu:,.0f} tokens/s of a GPU,"
    whole = found.tokens_per_gpu * layout.world_size
    yield f"{whole:,.0f} of all; MFU {100 * found.mfu:.1f} % (attention counted whole); how well: docs/planning.md"
    names = ("compute", "tensor", "pipeline", "data", "bubble", "optimizer")
    shares = {name: getattr(found, name) / found.step for name in names}
    shares["the slowest rank"] = 1 - sum(shares.values())
    words = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items() if share >= 5e-4)
    yield f"of the step {words} (tensor, pipeline, data: communication that nothing hides)"


def choose(
    config: Config, machine: Machine, nodes: str | None, write: Path | None, said: list[str], problem: str | None = None
) -> Iterator[str]:
    """The lines of `--best`; `write`: the config beside which the first is written, with the overrides `said`.

    `problem`: why the config's own layout cannot work; None if it can.
    """
    if config.model.target is not None:
        raise UserError("--best is for the decoder, whose sizes it knows; not for model.target")
    vocab = config.model.vocab_size or config.data.tokenizer.vocab_size
    own = own_choice(config, machine, vocab) if problem is None else None
    lines, first = search(config, machine, vocab, node_counts(nodes or str(config.stages.train.most_nodes)), own)
    yield f"layouts on {machine.gpu}; tokens/s are of one GPU, GB of its fullest"
    yield from lines
    if problem is not None:
        yield f"the config's own layout cannot work: {problem}"
    if write is not None:
        yield f"written: {write_choice(first, write, said)}"


def plan(config: Config, machine: Machine | None = None) -> Iterator[str]:
    """The lines of the plan. Raises UserError, after the memory, where that is more than `site.gpu_memory_gib`."""
    facts = found_for(config, [Path.cwd(), CODE_ROOT])
    layout, vocab = resolve_layout(config), config.model.vocab_size or config.data.tokenizer.vocab_size
    zero = f", ZeRO {layout.zero} over {layout.dp_shard}" if layout.zero else ""
    layout_sizes = f"{layout.describe_sizes()}{zero}"
    yield f"{layout.world_size} ranks: {layout_sizes}; {layout.micro_batches} micro-batches of a step each"
    batch, length = config.train.global_batch, config.data.sequence_length
    yield f"a step: {batch:,} samples" + (f" of {length:,} tokens: {batch * length:,}" if facts is None else "")
    if config.train.epochs is not None:
        yield steps_words(config, config.run.root / config.run.name / "data")
    if config.data.tokenizer.kind == "file" and config.model.vocab_size is None:
        yield f"the tokenizer's size is not known yet: {vocab} ids are assumed (data.tokenizer.vocab_size)"
    yield ""
    yield f"{'rank':>5} {'node':>5} {'pp':>4} {'dp':>4} {'tp':>4}   stages and blocks"
    for rank in range(layout.world_size):
        if _SHOWN <= rank < layout.world_size - _SHOWN:
            if rank == _SHOWN:
                yield f"{'…':>5}"
            continue
        at = layout.coordinates(rank)
        blocks = (layout.stage_layers[stage] for stage in layout.stages_on_rank(at.pp))
        words = ", ".join(f"{part.start}–{part.stop - 1}" for part in blocks)
        yield f"{rank:>5} {rank // layout.ranks_per_node:>5} {at.pp:>4} {at.dp:>4} {at.tp:>4}   {words}"
    orders = actions(layout)
    if layout.pp > 1:
        rows = timeline(orders, layout.stages)
        idle = sum(row.count("·") for row in rows) / sum(map(len, rows))
        yield ""
        yield f"{layout.schedule}: a digit is a micro-batch's forward, digit and ▒ its backward; ▒ and ▓ apart are its"
        yield f"gradients of inputs and of weights; · is waiting, {100 * idle:.0f} % if all stages take the same time"
        yield from (f"{rank:>5} {row[:COLUMNS]}{'…' if len(row) > COLUMNS else ''}" for rank, row in enumerate(rows))
    if facts is not None:
        yield ""
        yield f"{facts.target}: memory and communication are not estimated"
        yield f"{'pp':>5} {'parameters':>15}" + (", before tensor parallelism cuts them" if layout.tp > 1 else "")
        yield from (f"{rank:>5} {count:>15,}" for rank, count in enumerate(_own_parameters(config, layout, facts)))
        return
    yield ""
    yield "memory of a rank in GB (activations are an estimate; without fragmentation and the libraries' own)"
    yield f"{'pp':>5} {'parameters':>15}" + "".join(f" {head:>11}" for head in (*MEMORY_KINDS, "sum"))
    found = memories(config, layout, vocab)
    for rank, part in enumerate(found):
        sizes = [*(getattr(part, kind) for kind in MEMORY_KINDS), part.total]
        yield f"{rank:>5} {part.parameters:>15,}" + "".join(f" {size / GB:>11.3f}" for size in sizes)
    if config.parallel.offload:
        yield "offload: weights, gradients and optimizer are in host memory; gathered and activations on the device"
    if config.site.gpu_memory_gib is not None:
        yield _room(config, layout, found)
    yield ""
    yield "a rank sends in a step"
    sent = list(count_traffic(config, layout, vocab))
    yield from (f"{group:>10} {size / GB:>9.3f} GB  {words}" for group, size, words in sent or [("-", 0, "nothing")])
    if machine is not None:
        yield ""
        yield from predicted(config, layout, vocab, machine)

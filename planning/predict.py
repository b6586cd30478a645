"""Predict the step time of a training on a machine from first principles, in milliseconds and without torch.

An operator takes the longer of its arithmetic and its memory traffic (Williams, Waterman and Patterson 2009). A
collective takes α seconds per hop and β per byte. A ring over several nodes passes each node boundary once per channel,
so r ranks of a group in one node have r times the bandwidth of one network card, up to that of the links inside
(Thakur, Rabenseifner and Gropp 2005; Hu et al., arXiv 2507.04786, for NCCL). The durations of a block's forward and
backward are the durations of the pipeline's actions, whose schedule is replayed (planning/timeline.py). Overlapping
communication and computation take as long as the longer one. Only `Constants` are fitted; docs/planning.md lists the
data and the accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import ceil, log2

from planning.machine import Machine
from planning.timeline import Action, build_schedule, replay_schedule
from planning.workload import Workload


@dataclass(frozen=True)
class CommGroup:
    """A group of ranks that communicate: how many, and how many of them share a node."""

    ranks: int
    in_node: int

    @classmethod
    def of(cls, ranks: int, stride: int, machine: Machine) -> CommGroup:
        """Return the group of `ranks` ranks whose numbers are `stride` apart."""
        return cls(ranks, max(1, min(ranks, machine.gpus_per_node // stride)))

    @property
    def nodes(self) -> int:
        """Number of nodes of the group."""
        return ceil(self.ranks / self.in_node)


def ring_bandwidth(group: CommGroup, machine: Machine, share: float = 1.0) -> float:
    """Return the bytes per second that a rank of a ring sends; `share`: achievable share of a link's bandwidth."""
    if group.nodes == 1:
        return machine.inside.bandwidth * share
    return min(machine.inside.bandwidth, machine.between.bandwidth * group.in_node) * share


def all_gather_time(size: float, group: CommGroup, machine: Machine, share: float = 1.0) -> float:
    """Return the seconds of a ring all-gather or reduce-scatter of `size` bytes (of the whole, not of a shard).

    Latency: each hop of the ring inside a node; between nodes, those of a tree (NCCL since 2.23).
    """
    if group.ranks == 1:
        return 0.0
    hops = (group.in_node - 1) * machine.inside.latency + ceil(log2(group.nodes)) * machine.between.latency
    return hops + size * (group.ranks - 1) / group.ranks / ring_bandwidth(group, machine, share)


def all_reduce_time(size: float, group: CommGroup, machine: Machine, share: float = 1.0) -> float:
    """Return the seconds of an all-reduce of `size` bytes: a reduce-scatter and an all-gather."""
    return 2 * all_gather_time(size, group, machine, share)


def send_time(size: float, neighbours: CommGroup, machine: Machine, share: float = 1.0) -> float:
    """Return the seconds of a message to the next rank of a group."""
    link = machine.between if neighbours.in_node == 1 else machine.inside
    return (link.latency + size / (link.bandwidth * share)) * (neighbours.ranks > 1)


REPLAYED = 2
"""Rounds of micro-batches (one per pipeline rank) that are replayed; further ones repeat the steady state."""
TILE = 128 * 256
"""Outputs of a matrix product that one multiprocessor computes at a time."""


@dataclass(frozen=True)
class Constants:
    """Factors that data sheets do not contain, fitted by `python -m benchmarks.plan`."""

    matmul: float = 0.87
    """Share of `achievable` that products of a training get: real values heat more, shapes are no ideal ones."""
    portable: float = 0.89
    """And that libraries not made for this GPU get of that."""
    attention: float = 0.6
    """Share of the machine's attention figure over forward and backward."""
    memory: float = 0.93
    """Share of the memory's bandwidth."""
    eager: float = 1.74
    """Times that unfused operators move what fused ones do."""
    link: float = 0.78
    """Share of a link's bandwidth."""
    launch: float = 6e-6
    """Seconds of host time per kernel."""
    hidden: float = 0.64
    """Share of tensor parallel communication that runs beside products where it is cut into pieces."""
    beside: float = 0.15
    """Slow-down of computing while a collective runs beside it, for it takes multiprocessors and memory."""
    jitter: float = 0.01
    """Step time that each doubling of the nodes adds: the slowest rank is waited for."""


DEFAULT = Constants()


@dataclass(frozen=True)
class StepPrediction:
    """Seconds of one step on the busiest rank."""

    step: float
    tokens_per_gpu: float
    """Tokens per second of one GPU."""
    mfu: float
    """Model FLOP/s as a share of the GPU's bf16 peak, attention counted whole."""
    compute: float
    tensor: float
    """Exposed communication of each group: nothing runs beside it."""
    pipeline: float
    data: float
    bubble: float
    optimizer: float
    others: float
    """Exposed communication of what Sluice has not: experts, context parallel."""
    forward: tuple[float, ...] = ()
    """Of one micro-batch by stage, with what it waits for; backward as well."""
    backward: tuple[float, ...] = ()


@dataclass(frozen=True)
class RankModel:
    """The durations of the parts of a step on one rank of a machine."""

    work: Workload
    machine: Machine
    constants: Constants

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch."""
        return self.work.micro_batch * self.work.sequence / self.work.context

    @property
    def call(self) -> float:
        """Host time of a collective of tensor parallelism, ZeRO 3 or a pipeline; 0 unless it was measured."""
        return self.machine.measured.call if self.machine.measured else 0.0

    def group(self, ranks: int, stride: int) -> CommGroup:
        """Return the group of `ranks` ranks whose numbers are `stride` apart."""
        return CommGroup.of(ranks, stride, self.machine)

    def moved(self, size: float) -> float:
        """Return the seconds to read or write `size` bytes of memory."""
        return size / (self.machine.bandwidth * self.constants.memory)

    def product(self, rows: float, columns: float, inner: float, precision: str) -> float:
        """Return the seconds of a matrix product. On average, half of the last wave of tiles is idle."""
        mature = (
            self.machine.attention.portable == self.machine.attention.native
        )  # all frameworks' kernels are equally fast
        native = 1.0 if self.work.native or mature else self.constants.portable
        rate = self.machine.rate(precision) * self.constants.matmul * native
        waves = 0.5 * self.machine.multiprocessors * TILE + rows * columns
        width = {"fp8": 1, "fp4": 0.5, "fp32": 4}.get(precision, 2)
        size = width * (rows * inner + inner * columns) + self.work.low_bytes * rows * columns
        return max(2 * waves * inner / rate, self.moved(size))

    def attention(self) -> float:
        """Return the seconds of one forward. Backward takes 2.5 times the FLOPs (arXiv 2307.08691, section 3.1.2)."""
        work, figures = self.work, self.machine.attention
        rate = (figures.native if work.native else figures.portable) * self.constants.attention
        rate *= 1.25 * work.head / (work.head + 32) / (1 + 512 / work.sequence)  # exponentials; blocks half masked
        moved = 8 * self.tokens * work.sequence * work.heads / work.tensor if work.scores else 0.0
        return 2 * self.tokens * work.sequence * work.heads * work.head / work.tensor / rate + self.moved(moved)

    def between(self) -> float:
        """Return the seconds between the products of one block's forward: norms, sums, activation, rotation, casts."""
        work = self.work
        stream = work.hidden / (work.tensor if work.split_sequence else 1)
        acted = (work.matrices if work.matrices == 3 else 2) * work.ffn * work.active
        turned = 2 * (work.heads + work.kv_heads) * work.head
        size = 10 * stream + (acted + turned) / work.tensor
        size *= work.low_bytes * (1 if work.fused else self.constants.eager)
        if work.precision in ("fp8", "fp4"):  # inputs of products are read and written as a row and as a column
            size += 4 * (2 * work.hidden + (work.heads * work.head + work.ffn * work.active) / work.tensor)
        return self.moved(size * self.tokens)

    def launches(self) -> float:
        """Return the host time of one block's forward in seconds."""
        kernels = (20 if self.work.fused else 45) + 10 * (self.work.tensor > 1) + 10 * (self.work.zero == 3)
        return kernels * self.constants.launch

    def block(self, trained: float = 1.0) -> tuple[float, float]:
        """Return the computing time of a block: forward, and backward with recomputation. `trained`: trained share."""
        shapes, precision = self.work.products, self.work.precision
        forward = sum(self.product(m, n, k, precision) * times for m, n, k, times in shapes)
        inputs = sum(self.product(m, k, n, precision) * times for m, n, k, times in shapes)
        weights = sum(self.product(k, n, m, precision) * times for m, n, k, times in shapes)
        m, n, k, times = shapes[-1]  # not needed again by any backward
        attention, between = self.attention(), self.between()
        again = {"attention": attention, "selective": between, "half": between + forward / 2}
        again["full"] = between + forward - self.product(m, n, k, precision) * times + attention
        first = self.with_host(forward + attention + between, self.launches())
        second = inputs + weights * trained + 2.5 * attention + 2 * between + again.get(self.work.recompute, 0.0)
        return first, self.with_host(second, 2 * self.launches())

    def with_host(self, kernels: float, host: float) -> float:
        """Return the seconds of kernels and host time: concurrent on a GPU, one after the other on a CPU."""
        return kernels + host if self.machine.cores else max(kernels, host)

    def head(self) -> tuple[float, float]:
        """Return the seconds of output layer and loss: forward, backward."""
        work, columns = self.work, self.work.vocab / self.work.tensor
        precision = work.precision if work.precision == "fp32" else "bf16"
        shape = (self.tokens, columns, float(work.hidden))
        loss = self.moved(self.tokens * columns * (10 if work.fused else 10 * self.constants.eager))
        m, n, k = shape
        inputs = self.product(m, k, n, precision) * (work.trained_from <= work.layers)
        weights = self.product(k, n, m, precision) * work.trained_tables[1]
        return self.product(m, n, k, precision) + loss / 2, inputs + weights + loss / 2

    def tensor(self) -> float:
        """Return the exposed tensor parallel communication of one block's forward; backward has as much."""
        work, group = self.work, self.group(self.work.tensor, 1)
        size = self.tokens * work.hidden * work.low_bytes
        time = 4 * (all_gather_time(size, group, self.machine, self.constants.link) + self.call * (work.tensor > 1))
        return time * (1 - self.constants.hidden if work.hide_tensor else 1)

    def sent(self) -> float:
        """Return the seconds of a message between pipeline stages that the rank waits for."""
        work = self.work
        size = self.tokens * work.hidden * work.low_bytes / (work.tensor if work.split_sequence else 1)
        stride = work.tensor * work.context * work.data
        neighbours = self.group(work.pipeline, stride)
        return send_time(size, neighbours, self.machine, self.constants.link) + self.call

    def update(self) -> float:
        """Return the seconds to gather Muon's matrices, gradients and momenta in fp32."""
        work, link = self.work, self.constants.link
        size = 12 * max(self.by_rank(work.shares)) * (work.attention_weights + work.expert_weights)
        shards = self.group(work.shard if work.zero else 1, work.tensor)
        time = all_gather_time(size / work.tensor, shards, self.machine, link)
        return (time + all_gather_time(size, self.group(work.tensor, 1), self.machine, link)) * work.orthogonal

    def by_rank(self, values: Sequence[float]) -> list[float]:
        """Return the sum of the blocks' values of each pipeline rank, scaled as if all had equally many blocks."""
        work, ends = self.work, (0, *accumulate(self.work.stages))
        stages = [values[start:end] for start, end in pairwise(ends)]
        ranks = ([one for stage in stages[rank :: work.pipeline] for one in stage] for rank in range(work.pipeline))
        return [work.layers / work.pipeline * (sum(rank) / max(1, len(rank))) for rank in ranks]

    def block_weights(self) -> float:
        """Return the weights of one block per rank, after tensor and expert parallelism."""
        work = self.work
        return (work.attention_weights + work.expert_weights * max(1, work.experts) / work.expert) / work.tensor

    @cached_property
    def trained_weights(self) -> float:
        """Weights of the pipeline rank that trains most, after tensor and expert parallelism."""
        work, block, blocks = self.work, self.block_weights(), self.by_rank(self.work.shares)
        table = work.vocab * work.hidden / work.tensor
        return max(block * share + table * sum(work.tables(rank)) for rank, share in enumerate(blocks))

    def talk(self, size: float, calls: float = 1.0) -> float:
        """Return the seconds of an all-gather or reduce-scatter of FSDP, including its copies on CPUs."""
        copied = self.moved(2 * size) if self.machine.cores else 0.0
        group = self.group(self.work.shard * self.work.context, self.work.tensor)
        return all_gather_time(size, group, self.machine, self.constants.link) + copied + calls * self.call


Others = Callable[[RankModel, float], float]
"""Returns extra exposed communication of a block's forward, from a rank and the forward's computing time."""


def replay_step(
    schedule: str, ranks: int, virtual: int, batches: int, forward: tuple[float, ...], backward: tuple[float, ...]
) -> tuple[list[list[tuple[Action, float]]], Callable[[Action], float], int]:
    """Return each rank's timed actions of the first rounds, the duration function, and the replayed micro-batches."""
    turn = batches // max(1, batches // ranks)
    most = min(batches, REPLAYED * turn + batches % turn)
    half = {"F": 0.0, "B": 1.0, "I": 0.5, "W": 0.5}

    def duration(action: Action) -> float:
        return forward[action.stage] if action.kind == "F" else half[action.kind] * backward[action.stage]

    return replay_schedule(build_schedule(schedule, ranks, virtual, most), len(forward), duration), duration, most


@lru_cache(maxsize=4096)
def _pipeline_span(
    schedule: str, ranks: int, virtual: int, batches: int, forward: tuple[float, ...], backward: tuple[float, ...]
) -> tuple[float, float]:
    """Return the duration of one step, and the busy time of its busiest rank."""
    done, duration, most = replay_step(schedule, ranks, virtual, batches, forward, backward)
    starts = [made[0][1] for made in done]
    ends = [made[-1][1] + duration(made[-1][0]) for made in done]
    busy = max(sum(duration(action) for action, _ in made) for made in done)
    span = max(ends) - min(starts)
    if schedule == "zb2p":  # its ranks do not wait for each other between steps (section 4 there)
        span = max(end - start for start, end in zip(starts, ends, strict=True))
    return span + busy * (batches - most) / most, busy * batches / most


def predict_step(
    work: Workload, machine: Machine, constants: Constants = DEFAULT, others: Others = lambda rank, forward: 0.0
) -> StepPrediction:
    """Predict the step time and its parts. Raises UserError if the machine does not support the precision.

    `others`: seconds that a block's forward waits for communication that Sluice does not have (benchmarks/others.py).
    """
    rank, stages = make_rank_model(work, machine, constants), work.stages
    constants, first, micro = rank.constants, work.trained_from, work.micro_batches
    computing = {share: rank.block(share) for share in {1.0, *work.shares}}
    forward = computing[1.0][0]
    tensor, more = rank.tensor(), others(rank, forward)
    talk = tensor + more
    again = talk if work.recompute == "full" else 0.0
    head_forward, head_backward = rank.head()
    waited = rank.sent() if work.pipeline > 1 and work.virtual_stages == 1 else 0.0
    data, alone = _data(rank)
    # each micro-batch gathers, or reduces, every block while its neighbour computes
    gathered = rank.talk(rank.block_weights() * work.low_bytes) * work.gathers_blocks
    forward, wait = _overlap(forward, gathered, constants)
    kinds = {}  # of a block's backward: seconds, how many of them wait, and those of what is sent
    for share, (_, backward) in computing.items():
        sent = rank.talk(rank.block_weights() * work.reduce_bytes * share) * work.reduces_blocks * (share > 0)
        kinds[share] = *_overlap(backward, gathered + sent, constants), gathered + sent
    blocks = [kinds[share] for share in work.shares]
    passed = [blocks[max(first, start) : end] for start, end in pairwise((0, *accumulate(stages)))]
    exposed = (wait * work.layers + sum(wait for _, wait, _ in blocks[first:])) / work.pipeline * micro
    last = len(stages) - 1
    ahead = tuple(n * (forward + talk) + waited + (at == last) * head_forward for at, n in enumerate(stages))
    back = tuple(
        sum(time + talk + again for time, _, _ in some) + waited * bool(some) + (at == last) * head_backward
        for at, some in enumerate(passed)
    )
    if work.pipeline > 1:
        span, busy = _pipeline_span(work.schedule, work.pipeline, work.virtual_stages, micro, ahead, back)
    else:
        span = busy = micro * (sum(ahead) + sum(back))
    if machine.ranks_per_core > 1:  # a waiting rank leaves its core to others
        span = max(span, machine.ranks_per_core * micro * (sum(ahead) + sum(back)) / work.pipeline)
    if work.hide_data and machine.cores is None:
        sent = gathered * work.layers + sum(sent for *_, sent in blocks[first:])
        taken = sent / work.pipeline  # of the last micro-batch's time
        data = max(data - max(0.0, busy / micro - taken), 0.1 * data)
    data += alone
    exposed += data
    local = rank.trained_weights / (work.shard * work.context if work.zero else 1)
    fused = work.fused or machine.measured  # what was measured is Sluice's own: one kernel, compiled or not
    optimizer = rank.moved(local * 30) * (1 if fused else constants.eager) + rank.update()
    nodes = max(1, work.world / machine.gpus_per_node)
    step = (span + machine.ranks_per_core * (data + optimizer)) * (1 + constants.jitter * log2(nodes))
    tokens = work.global_batch * work.sequence / work.world / step
    through = max(rank.by_rank([n >= first for n in range(work.layers)])) * (2 if work.recompute == "full" else 1)
    times, messages = micro * (work.layers / work.pipeline + through), micro * (1 + (first < work.layers)) * waited
    mfu, compute = tokens * work.flops_per_token / machine.peak_bf16, busy - times * talk - exposed + data - messages
    return StepPrediction(
        step=step, tokens_per_gpu=tokens, mfu=mfu, compute=compute, tensor=times * tensor, pipeline=messages,
        data=exposed, bubble=span - busy, optimizer=optimizer, others=times * more, forward=ahead, backward=back,
    )  # fmt: skip


def make_rank_model(work: Workload, machine: Machine, constants: Constants = DEFAULT) -> RankModel:
    """Return the model of a rank. Measured figures of the machine are used unscaled, regardless of `constants`."""
    if machine.measured is not None:
        beside = 1.0 if machine.cores else constants.beside  # a CPU adds up and copies what it sends
        constants = replace(constants, matmul=1.0, portable=1.0, attention=1.0, memory=1.0, link=1.0, beside=beside)
        constants = replace(constants, eager=machine.measured.eager)
    return RankModel(work, machine, constants)


def _overlap(compute: float, communication: float, constants: Constants) -> tuple[float, float]:
    """Return the seconds of computation overlapped with communication, and how much of them is waiting."""
    slow = compute + constants.beside * min(compute, communication)
    return max(slow, communication), max(0.0, communication - slow)


def _data(rank: RankModel) -> tuple[float, float]:
    """Return the data parallel communication of a step outside the blocks: overlapping, and not overlapping."""
    work, machine, link = rank.work, rank.machine, rank.constants.link
    reduced = rank.trained_weights * work.reduce_bytes
    if not work.zero:
        return all_reduce_time(reduced, rank.group(work.data * work.context, work.tensor), machine, link), 0.0
    shards, tables, layers = work.shard * work.context, work.tables(0), work.layers / work.pipeline
    table = work.vocab * work.hidden / work.tensor
    weights = layers * rank.block_weights() + len(tables) * table
    once = rank.talk(weights * work.low_bytes, layers + len(tables)) * (not work.gathers_blocks)
    calls = sum(share > 0 for share in work.shares) / work.pipeline + sum(tables)
    once += rank.talk(reduced, calls) * (not work.reduces_blocks)
    once += all_reduce_time(reduced / shards, rank.group(work.replicate, work.tensor * shards), machine, link)
    # the embedding's weights are needed first, its gradients come last: neither overlaps with computation
    gathers, reduces = work.micro_batches, int(tables[0])
    if machine.cores:  # nothing overlaps on CPUs: it is also needed for backward, as is the output layer's
        gathers *= len(tables) + (work.trained_from == 0)
        reduces = work.micro_batches * sum(tables)
    alone = gathers * rank.talk(table * work.low_bytes) * work.gathers_blocks
    return once, alone + reduces * rank.talk(table * work.reduce_bytes) * work.reduces_blocks

"""Predict the step time of a run on a machine from first principles, in milliseconds and without importing torch.

An operator takes the longer of its arithmetic and its memory traffic (Williams, Waterman and Patterson 2009). A
collective takes α seconds per hop and β seconds per byte (Thakur, Rabenseifner and Gropp 2005). A ring over several
nodes passes each node boundary once per channel (Hu et al., arXiv 2507.04786, for NCCL). If r ranks of a group share a
node, they therefore have r times the bandwidth of one network card, up to the bandwidth of the links inside the node.
The times of a block's forward and backward give the times of the pipeline's actions (planning/timeline.py).
Communication that overlaps with computation takes as long as the longer of both. Only `Constants` are fitted.
docs/planning.md describes the data and the accuracy.
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
    """A group of ranks that communicate."""

    ranks: int
    """Number of ranks."""
    ranks_per_node: int
    """Number of ranks of the group that share a node."""

    @classmethod
    def with_stride(cls, ranks: int, stride: int, machine: Machine) -> CommGroup:
        """Return the group of `ranks` ranks whose numbers are `stride` apart. Ranks are numbered node by node."""
        return cls(ranks, max(1, min(ranks, machine.gpus_per_node // stride)))

    @property
    def nodes(self) -> int:
        """Number of nodes of the group."""
        return ceil(self.ranks / self.ranks_per_node)


def ring_bandwidth(group: CommGroup, machine: Machine, share: float = 1.0) -> float:
    """Return the bytes per second that each rank of a ring sends.

    `share` is the share of a link's bandwidth that is achieved.
    """
    if group.nodes == 1:
        return machine.inside.bandwidth * share
    return min(machine.inside.bandwidth, machine.between.bandwidth * group.ranks_per_node) * share


def all_gather_time(size: float, group: CommGroup, machine: Machine, share: float = 1.0) -> float:
    """Return the seconds of a ring all-gather or reduce-scatter of a whole tensor of `size` bytes.

    The latency includes each hop of the ring inside a node, and the hops of a tree between nodes (NCCL since 2.23).
    """
    if group.ranks == 1:
        return 0.0
    latency_inside = (group.ranks_per_node - 1) * machine.inside.latency
    latency = latency_inside + ceil(log2(group.nodes)) * machine.between.latency
    return latency + size * (group.ranks - 1) / group.ranks / ring_bandwidth(group, machine, share)


def all_reduce_time(size: float, group: CommGroup, machine: Machine, share: float = 1.0) -> float:
    """Return the seconds of an all-reduce of `size` bytes: a reduce-scatter and an all-gather."""
    return 2 * all_gather_time(size, group, machine, share)


def send_time(size: float, neighbours: CommGroup, machine: Machine, share: float = 1.0) -> float:
    """Return the seconds of a message to the next rank of the group `neighbours`; 0 if the group has one rank.

    If ranks of the group share a node, the message is assumed to stay in the node.
    """
    link = machine.between if neighbours.ranks_per_node == 1 else machine.inside
    return (link.latency + size / (link.bandwidth * share)) * (neighbours.ranks > 1)


REPLAYED_ROUNDS = 2
"""Number of rounds that are replayed. A round has about one micro-batch for each pipeline rank.

Further rounds repeat the steady state.
"""
TILE = 128 * 256
"""Number of output values of a matrix product that one multiprocessor computes at a time."""


@dataclass(frozen=True)
class Constants:
    """Factors that data sheets do not contain. `python -m benchmarks.plan` fits them to published runs."""

    matmul: float = 0.87
    """Share of `Machine.achievable` that matrix products reach in a run. Real values draw more power, and shapes are
    not ideal."""
    portable: float = 0.89
    """Share of the rate of products that libraries reach if they were written for an older GPU."""
    attention: float = 0.6
    """Share of the machine's attention figure that forward and backward reach."""
    memory: float = 0.93
    """Achieved share of the memory's bandwidth."""
    eager: float = 1.74
    """Memory traffic of unfused operators, as a multiple of the traffic of fused operators."""
    link: float = 0.78
    """Achieved share of a link's bandwidth."""
    launch: float = 6e-6
    """Seconds of host time per kernel."""
    hidden: float = 0.64
    """Share of tensor-parallel communication that overlaps with products, if the communication is split."""
    overlap_slowdown: float = 0.15
    """Relative slow-down of computation that overlaps with a collective.

    Collectives also use multiprocessors and memory.
    """
    jitter: float = 0.01
    """Share of the step time that each doubling of the nodes adds, because all ranks wait for the slowest rank."""


DEFAULT = Constants()


@dataclass(frozen=True)
class StepPrediction:
    """A predicted step. Times are in seconds, on the busiest rank."""

    step: float
    """Time of one step: all of the following parts, and the time that the rank waits for the slowest rank."""
    tokens_per_gpu: float
    """Tokens per second of one GPU."""
    mfu: float
    """Model FLOP/s as a share of `Machine.peak_bf16`. Attention is counted without the causal mask."""
    compute: float
    """Computation, without the update of the weights."""
    tensor: float
    """Exposed tensor-parallel communication, which does not overlap with computation."""
    pipeline: float
    """Exposed pipeline-parallel communication."""
    data: float
    """Exposed data-parallel communication."""
    bubble: float
    """Time in which a rank of a pipeline is idle."""
    optimizer: float
    """Update of the weights."""
    others: float
    """Exposed communication of context parallelism and, for models of other tools, of expert parallelism."""
    forward: tuple[float, ...] = ()
    """Forward pass of one micro-batch by pipeline-parallel stage, including exposed communication."""
    backward: tuple[float, ...] = ()
    """Backward pass of one micro-batch by pipeline-parallel stage, including exposed communication."""


@dataclass(frozen=True)
class RankModel:
    """The durations of the parts of a step on one rank of a machine."""

    work: Workload
    machine: Machine
    constants: Constants

    @property
    def tokens(self) -> float:
        """Number of tokens of one micro-batch on one rank."""
        return self.work.micro_batch * self.work.sequence / self.work.context

    @property
    def call_time(self) -> float:
        """Seconds of host time of a collective or message of tensor parallelism, ZeRO or a pipeline.

        0 if the machine's file contains no measured overheads.
        """
        return self.machine.measured.call if self.machine.measured else 0.0

    def group(self, ranks: int, stride: int) -> CommGroup:
        """Return the group of `ranks` ranks whose numbers are `stride` apart."""
        return CommGroup.with_stride(ranks, stride, self.machine)

    def memory_time(self, size: float) -> float:
        """Return the seconds to read or write `size` bytes of memory."""
        return size / (self.machine.bandwidth * self.constants.memory)

    def product_time(self, rows: float, columns: float, inner: float, precision: str) -> float:
        """Return the seconds of a matrix product of (rows, inner) and (inner, columns)."""
        # If both attention figures are equal, the kernels of all frameworks are equally fast.
        has_equal_kernels = self.machine.attention.portable == self.machine.attention.native
        kernel_share = 1.0 if self.work.native or has_equal_kernels else self.constants.portable
        rate = self.machine.rate(precision) * self.constants.matmul * kernel_share
        # On average, half of the last wave of tiles is idle. Idle multiprocessors count as if they computed outputs.
        outputs = 0.5 * self.machine.multiprocessors * TILE + rows * columns
        input_bytes = {"fp8": 1, "fp4": 0.5, "fp32": 4}.get(precision, 2)
        size = input_bytes * (rows * inner + inner * columns) + self.work.low_bytes * rows * columns
        return max(2 * outputs * inner / rate, self.memory_time(size))

    def attention_time(self) -> float:
        """Return the seconds of the attention of a block's forward pass.

        The backward pass takes 2.5 times the FLOPs (arXiv 2307.08691, section 3.1.2).
        """
        work = self.work
        figures = self.machine.attention
        rate = (figures.native if work.native else figures.portable) * self.constants.attention
        # The machine's figures are for heads of size 128, for which the first factor is 1. With smaller heads,
        # exponentials cost relatively more. In short sequences, tiles on the diagonal of the scores have a larger
        # share, and half of each such tile is masked.
        rate *= 1.25 * work.head / (work.head + 32) / (1 + 512 / work.sequence)
        score_bytes = 8 * self.tokens * work.sequence * work.heads / work.tensor if work.scores else 0.0
        # The two products take 4 FLOPs per score and channel. The causal mask leaves half of them.
        flops = 2 * self.tokens * work.mean_pairs * work.heads * work.head / work.tensor
        return flops / rate + self.memory_time(score_bytes)

    def elementwise_time(self) -> float:
        """Return the seconds of the operators between the matrix products of a block's forward pass.

        These operators are norms, sums, the activation function, the rotation of positions, and casts. Their time
        follows from the number of values that they read and write for each token.
        """
        work = self.work
        stream = work.hidden / (work.tensor if work.split_sequence else 1)
        # The activation function reads one value, or two if the MLP is gated, and writes one value.
        activation = (work.matrices if work.matrices == 3 else 2) * work.ffn * work.active
        rotation = 2 * (work.heads + work.kv_heads) * work.head
        # Norms, sums and casts read or write the residual stream about 10 times.
        size = 10 * stream + (activation + rotation) / work.tensor
        size *= work.low_bytes * (1 if work.fused else self.constants.eager)
        # In fp8 and fp4, the inputs of products are quantized twice: along rows and along columns.
        if work.precision in ("fp8", "fp4"):
            size += 4 * (2 * work.hidden + (work.heads * work.head + work.ffn * work.active) / work.tensor)
        return self.memory_time(size * self.tokens)

    def launch_time(self) -> float:
        """Return the seconds of host time to launch the kernels of a block's forward pass."""
        # These are typical numbers of kernels.
        kernels = (20 if self.work.fused else 45) + 10 * (self.work.tensor > 1) + 10 * (self.work.zero == 3)
        return kernels * self.constants.launch

    def block_times(self, trained: float = 1.0) -> tuple[float, float]:
        """Return the seconds of computation of a block: of the forward pass, and of the backward pass.

        The backward pass includes recomputation. `trained` is the share of the block's weights that is trained.
        """
        products = self.work.products
        precision = self.work.precision
        forward = sum(self.product_time(m, n, k, precision) * count for m, n, k, count in products)
        input_gradients = sum(self.product_time(m, k, n, precision) * count for m, n, k, count in products)
        weight_gradients = sum(self.product_time(k, n, m, precision) * count for m, n, k, count in products)
        attention = self.attention_time()
        elementwise = self.elementwise_time()
        recomputed = {"attention": attention, "selective": elementwise, "half": elementwise + forward / 2}
        # The output of the last product is not recomputed, because the backward pass does not need it.
        m, n, k, count = products[-1]
        recomputed["full"] = elementwise + forward - self.product_time(m, n, k, precision) * count + attention
        backward = input_gradients + weight_gradients * trained + 2.5 * attention + 2 * elementwise
        backward += recomputed.get(self.work.recompute, 0.0)
        return (
            self.add_host_time(forward + attention + elementwise, self.launch_time()),
            self.add_host_time(backward, 2 * self.launch_time()),
        )

    def add_host_time(self, kernels: float, host: float) -> float:
        """Return the seconds of kernels and host time together. Both overlap on a GPU, but not on a CPU."""
        return kernels + host if self.machine.cores else max(kernels, host)

    def head_times(self) -> tuple[float, float]:
        """Return the seconds of the output layer and the loss: of the forward pass, and of the backward pass."""
        work = self.work
        columns = work.vocab / work.tensor
        hidden = float(work.hidden)
        # The output layer is computed in 16 bits, even if the blocks use fp8 or fp4.
        precision = work.precision if work.precision == "fp32" else "bf16"
        # A fused loss reads and writes about 10 bytes per logit.
        loss = self.memory_time(self.tokens * columns * (10 if work.fused else 10 * self.constants.eager))
        output = self.product_time(self.tokens, columns, hidden, precision)
        input_gradient = self.product_time(self.tokens, hidden, columns, precision) * (work.trained_from <= work.layers)
        weight_gradient = self.product_time(hidden, columns, self.tokens, precision) * work.trained_tables[1]
        return output + loss / 2, input_gradient + weight_gradient + loss / 2

    def tensor_time(self) -> float:
        """Return the seconds of exposed tensor-parallel communication in a block's forward pass.

        The backward pass takes as long. Each pass has four collectives: an all-gather and a reduce-scatter, both for
        attention and for the MLP.
        """
        work = self.work
        size = self.tokens * work.hidden * work.low_bytes
        collective = all_gather_time(size, self.group(work.tensor, 1), self.machine, self.constants.link)
        time = 4 * (collective + self.call_time * (work.tensor > 1))
        return time * (1 - self.constants.hidden if work.hide_tensor else 1)

    def context_time(self) -> float:
        """Return the seconds of exposed context-parallel communication in a block's forward pass.

        The keys and values of the whole sequences are gathered. The backward pass reduce-scatters their gradients.
        """
        work = self.work
        key_value = 2 * work.kv_heads * work.head / work.tensor
        size = self.tokens * work.context * key_value * work.low_bytes
        group = self.group(work.context, work.tensor)
        return all_gather_time(size, group, self.machine, self.constants.link) + self.call_time * (work.context > 1)

    def stage_message_time(self) -> float:
        """Return the seconds of a message between pipeline-parallel stages, during which the rank waits."""
        work = self.work
        size = self.tokens * work.hidden * work.low_bytes / (work.tensor if work.split_sequence else 1)
        stride = work.tensor * work.context * work.data
        neighbours = self.group(work.pipeline, stride)
        return send_time(size, neighbours, self.machine, self.constants.link) + self.call_time

    def muon_gather_time(self) -> float:
        """Return the seconds that Muon takes to gather matrices, gradients and momenta; 0 for other optimizers."""
        work = self.work
        link = self.constants.link
        # 12 bytes per weight: weight, gradient and momentum in fp32.
        size = 12 * max(self.sum_by_pipeline_rank(work.shares)) * (work.attention_weights + work.expert_weights)
        shards = self.group(work.shard if work.zero else 1, work.tensor)
        time = all_gather_time(size / work.tensor, shards, self.machine, link)
        return (time + all_gather_time(size, self.group(work.tensor, 1), self.machine, link)) * work.orthogonal

    def sum_by_pipeline_rank(self, values: Sequence[float]) -> list[float]:
        """Return, for each pipeline rank, the sum of the values of its blocks.

        `values` has one value per block of the model. Sums are scaled as if all ranks had the same number of blocks.
        """
        work = self.work
        stages = [values[start:end] for start, end in pairwise((0, *accumulate(work.stages)))]
        sums = []
        for rank in range(work.pipeline):
            # Stage s is on rank s mod `pipeline`. For V-shaped schedules, this is only an approximation.
            blocks = [value for stage in stages[rank :: work.pipeline] for value in stage]
            sums.append(work.layers / work.pipeline * (sum(blocks) / max(1, len(blocks))))
        return sums

    def block_weights(self) -> float:
        """Return the number of weights of a block on one rank, after tensor and expert parallelism."""
        work = self.work
        return (work.attention_weights + work.expert_weights * max(1, work.experts) / work.expert) / work.tensor

    @cached_property
    def trained_weights(self) -> float:
        """Largest number of trained weights of a pipeline rank, after tensor and expert parallelism."""
        work = self.work
        block = self.block_weights()
        table = work.vocab * work.hidden / work.tensor
        shares = self.sum_by_pipeline_rank(work.shares)
        return max(block * share + table * sum(work.tables(rank)) for rank, share in enumerate(shares))

    def fsdp_time(self, size: float, calls: float = 1.0) -> float:
        """Return the seconds of `calls` all-gathers or reduce-scatters of FSDP, including FSDP's copies on CPUs.

        Args:
            size: Bytes of the whole tensors of all calls together.
            calls: Number of calls.
        """
        copies = self.memory_time(2 * size) if self.machine.cores else 0.0
        group = self.group(self.work.shard * self.work.context, self.work.tensor)
        return all_gather_time(size, group, self.machine, self.constants.link) + copies + calls * self.call_time


OtherCommunication = Callable[[RankModel, float], float]
"""Function that returns how many seconds a block's forward pass waits for context parallelism, and for parallelisms
that Sluice does not support.

Its arguments are the model of a rank, and the seconds of computation of the forward pass.
"""


def replay_step(
    schedule: str,
    ranks: int,
    virtual_stages: int,
    micro_batches: int,
    forward: tuple[float, ...],
    backward: tuple[float, ...],
) -> tuple[list[list[tuple[Action, float]]], Callable[[Action], float], int]:
    """Replay the first rounds of micro-batches of a step (`REPLAYED_ROUNDS`).

    Args:
        schedule: Name of the pipeline schedule.
        ranks: Number of pipeline ranks.
        virtual_stages: Stages per rank.
        micro_batches: Micro-batches of the step.
        forward: Seconds of a micro-batch's forward pass, by stage.
        backward: Seconds of a micro-batch's backward pass, by stage.

    Returns:
        Each rank's actions with their start times; a function that returns the seconds of an action; and the number of
        micro-batches that were replayed.
    """
    round_size = micro_batches // max(1, micro_batches // ranks)  # about one micro-batch per pipeline rank
    # The remainder is replayed as well, so that only whole rounds are left out.
    replayed = min(micro_batches, REPLAYED_ROUNDS * round_size + micro_batches % round_size)
    backward_share = {"F": 0.0, "B": 1.0, "I": 0.5, "W": 0.5}

    def duration(action: Action) -> float:
        """Return the seconds of an action. Each half of a split backward pass takes half of its time."""
        if action.kind == "F":
            return forward[action.stage]
        return backward_share[action.kind] * backward[action.stage]

    actions = build_schedule(schedule, ranks, virtual_stages, replayed)
    return replay_schedule(actions, len(forward), duration), duration, replayed


@lru_cache(maxsize=4096)
def _pipeline_span(
    schedule: str,
    ranks: int,
    virtual_stages: int,
    micro_batches: int,
    forward: tuple[float, ...],
    backward: tuple[float, ...],
) -> tuple[float, float]:
    """Return two times of a step in seconds: from the first forward to the last backward, and work of the busiest rank.

    Arguments are those of `replay_step`.
    """
    timed, duration, replayed = replay_step(schedule, ranks, virtual_stages, micro_batches, forward, backward)
    starts = [actions[0][1] for actions in timed]
    ends = [actions[-1][1] + duration(actions[-1][0]) for actions in timed]
    busy = max(sum(duration(action) for action, _ in actions) for actions in timed)
    span = max(ends) - min(starts)
    if schedule == "zb2p":  # Ranks do not wait for each other between steps (arXiv 2401.10241, section 4).
        span = max(end - start for start, end in zip(starts, ends, strict=True))
    # Each micro-batch that was not replayed adds the work of the busiest rank.
    return span + busy * (micro_batches - replayed) / replayed, busy * micro_batches / replayed


def predict_step(
    work: Workload,
    machine: Machine,
    constants: Constants = DEFAULT,
    others: OtherCommunication = lambda rank, _: rank.context_time(),
) -> StepPrediction:
    """Predict the step time and its parts.

    Args:
        work: The workload.
        machine: The machine.
        constants: Fitted factors. Most are ignored if the machine's figures were measured (`make_rank_model`).
        others: Function for context parallelism; for other tools, also for expert parallelism (benchmarks/others.py).

    Raises:
        UserError: The machine does not support the precision.
    """
    rank = make_rank_model(work, machine, constants)
    constants = rank.constants
    stages = work.stages
    first_trained = work.trained_from
    micro_batches = work.micro_batches

    # -- computation and communication of a block
    block_times = {share: rank.block_times(share) for share in {1.0, *work.shares}}
    forward = block_times[1.0][0]
    tensor = rank.tensor_time()
    other_wait = others(rank, forward)
    exposed = tensor + other_wait
    # Recomputation repeats these messages: all of them, or those of the keys and values, which are not saved.
    recomputed_exposed = {"full": exposed, "selective": other_wait}.get(work.recompute, 0.0)
    # If weights are gathered or gradients are reduced block by block, this happens while the next block computes.
    gather_time = rank.fsdp_time(rank.block_weights() * work.low_bytes) * work.gathers_blocks
    forward, forward_wait = _overlap_communication(forward, gather_time, constants)
    # For each trained share of a block: seconds of its backward pass, of waiting, and of communication.
    backward_by_share = {}
    for share, (_, backward) in block_times.items():
        is_reduced = work.reduces_blocks and share > 0
        reduce_time = rank.fsdp_time(rank.block_weights() * work.reduce_bytes * share) * is_reduced
        communication = gather_time + reduce_time
        backward_by_share[share] = *_overlap_communication(backward, communication, constants), communication
    block_backwards = [backward_by_share[share] for share in work.shares]
    data_wait = forward_wait * work.layers + sum(wait for _, wait, _ in block_backwards[first_trained:])
    data_exposed = data_wait / work.pipeline * micro_batches

    # -- forward and backward pass of each pipeline-parallel stage for one micro-batch
    head_forward, head_backward = rank.head_times()
    # With several stages per rank, messages are assumed to take no time of the rank.
    message_time = rank.stage_message_time() if work.pipeline > 1 and work.virtual_stages == 1 else 0.0
    last_stage = len(stages) - 1
    stage_forward = tuple(
        blocks * (forward + exposed) + message_time + (stage == last_stage) * head_forward
        for stage, blocks in enumerate(stages)
    )
    backwards_of_stages = [
        block_backwards[max(first_trained, start) : end] for start, end in pairwise((0, *accumulate(stages)))
    ]
    stage_backward = tuple(
        sum(time + exposed + recomputed_exposed for time, _, _ in blocks)
        + message_time * bool(blocks)
        + (stage == last_stage) * head_backward
        for stage, blocks in enumerate(backwards_of_stages)
    )

    # -- all micro-batches
    if work.pipeline > 1:
        span, busy = _pipeline_span(
            work.schedule, work.pipeline, work.virtual_stages, micro_batches, stage_forward, stage_backward
        )
    else:
        span = busy = micro_batches * (sum(stage_forward) + sum(stage_backward))
    if machine.ranks_per_core > 1:  # While a rank waits, another rank uses its core.
        all_stages_time = micro_batches * (sum(stage_forward) + sum(stage_backward))
        span = max(span, machine.ranks_per_core * all_stages_time / work.pipeline)

    # -- communication at the end of the step, and the update of the weights
    data, data_not_overlapping = _data_parallel_time(rank)
    if work.hide_data and machine.cores is None:
        block_communication = gather_time * work.layers + sum(time for *_, time in block_backwards[first_trained:])
        # `data` overlaps with the last micro-batch, except while the blocks of this micro-batch use the links. At least
        # a tenth is assumed to be exposed.
        link_busy = block_communication / work.pipeline
        data = max(data - max(0.0, busy / micro_batches - link_busy), 0.1 * data)
    data += data_not_overlapping
    data_exposed += data
    local_weights = rank.trained_weights / (work.shard * work.context if work.zero else 1)
    # Sluice, with which machines are measured, updates the weights in one kernel.
    is_fused = work.fused or machine.measured
    # A fused update reads and writes 30 bytes per weight.
    optimizer = rank.memory_time(local_weights * 30) * (1 if is_fused else constants.eager) + rank.muon_gather_time()
    nodes = max(1, work.world / machine.gpus_per_node)
    step = (span + machine.ranks_per_core * (data + optimizer)) * (1 + constants.jitter * log2(nodes))

    # -- parts of the step
    tokens_per_gpu = work.global_batch * work.sequence / work.world / step
    backward_blocks = max(rank.sum_by_pipeline_rank([layer >= first_trained for layer in range(work.layers)]))
    block_passes, other_passes = (
        micro_batches * (work.layers / work.pipeline + backward_blocks * (2 if work.recompute in repeating else 1))
        for repeating in (("full",), ("full", "selective"))
    )
    # One message in the forward pass and, if a block has a backward pass, one there.
    messages = micro_batches * (1 + (first_trained < work.layers)) * message_time
    # `busy` contains all communication of `data_exposed` except `data`, which follows after the last backward pass.
    return StepPrediction(
        step=step,
        tokens_per_gpu=tokens_per_gpu,
        mfu=tokens_per_gpu * work.flops_per_token / machine.peak_bf16,
        compute=busy - block_passes * tensor - other_passes * other_wait - data_exposed + data - messages,
        tensor=block_passes * tensor,
        pipeline=messages,
        data=data_exposed,
        bubble=span - busy,
        optimizer=optimizer,
        others=other_passes * other_wait,
        forward=stage_forward,
        backward=stage_backward,
    )


def make_rank_model(work: Workload, machine: Machine, constants: Constants = DEFAULT) -> RankModel:
    """Return the model of a rank.

    If the figures of the machine were measured, they are used unscaled: the factors of `constants` that scale them are
    replaced.
    """
    if machine.measured is not None:
        constants = replace(
            constants,
            matmul=1.0,
            portable=1.0,
            attention=1.0,
            memory=1.0,
            link=1.0,
            eager=machine.measured.eager,
            # A CPU copies and sums what it sends, so communication does not overlap with computation.
            overlap_slowdown=1.0 if machine.cores else constants.overlap_slowdown,
        )
    return RankModel(work, machine, constants)


def _overlap_communication(compute: float, communication: float, constants: Constants) -> tuple[float, float]:
    """Return the seconds of overlapping computation and communication, and how many of these seconds are waiting."""
    slow_compute = compute + constants.overlap_slowdown * min(compute, communication)
    return max(slow_compute, communication), max(0.0, communication - slow_compute)


def _data_parallel_time(rank: RankModel) -> tuple[float, float]:
    """Return the seconds of data-parallel communication outside the blocks: overlapping, and not overlapping."""
    work = rank.work
    machine = rank.machine
    link = rank.constants.link
    gradients = rank.trained_weights * work.reduce_bytes
    if not work.zero:
        return all_reduce_time(gradients, rank.group(work.data * work.context, work.tensor), machine, link), 0.0
    shards = work.shard * work.context
    tables = work.tables(0)
    layers = work.layers / work.pipeline
    table = work.vocab * work.hidden / work.tensor
    overlapping = 0.0
    if not work.gathers_blocks:
        weights = layers * rank.block_weights() + len(tables) * table
        overlapping += rank.fsdp_time(weights * work.low_bytes, layers + len(tables))
    if not work.reduces_blocks:
        calls = sum(share > 0 for share in work.shares) / work.pipeline + sum(tables)
        overlapping += rank.fsdp_time(gradients, calls)
    overlapping += all_reduce_time(gradients / shards, rank.group(work.replicate, work.tensor * shards), machine, link)
    # The embedding's weights are needed first and its gradients come last. Neither overlaps with computation.
    gathers = work.micro_batches
    reduces = int(tables[0])
    if machine.cores:
        # On CPUs nothing overlaps, so all gathers of the embedding and the output layer count. If the embedding has a
        # backward pass, it is gathered again for this pass (`count_shard` in pipeline/parallel/traffic.py).
        gathers *= len(tables) + (work.trained_from == 0)
        reduces = work.micro_batches * sum(tables)
    not_overlapping = gathers * rank.fsdp_time(table * work.low_bytes) * work.gathers_blocks
    not_overlapping += reduces * rank.fsdp_time(table * work.reduce_bytes) * work.reduces_blocks
    return overlapping, not_overlapping

"""The order of the training samples, as a pure function of the seed and of a sample's number.

Most loaders call `randperm(n)` once per epoch and store a position in this permutation. The permutation needs memory in
proportion to the number of samples, and the position is only valid for one layout of ranks and workers. Here, any rank
of any layout can compute any part of the order. One integer, the number of samples consumed, is therefore the whole
state.

Sample number s is the s-th sample that the whole run consumes, counted from 0 over all ranks and epochs. This module
has four sections:

1. `permute`, `compute_indices`: sample number to dataset index, for one source.
2. `Mixture`: sample number to dataset index, for several sources with weights.
3. `find_order_shift`: where the order continues when the length of the samples changes.
4. `GlobalOrderSampler`: the samples that this rank reads in each step.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, DistributedSampler

from pipeline.base.errors import UserError
from pipeline.config.datasets import MixtureConfig
from pipeline.config.sections import Config, LengthConfig
from pipeline.data.manifest import Manifest, SampleManifest
from pipeline.run.origin import OrderStart

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

ORDER_VERSION = 1
"""Version of the order, saved in the manifest of each checkpoint. This number must change if a result changes."""

# -- one source ----------------------------------------------------------------------------------------------
#
# `permute` is a keyed permutation of [0, n), built like a block cipher:
#
# - A Feistel network splits a number into two halves. Each round replaces (left, right) by (right, left XOR f(right)).
#   Every round can be undone for any f, so the network permutes all numbers of 2h bits. If f is keyed and looks random,
#   the permutation also looks random: Luby and Rackoff, "How to construct pseudorandom permutations from
#   pseudorandom functions", SIAM J. Comput. 17 (1988).
# - Cycle walking restricts the permutation to [0, n): the network is applied again until the result is below n. Results
#   stay distinct: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002. The network permutes the
#   numbers of 2h bits, where 2h is the smallest even number of bits that can represent n - 1. These are at most 4n
#   numbers, so the network is applied at most 4 times on average.
#
# f(right) is the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), applied to the sum of `right` and a
# round key. The round keys are the first 8 bytes of the SHA-256 of seed, epoch and round. The aim is good mixing, not
# secrecy.

_ROUNDS = 12
"""Number of rounds. With fewer rounds, the order of very small datasets (n below about 10) is visibly uneven."""


def permute(seed: int, epoch: int, positions: Int64Array, n: int) -> Int64Array:
    """Return the dataset indices at these positions of an epoch.

    For a fixed (seed, epoch, n) this is a bijection of [0, n). Time and memory depend on the number of positions only.

    Args:
        seed: seed of the order.
        epoch: number of the epoch.
        positions: int64 of any shape, values in [0, n).
        n: number of samples, from 1 to 2**62.

    Returns: int64 of the same shape.

    Raises ValueError if `n` or a position is out of range.
    """
    if not 1 <= n <= 2**62:
        raise ValueError(f"a permutation needs 1 <= n <= 2**62, not n = {n}")
    if positions.size and (int(positions.min()) < 0 or int(positions.max()) >= n):
        raise ValueError(
            f"positions {positions.min()} to {positions.max()} are out of range: the range is 0 to {n - 1}"
        )
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = _compute_round_keys(seed, epoch)
    values = _apply_feistel(positions.astype(np.uint64).ravel(), keys, half_bits)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        walked = _apply_feistel(values[outside], keys, half_bits)
        values[outside] = walked
        outside = outside[walked >= n]
    return values.astype(np.int64).reshape(positions.shape)


def _compute_round_keys(seed: int, epoch: int) -> UInt64Array:
    """Return one uint64 key per round."""
    texts = (f"sluice order {ORDER_VERSION} seed {seed} epoch {epoch} round {i}" for i in range(_ROUNDS))
    digests = b"".join(hashlib.sha256(text.encode()).digest()[:8] for text in texts)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)


def _apply_feistel(values: UInt64Array, keys: UInt64Array, half_bits: int) -> UInt64Array:
    """Apply a balanced Feistel network, which permutes the numbers of 2 * half_bits bits, to each number."""
    shift = np.uint64(half_bits)
    mask = np.uint64(2**half_bits - 1)
    left = values >> shift
    right = values & mask
    for key in keys:
        left, right = right, left ^ (_mix_bits(right + key) & mask)
    return (left << shift) | right


def _mix_bits(z: UInt64Array) -> UInt64Array:
    """Apply the finalizer of splitmix64, modulo 2**64. Each input bit affects each output bit."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def compute_indices(seed: int, samples: Int64Array, n: int) -> Int64Array:
    """Return the dataset indices of sample numbers: `permute(seed, s // n)[s % n]` for each s.

    If an epoch ends with a partial batch, the first samples of the next epoch fill this batch. No sample of an epoch is
    dropped or repeated, and a global batch may be larger than n.

    Args:
        seed: seed of the order.
        samples: sample numbers of the run, int64 of any shape, at least 0.
        n: number of samples of the dataset.

    Returns: int64 of the same shape.
    """
    epochs, positions = np.divmod(samples, n)
    first_epoch = int(epochs.min()) if samples.size else 0
    last_epoch = int(epochs.max()) if samples.size else 0
    if first_epoch == last_epoch:
        return permute(seed, first_epoch, positions, n)
    indices = np.empty_like(samples)
    for epoch in range(first_epoch, last_epoch + 1):
        in_epoch = epochs == epoch
        indices[in_epoch] = permute(seed, epoch, positions[in_epoch], n)
    return indices


def compute_index_range(seed: int, start: int, count: int, n: int) -> Int64Array:
    """Return the dataset indices of sample numbers `start` to `start + count - 1`: int64, shape (count,)."""
    return compute_indices(seed, np.arange(start, start + count, dtype=np.int64), n)


# -- several sources -----------------------------------------------------------------------------------------

WEIGHT_SCALE = 1 << 20
"""Weights are scaled to this sum and then rounded to integers.

For sample numbers below 2**41, products with weights fit into 64 bits and are exact.
"""


class Mixture:
    """The order of the samples of several sources with weights: a pure function of seed and sample number.

    *Which source?* Of the first s samples, source 1 contributes round(s * w1), source 2 its share of the remaining
    samples, and so on. From s to s + 1 each of these counts grows by 0 or 1, so exactly one source contributes sample
    s. This is Bresenham's line algorithm at each level of the chain: a source deviates from its exact share by at most
    one sample per level. All arithmetic is on integers, with weights rounded to multiples of 1 / `WEIGHT_SCALE`. The
    counts before any s are computed directly, without a scan.

    *Which sample of the source?* The j-th sample of a source with n samples is `permute(source seed, j // n)[j % n]`.
    The source seed depends on the run's seed and on the source's name. Each source therefore has separate epochs and an
    independent order.

    If the weights change at a step, the counts of all earlier steps stay the same. The new weights apply to later
    samples.

    Dataset indices number the samples of all sources, in the order of the manifest.

    Args:
        seed: seed of the run.
        sizes: number of training samples of each source.
        weights: weights of the sources, and the steps from which each set of weights applies.
        global_batch: samples per optimizer step, to convert steps to sample numbers.
        excluded_ranges: as for `GlobalOrderSampler`. Steps count only samples that are not excluded.
        lengths: lengths of samples and the steps from which they apply; `sizes` refers to the last one. When the length
            changes, each source continues at the same place in its tokens. (): all samples have the same length.
        start: where the order begins. Earlier samples are not part of it.

    Raises UserError if a source with a weight above 0 has no sample.
    """

    def __init__(
        self,
        seed: int,
        sizes: Mapping[str, int],
        weights: MixtureConfig,
        global_batch: int,
        excluded_ranges: Sequence[tuple[int, int]] = (),
        lengths: Sequence[LengthConfig] = (),
        start: OrderStart = OrderStart(),
    ) -> None:
        self.sizes = dict(sizes)
        self.weights = weights
        self._seeds = [int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8]) for name in sizes]
        self._first_indices = np.cumsum([0, *sizes.values()])
        # A phase is the range of samples to which one set of weights and one length apply.
        self._phase_starts: list[int] = []  # first sample number of each phase
        self._phase_shares: list[list[int]] = []  # for each phase, the integer weight of each source
        # For each phase, the number of samples of its length that each source contributes before the phase.
        self._counts_before_phase: list[Int64Array] = [np.zeros(len(self.sizes), np.int64)]
        lengths = select_lengths_from(lengths, start.step + 1)
        length = lengths[0].length if lengths else 1
        first_steps = {entry.from_step for entry in weights.weights} | {entry.from_step for entry in lengths}
        first_steps = {start.step + 1, *(step for step in first_steps if step > start.step)}
        for from_step in sorted(first_steps):
            phase = weights.weights_until(from_step)[-1]
            if empty_sources := [name for name, size in sizes.items() if not size and phase.weights[name]]:
                raise UserError(
                    "data.empty_source",
                    f"data.mixture: source {empty_sources[0]} has no training sample, but its weight is not 0: add "
                    "data to it or set its weight to 0",
                )
            position = skip_excluded((from_step - 1) * global_batch, excluded_ranges)
            if from_step == start.step + 1:
                position = start.position
            if self._phase_starts:
                counts = self.count_by_source(np.array([position]))[:, 0]
                next_length = next((entry.length for entry in lengths if entry.from_step == from_step), length)
                self._counts_before_phase.append(convert_count(counts, length, next_length))
                length = next_length
            total = sum(phase.weights.values())
            scaled_weights = [phase.weights[name] / total * WEIGHT_SCALE for name in sizes]
            self._phase_starts.append(position)
            # A weight above 0 must not be rounded to 0.
            self._phase_shares.append([max(round(weight), int(weight > 0)) for weight in scaled_weights])

    def count_by_source(self, samples: Int64Array) -> Int64Array:
        """Return how many of the first s samples come from each source, for each s in `samples`.

        Samples before the start of the order are not counted.

        Args:
            samples: int64, shape (n,).

        Returns: int64, shape (sources, n).
        """
        return self._count_with_offset(np.maximum(samples, self._phase_starts[0]), 0)

    def _count_with_offset(self, samples: Int64Array, offset: int) -> Int64Array:
        """Return how many of the first s + `offset` samples come from each source, for each s in `samples`.

        The weights are those that apply to sample s, even if s + `offset` is the start of the next phase.

        Args:
            samples: int64, shape (n,).
            offset: 0 or 1.

        Returns: int64, shape (sources, n).
        """
        phases = np.searchsorted(self._phase_starts, samples, side="right") - 1
        counts = np.empty((len(self.sizes), len(samples)), np.int64)
        for phase in np.unique(phases).tolist():
            in_phase = phases == phase
            phase_samples = samples[in_phase] - self._phase_starts[phase] + offset
            counts[:, in_phase] = self._counts_before_phase[phase][:, None] + _split_by_shares(
                phase_samples, self._phase_shares[phase]
            )
        return counts

    def compute_indices(self, samples: Int64Array) -> Int64Array:
        """Return the dataset indices of sample numbers: int64, the shape of `samples`."""
        flat_samples = samples.ravel()
        before = self._count_with_offset(flat_samples, 0)
        after = self._count_with_offset(flat_samples, 1)
        indices = np.empty_like(flat_samples)
        for source, size in enumerate(self.sizes.values()):
            from_source = after[source] > before[source]  # The count of a source grows by its sample.
            if from_source.any():
                indices[from_source] = self._first_indices[source] + compute_indices(
                    self._seeds[source], before[source, from_source], size
                )
        return indices.reshape(samples.shape)

    def count_epochs(self, samples: int) -> dict[str, float]:
        """Return how many epochs of each source have been read after `samples` samples of the run, by source name."""
        counts = self.count_by_source(np.array([samples]))[:, 0].tolist()
        # A source without samples, which must have the weight 0, has read 0 epochs.
        return {name: count / max(1, self.sizes[name]) for name, count in zip(self.sizes, counts, strict=True)}


def _split_by_shares(samples: Int64Array, shares: Sequence[int]) -> Int64Array:
    """Return how many of the first s samples come from each source, for constant weights and each s in `samples`.

    Args:
        samples: int64 of any shape.
        shares: integer weight of each source.

    Returns: int64, shape (sources, *samples.shape).
    """
    counts = np.empty((len(shares), *samples.shape), np.int64)
    remaining = samples.copy()
    remaining_share = sum(shares)
    for source, share in enumerate(shares):
        # This is round(remaining * share / remaining_share) in integers.
        counts[source] = (2 * remaining * share + remaining_share) // (2 * remaining_share) if share else 0
        remaining -= counts[source]
        remaining_share -= share
    return counts


def format_epochs(epochs: Mapping[str, float]) -> str:
    """Return the result of :meth:`Mixture.count_epochs` as text, such as `web 1.50, code 0.25`."""
    return ", ".join(f"{name} {count:.2f}" for name, count in epochs.items())


def build_mixture(
    config: Config,
    manifest: Manifest | SampleManifest,
    excluded_ranges: Sequence[tuple[int, int]] = (),
    lengths: Sequence[LengthConfig] = (),
    start: OrderStart = OrderStart(),
) -> Mixture | None:
    """Return the mixture of a run; None if the run has only one source.

    Args:
        config: the run's config.
        manifest: describes the shards of the run.
        excluded_ranges: as for `GlobalOrderSampler`.
        lengths: the first entries of `Config.length_phases`; the mixture gives samples of the last of these lengths.
            (): all entries.
        start: where the order begins.
    """
    weights = config.data.mixture
    if weights is None or not isinstance(manifest, Manifest):
        return None
    lengths = lengths or config.length_phases
    length = lengths[-1].length
    sizes: dict[str, int] = {}
    first_shard = 0
    for part in manifest.parts:
        shards = manifest.train[first_shard : first_shard + part.train]
        sizes[part.name] = sum((shard.tokens - 1) // length for shard in shards)
        first_shard += part.train
    return Mixture(config.run.seed, sizes, weights, config.train.global_batch, excluded_ranges, lengths, start)


# -- sequences that grow -------------------------------------------------------------------------------------


CountT = TypeVar("CountT", int, Int64Array)


def convert_count(count: CountT, length: int, new_length: int) -> CountT:
    """Return the smallest number of samples of `new_length` that have as many tokens as `count` samples of `length`."""
    return -(-count * length // new_length)


def select_lengths_from(lengths: Sequence[LengthConfig], step: int) -> list[LengthConfig]:
    """Return the entries of `lengths` that apply to `step` or to later steps."""
    later = [entry for entry in lengths if entry.from_step > step]
    return [*lengths[: len(lengths) - len(later)][-1:], *later]


def find_order_shift(
    lengths: Sequence[LengthConfig],
    global_batch: int,
    excluded_ranges: Sequence[tuple[int, int]],
    order_start: OrderStart = OrderStart(),
) -> int:
    """Return how much sample numbers of one source differ from positions in the order.

    They differ after the length has changed, and if the order does not begin at the first step.

    Positions count the samples of the run, of any length. The sample of the last of `lengths` at position p is the
    sample number p + shift of the order of samples of this length. Sample numbers continue at the same place in the
    tokens: if N tokens were read before, the first sample number is N / length, rounded up. The fraction of the epoch
    that was read is therefore kept. But samples of each length have their own order, so a token of this epoch may be
    read again, or be left out.

    Args:
        lengths: lengths of samples and the steps from which they apply.
        global_batch: samples per optimizer step.
        excluded_ranges: as for `GlobalOrderSampler`.
        order_start: where the order begins.
    """
    shift = -order_start.position
    for before, after in pairwise(select_lengths_from(lengths, order_start.step + 1)):
        start = skip_excluded((after.from_step - 1) * global_batch, excluded_ranges)
        shift = convert_count(start + shift, before.length, after.length) - start
    return shift


# -- the samples of a rank -----------------------------------------------------------------------------------

_SAMPLES_PER_GROUP = 4096
"""Indices are computed for groups of about this many samples, because each call of numpy has a fixed cost."""


class IndexedDataset(Dataset[dict[str, Any]]):
    """Interface of a dataset for `GlobalOrderSampler`."""

    lengths: Callable[[Int64Array], Int64Array] | None = None
    """Function that returns the lengths of samples, or another measure of their work, given their indices: int64, the
    shape of the indices.

    None if all samples have the same length.
    """
    needs_positions = False
    """Whether reading a sample also requires its position in the order of the run."""

    def __len__(self) -> int:
        """Return the number of samples."""
        raise NotImplementedError


class GlobalOrderSampler(DistributedSampler[Int64Array]):
    """Yield the sample indices that this rank reads in each optimizer step, without end.

    Step k of the run reads the sample numbers [k * G, (k + 1) * G), with G = `global_batch`. Rank r of W reads the
    positions [r * G / W, (r + 1) * G / W) of this global batch. The layout therefore only splits the batch. The ranks
    together always read the same samples.

    With `stripe`, the ranks instead take turns to read `stripe` consecutive samples, also if the dataset has lengths.
    The n-th turns of all ranks together are consecutive samples of the order.

    Each item is an int64 array of dataset indices, of shape (G / W,). If the dataset needs positions, the shape is
    (2, G / W): indices, then positions in the order. If the dataset has lengths, the samples of a global batch are
    assigned to ranks so that the sums of their lengths are balanced (`assign_to_ranks`).

    The sampler continues with the next epoch without a call of `set_epoch`, so `set_epoch` has no effect.

    Args:
        dataset: the samples.
        global_batch: G, the number of samples of an optimizer step over all ranks.
        seed: seed of the order, for data of one source.
        samples_consumed: number of samples that the run has already consumed.
        excluded_ranges: (position, count) ranges of the order to skip (pipeline/resilience/guard.py).
        num_replicas: data-parallel size; None: that of the default process group.
        rank: data-parallel rank; None: that of the default process group.
        order: function that returns the dataset indices of positions; None: the order of one source with `seed`.
        shift: number that is added to a position to get the sample number (`find_order_shift`), for one source.
        stripe: number of consecutive samples that a rank reads at a time; it divides G / W. None: all G / W samples.

    Raises UserError if W does not divide G.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        *,
        global_batch: int,
        seed: int,
        samples_consumed: int = 0,
        excluded_ranges: Sequence[tuple[int, int]] = (),
        num_replicas: int | None = None,
        rank: int | None = None,
        order: Callable[[Int64Array], Int64Array] | None = None,
        shift: int = 0,
        stripe: int | None = None,
    ) -> None:
        # `shuffle` has no effect, because this class replaces `__iter__`.
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed)
        if global_batch % self.num_replicas:
            raise UserError(
                "config.conflict",
                f"train.global_batch ({global_batch}) is not a multiple of the {self.num_replicas} data-parallel ranks",
            )
        self.global_batch = global_batch
        self.samples_consumed = samples_consumed
        self.excluded_ranges = sorted(excluded_ranges)
        self.lengths = dataset.lengths if stripe is None else None
        self.needs_positions = dataset.needs_positions
        self._size = len(dataset)
        self._stripe = stripe or global_batch // self.num_replicas
        self.order = order or (lambda positions: compute_indices(seed, positions + shift, self._size))

    def __len__(self) -> int:
        """Return the number of optimizer steps of one epoch, ceil(n / G). Iteration does not end after an epoch."""
        return -(-self._size // self.global_batch)

    def __iter__(self) -> Iterator[Int64Array]:
        """Yield the sample indices of each optimizer step after `samples_consumed`."""
        # If samples have lengths, each rank computes the whole global batch and then selects its share.
        samples_per_step = self.global_batch // (1 if self.lengths else self.num_replicas)
        steps = max(1, min(_SAMPLES_PER_GROUP // samples_per_step, len(self)))  # At most one epoch per group.
        first_position = self.samples_consumed
        offsets_in_step = np.arange(samples_per_step, dtype=np.int64)
        if not self.lengths:
            groups, places = np.divmod(offsets_in_step, self._stripe)
            offsets_in_step = (groups * self.num_replicas + self.rank) * self._stripe + places
        # Positions relative to `first_position`, one row per step.
        offsets = self.global_batch * np.arange(steps, dtype=np.int64)[:, None] + offsets_in_step
        while True:
            positions = first_position + offsets
            for start, count in self.excluded_ranges:
                positions[positions >= start] += count
            for batch in np.stack([self.order(positions), positions], axis=1):
                if self.lengths:
                    batch = batch[:, assign_to_ranks(self.lengths(batch[0]), self.num_replicas)[self.rank]]
                yield batch if self.needs_positions else batch[0]
            first_position += steps * self.global_batch


def skip_excluded(consumed: int, excluded_ranges: Iterable[tuple[int, int]]) -> int:
    """Return the position in the order of the next sample, after `consumed` samples have been consumed.

    Args:
        consumed: number of samples consumed, without excluded samples.
        excluded_ranges: (position, count) ranges of the order to skip, sorted and disjoint.
    """
    position = consumed
    for start, count in excluded_ranges:
        if position >= start:
            position += count
    return position


def assign_to_ranks(lengths: Int64Array, ranks: int) -> Int64Array:
    """Assign the positions of a global batch to ranks so that the sums of their lengths are balanced.

    This is "longest processing time first" (Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math.
    17 (1969)), but all ranks get the same number of samples. From the longest sample to the shortest, each sample is
    assigned to a rank that has fewer samples than its share. Of these ranks, the rank with the smallest sum is chosen,
    and among equal sums the lowest rank. Because the number of samples per rank is fixed, the largest sum may exceed
    the largest sum of contiguous ranges of positions. In this case the contiguous ranges are used.

    Args:
        lengths: lengths of the samples of a global batch, int64 of shape (G,).
        ranks: number of ranks.

    Returns: positions in the global batch, int64, shape (ranks, G / ranks). Each row starts with the longest sample.
    """
    samples_per_rank = len(lengths) // ranks
    order = np.argsort(-lengths, kind="stable")
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for position in order.tolist():
        load, rank = heapq.heappop(loads)
        assigned[rank].append(position)
        if len(assigned[rank]) < samples_per_rank:
            heapq.heappush(loads, (load + int(lengths[position]), rank))
    balanced = np.array(assigned, dtype=np.int64)
    contiguous = np.sort(order).reshape(ranks, samples_per_rank)  # `order` is a permutation of 0 to G - 1.
    if lengths[balanced].sum(1).max() <= lengths[contiguous].sum(1).max():
        return balanced
    return np.take_along_axis(contiguous, np.argsort(-lengths[contiguous], axis=1, kind="stable"), axis=1)

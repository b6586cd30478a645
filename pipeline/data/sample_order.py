"""The order of the samples: a pure function, so that a run may stop, move and grow without losing its place.

Most loaders draw `randperm(n)` once an epoch and remember where they are. That takes memory that grows with
the data, and the place in it belongs to one layout of ranks and workers. Here a sample's index is *computed*:
run-global sample number s (the s-th sample that the whole run consumes, counted from 0 over all ranks and
epochs) is dataset index `perm(seed, s // n)[s % n]`. One integer says where a run is, and any rank of any
layout can ask for any part of the order.

`perm` is a keyed permutation of [0, n), the way block ciphers are built:

- A **Feistel network** splits a number into two halves and, round after round, replaces (left, right) by
  (right, left XOR f(right)). Whatever f is, this can be undone, so it permutes all numbers of 2h bits. With f
  keyed and random-looking the permutation is too: Luby and Rackoff, "How to construct pseudorandom permutations
  from pseudorandom functions", SIAM J. Comput. 17 (1988).
- **Cycle walking** cuts it down to [0, n): apply it again until the result is below n. The numbers below n keep
  distinct results: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002. The domain is the
  smallest even number of bits that holds n, thus at most 4n numbers, and a walk has at most 4 steps on average.

f is the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014) over the half plus a round key; the round
keys come from SHA-256 of (seed, epoch, round). Good mixing is the aim here, not secrecy.

**An epoch's last partial batch** is filled with the first samples of the next epoch: batches are cut from the
endless sequence of sample numbers and never drop or repeat a sample. A global batch may even exceed n.

Any change of the results is a change of :data:`ORDER_VERSION`, which checkpoints keep in their manifest.


The order of samples of several sources with weights: a pure function, too, of seed and sample number.

**Which source.** Of the first s samples under weights w, source 1 gets round(s·w1), source 2 its part of the rest in
the same way, and so on: at each level of this chain a count grows by 0 or 1 from s to s + 1, so exactly one source
takes sample s, and no source is ever more than a sample per level away from its share (Bresenham's line, once a level).
All is integer arithmetic, weights taken to a millionth. So how many samples each source gave before s needs no scan.

**Which sample of it.** Its j-th sample is `perm(seed of the source, j // n)[j % n]` (sample_order.py), with
a seed that depends on the run's and on the source's name. So each source has epochs of its own, and its order does not
depend on the others.

**Where weights change**, at the samples of a step, counts go on from those of all steps before.

A dataset index is that of a mixture's manifest: sources one behind the other.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pipeline.base.errors import UserError
from pipeline.config.datasets import MixtureConfig
from pipeline.config.sections import Config
from pipeline.data.manifest import Manifest, SampleManifest

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

ORDER_VERSION = 1
"""Version of the order; two runs have the same order only if they have the same version."""

_ROUNDS = 12  # fewer leave the smallest domains (n below about 10) visibly uneven


def permute(seed: int, epoch: int, positions: Int64Array, n: int) -> Int64Array:
    """Dataset indices that stand at `positions` of epoch `epoch`'s order.

    `positions` is int64 of any shape with values in [0, n); the result is int64 of the same shape. For fixed
    (seed, epoch, n) it is a bijection of [0, n). Time and memory depend on the number of positions, not on n.
    Raises ValueError for n < 1 or beyond 2**62 and for positions outside [0, n).
    """
    if not 1 <= n <= 2**62:
        raise ValueError(f"a permutation needs 1 <= n <= 2**62, not n = {n}")
    if positions.size and (int(positions.min()) < 0 or int(positions.max()) >= n):
        raise ValueError(f"positions reach from {positions.min()} to {positions.max()}; allowed are 0 to {n - 1}")
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    values = _feistel(positions.astype(np.uint64).ravel(), keys, half_bits)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        walked = _feistel(values[outside], keys, half_bits)
        values[outside] = walked
        outside = outside[walked >= n]
    return values.astype(np.int64).reshape(positions.shape)


def compute_indices(seed: int, samples: Int64Array, n: int) -> Int64Array:
    """Dataset indices, int64 and of the same shape, of run-global sample numbers `samples` (int64, >= 0).

    Sample s is `perm(seed, s // n)[s % n]`; `n` is the number of samples of the dataset.
    """
    epochs, positions = np.divmod(samples, n)
    first, last = (int(epochs.min()), int(epochs.max())) if samples.size else (0, 0)
    if first == last:
        return permute(seed, first, positions, n)
    indices = np.empty_like(samples)
    for epoch in range(first, last + 1):
        here = epochs == epoch
        indices[here] = permute(seed, epoch, positions[here], n)
    return indices


def compute_index_range(seed: int, start: int, count: int, n: int) -> Int64Array:
    """Dataset indices, int64 of shape (count,), of the run-global samples `start` to `start + count - 1`."""
    return compute_indices(seed, np.arange(start, start + count, dtype=np.int64), n)


def skip_excluded(consumed: int, left_out: Iterable[tuple[int, int]]) -> int:
    """Position of the sample that comes after `consumed` ones; `left_out`: sorted, apart (position, count) ranges."""
    position = consumed
    for start, count in left_out:
        if position >= start:
            position += count
    return position


def assign_to_ranks(lengths: Int64Array, ranks: int) -> Int64Array:
    """Which positions of a global batch each rank takes: int64 of shape (ranks, G / ranks), the longest sample first.

    `lengths`: int64 of shape (G,). Longest processing time first (Graham, "Bounds on multiprocessing timing
    anomalies", SIAM J. Appl. Math. 17 (1969)), with as many samples for each rank: from the longest to the shortest,
    each goes to the rank with the least so far that has room, ties to the lower number. Where the greedy deal's largest
    sum of lengths is larger than that of equal runs of positions (room makes that possible), those are taken.
    """
    room = len(lengths) // ranks
    order = np.argsort(-lengths, kind="stable")
    hands: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for position in order.tolist():
        load, rank = heapq.heappop(loads)
        hands[rank].append(position)
        if len(hands[rank]) < room:
            heapq.heappush(loads, (load + int(lengths[position]), rank))
    dealt, plain = np.array(hands, dtype=np.int64), np.sort(order).reshape(ranks, room)
    if lengths[dealt].sum(1).max() <= lengths[plain].sum(1).max():
        return dealt
    return np.take_along_axis(plain, np.argsort(-lengths[plain], axis=1, kind="stable"), axis=1)


def _round_keys(seed: int, epoch: int) -> UInt64Array:
    """One uint64 key per round."""
    texts = (f"sluice order {ORDER_VERSION} seed {seed} epoch {epoch} round {i}" for i in range(_ROUNDS))
    digests = b"".join(hashlib.sha256(text.encode()).digest()[:8] for text in texts)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)


def _feistel(values: UInt64Array, keys: UInt64Array, half_bits: int) -> UInt64Array:
    """Balanced Feistel network: a permutation of the numbers of 2 * half_bits bits, element by element."""
    shift, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << shift) | right


def _mix(z: UInt64Array) -> UInt64Array:
    """splitmix64's finalizer: every bit of the argument moves every bit of the result (arithmetic mod 2**64)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


WEIGHT_SCALE = 1 << 20
"""What weights add up to: products with sample numbers below 2**41 stay exact."""


class Mixture:
    """The order of one mixture."""

    def __init__(
        self,
        seed: int,
        sizes: Mapping[str, int],
        weights: MixtureConfig,
        global_batch: int,
        left_out: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`sizes`: samples of each source; `left_out`: as of GlobalOrderSampler, weights change behind them.

        Raises UserError for a source that has none and should give some."""
        self.sizes, self.weights = dict(sizes), weights
        self._seeds = [int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8]) for name in sizes]
        self._firsts = np.cumsum([0, *sizes.values()])
        self._starts: list[int] = []
        self._shares: list[list[int]] = []
        self._before: list[Int64Array] = [np.zeros(len(self.sizes), np.int64)]
        for part in weights.weights:
            if empty := [name for name, size in sizes.items() if not size and part.weights[name]]:
                raise UserError(
                    "data.empty_source", f"data.mixture: {empty[0]} has no sample to train on, and its weight is not 0"
                )
            start = skip_excluded((part.from_step - 1) * global_batch, left_out)
            if self._starts:
                self._before.append(self.counts(np.array([start]))[:, 0])
            whole = sum(part.weights.values())
            wanted = [part.weights[name] / whole * WEIGHT_SCALE for name in sizes]
            self._starts.append(start)
            self._shares.append([max(round(one), int(one > 0)) for one in wanted])

    def counts(self, samples: Int64Array) -> Int64Array:
        """How many of the first s samples each source gave, for each s of `samples`: int64, (n,) to (sources, n)."""
        return self._counts(samples, 0)

    def _counts(self, samples: Int64Array, more: int) -> Int64Array:
        """The same of the first s + `more`, by the weights of sample s."""
        parts = np.searchsorted(self._starts, samples, side="right") - 1
        found = np.empty((len(self.sizes), len(samples)), np.int64)
        for part in np.unique(parts).tolist():
            here = parts == part
            inside = _count_by_source(samples[here] - self._starts[part] + more, self._shares[part])
            found[:, here] = self._before[part][:, None] + inside
        return found

    def indices(self, samples: Int64Array) -> Int64Array:
        """Dataset indices of run-global sample numbers: int64, of the same shape."""
        flat = samples.ravel()
        before, after = self._counts(flat, 0), self._counts(flat, 1)
        indices = np.empty_like(flat)
        for source, size in enumerate(self.sizes.values()):
            here = after[source] > before[source]
            if here.any():
                indices[here] = self._firsts[source] + compute_indices(self._seeds[source], before[source, here], size)
        return indices.reshape(samples.shape)

    def epochs(self, samples: int) -> dict[str, float]:
        """How often each source was read after so many samples."""
        counts = self.counts(np.array([samples]))[:, 0].tolist()
        return {name: count / max(1, self.sizes[name]) for name, count in zip(self.sizes, counts, strict=True)}


def format_epochs(epochs: Mapping[str, float]) -> str:
    """What :meth:`Mixture.epochs` tells, in words."""
    return ", ".join(f"{name} {count:.2f}" for name, count in epochs.items())


def _count_by_source(samples: Int64Array, shares: Sequence[int]) -> Int64Array:
    """How many of the first `samples` each source gave, by weights that do not change: int64, (sources, …)."""
    found = np.empty((len(shares), *samples.shape), np.int64)
    left, whole = samples.copy(), sum(shares)
    for source, share in enumerate(shares):
        found[source] = (2 * left * share + whole) // (2 * whole) if share else 0
        left -= found[source]
        whole -= share
    return found


def build_mixture(
    config: Config, manifest: Manifest | SampleManifest, left_out: Sequence[tuple[int, int]] = ()
) -> Mixture | None:
    """The mixture of a run; None where it has one source."""
    wanted = config.data.mixture
    if wanted is None or not isinstance(manifest, Manifest):
        return None
    length, first, sizes = config.data.sequence_length, 0, {}
    for part in manifest.parts:
        shards = manifest.train[first : first + part.train]
        sizes[part.name], first = sum((shard.tokens - 1) // length for shard in shards), first + part.train
    return Mixture(config.run.seed, sizes, wanted, config.train.global_batch, left_out)

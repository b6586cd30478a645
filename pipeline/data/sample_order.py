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
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

ORDER_VERSION = 1
"""Version of the order; two runs have the same order only if they have the same version."""

_ROUNDS = 12  # fewer leave the smallest domains (n below about 10) visibly uneven


def perm(seed: int, epoch: int, positions: Int64Array, n: int) -> Int64Array:
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


def indices_of(seed: int, samples: Int64Array, n: int) -> Int64Array:
    """Dataset indices, int64 and of the same shape, of run-global sample numbers `samples` (int64, >= 0).

    Sample s is `perm(seed, s // n)[s % n]`; `n` is the number of samples of the dataset.
    """
    epochs, positions = np.divmod(samples, n)
    first, last = (int(epochs.min()), int(epochs.max())) if samples.size else (0, 0)
    if first == last:
        return perm(seed, first, positions, n)
    indices = np.empty_like(samples)
    for epoch in range(first, last + 1):
        here = epochs == epoch
        indices[here] = perm(seed, epoch, positions[here], n)
    return indices


def sample_indices(seed: int, start: int, count: int, n: int) -> Int64Array:
    """Dataset indices, int64 of shape (count,), of the run-global samples `start` to `start + count - 1`."""
    return indices_of(seed, np.arange(start, start + count, dtype=np.int64), n)


def position_of(consumed: int, left_out: Iterable[tuple[int, int]]) -> int:
    """Position of the sample that comes after `consumed` ones; `left_out`: sorted, apart (position, count) ranges."""
    position = consumed
    for start, count in left_out:
        if position >= start:
            position += count
    return position


def deal(lengths: Int64Array, ranks: int) -> Int64Array:
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

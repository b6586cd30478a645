"""The order of samples of several sources with weights: a pure function, too, of seed and sample number.

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
from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.base.errors import UserError
from pipeline.config.datasets import MixtureConfig
from pipeline.config.sections import Config
from pipeline.data.manifest import Manifest, SampleManifest
from pipeline.data.sample_order import Int64Array, indices_of, position_of

SCALE = 1 << 20
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
                raise UserError(f"data.mixture: {empty[0]} has no sample to train on, and its weight is not 0")
            start = position_of((part.from_step - 1) * global_batch, left_out)
            if self._starts:
                self._before.append(self.counts(np.array([start]))[:, 0])
            whole = sum(part.weights.values())
            wanted = [part.weights[name] / whole * SCALE for name in sizes]
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
            inside = _dealt(samples[here] - self._starts[part] + more, self._shares[part])
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
                indices[here] = self._firsts[source] + indices_of(self._seeds[source], before[source, here], size)
        return indices.reshape(samples.shape)

    def epochs(self, samples: int) -> dict[str, float]:
        """How often each source was read after so many samples."""
        counts = self.counts(np.array([samples]))[:, 0].tolist()
        return {name: count / max(1, self.sizes[name]) for name, count in zip(self.sizes, counts, strict=True)}


def epoch_words(epochs: Mapping[str, float]) -> str:
    """What :meth:`Mixture.epochs` tells, in words."""
    return ", ".join(f"{name} {count:.2f}" for name, count in epochs.items())


def _dealt(samples: Int64Array, shares: Sequence[int]) -> Int64Array:
    """How many of the first `samples` each source gave, by weights that do not change: int64, (sources, …)."""
    found = np.empty((len(shares), *samples.shape), np.int64)
    left, whole = samples.copy(), sum(shares)
    for source, share in enumerate(shares):
        found[source] = (2 * left * share + whole) // (2 * whole) if share else 0
        left -= found[source]
        whole -= share
    return found


def mixture_of(
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

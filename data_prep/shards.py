"""Shards: each task writes the shards of its work units, and whoever is last writes the manifest of all.

Unit u belongs to task u mod tasks. A unit's shards follow from its pieces, the tokenizer and the config alone,
so the number of tasks leaves no trace, and a repeated run writes the same bytes over what a killed one left. A
unit is done when its manifest, written last, vouches for its files (sizes and hashes) and fits its pieces, its inputs
and the tokenizer as they are now; only what is missing is done again.

Within a unit the documents keep their order; held-out documents (by a hash of their text) go to files of their
own. A document that cannot be read is listed in its unit's manifest. Line numbers there count from the start of
the piece, because no task knows how many lines stand before it; `finalize` knows, from the line counts of all
pieces, and writes `rejected.jsonl` with the numbers that an editor shows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from data_prep.lustre import stripe
from data_prep.manifest import (
    FORMAT_VERSION,
    ORDER_VERSION,
    SHARDS,
    WAY_OUT,
    Manifest,
    Prepared,
    UnitManifest,
    file_problem,
    input_problem,
    load_prepared,
    load_unit,
    prepare_key,
    unit_keys,
    unit_path,
    write_manifest,
)
from data_prep.prepare import is_held_out
from data_prep.shard_file import ShardWriter
from data_prep.sources import read_documents
from data_prep.tokenizer import Encoder, load_encoder
from data_prep.units import Plan, read_plan
from pipeline.config import DataConfig
from pipeline.config_site import StripeConfig
from pipeline.errors import InputError, UserError
from pipeline.files import write_atomic

_BATCH_DOCUMENTS = 512
_BATCH_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Work:
    """What every unit needs: config, folder, and what `prepare` fixed."""

    data: DataConfig
    data_dir: Path
    prepared: Prepared
    plan: Plan
    keys: list[str]
    """The key of each unit."""
    encoder: Encoder

    @classmethod
    def load(cls, data: DataConfig, data_dir: Path) -> Work:
        """Read it. Raises InputError when `prepare` is not done or its files are damaged."""
        prepared = load_prepared(data_dir)
        again = "run the prepare stage again, e.g. `python submit.py resume RUN`"
        if prepared.key != prepare_key(data):
            raise InputError(f"{data_dir / 'prepare.json'} was made with another data config or other code: {again}")

        for name, entry in (("units.json", prepared.units), ("tokenizer.json", prepared.tokenizer)):
            if file_problem(data_dir / name, entry):
                raise InputError(f"{data_dir / name} is missing or damaged: {again}")
        encoder = load_encoder(data_dir / "tokenizer.json", data.tokenizer.eos_token)
        plan = read_plan(data_dir / "units.json")
        return cls(data, data_dir, prepared, plan, unit_keys(data_dir, prepared), encoder)


def write_unit(work: Work, unit: int) -> bool:
    """Write the shards and the manifest of one unit; False when they were there and valid (sizes and hashes).

    Raises InputError naming an input that is not what `prepare` saw, UserError for one that cannot be read,
    OSError where the file system refuses.
    """
    key = work.keys[unit]
    if load_unit(work.data_dir, unit, key, hashes=True) is not None:
        return False
    shards = work.data_dir / SHARDS
    shards.mkdir(exist_ok=True)
    for left_over in shards.glob(f".unit-{unit:05d}[-.]*.tmp"):  # of a killed task
        left_over.unlink(missing_ok=True)
    _check_inputs(work, unit)
    attributes: dict[str, str | int] = {
        "format_version": FORMAT_VERSION,
        "tokenizer_sha256": work.prepared.tokenizer.sha256,
        "source": ", ".join(work.data.sources)[:1000],  # HDF5 takes 64 KB of attributes
    }
    train, held_out = (
        ShardWriter(work.data_dir, f"unit-{unit:05d}-{split}", work.data.shard_tokens, work.encoder.dtype, attributes)
        for split in ("train", "held_out")
    )
    documents = held_out_documents = 0
    lines = [0] * len(work.plan.units[unit])
    rejected: list[tuple[int, int, str]] = []
    for batch in _batches(_documents(work, unit, lines, rejected)):
        for text, tokens in zip(batch, work.encoder.encode(batch), strict=True):
            utf8 = text.encode()
            held = is_held_out(utf8, work.data.held_out)
            (held_out if held else train).add(tokens, len(utf8))
            documents += 1
            held_out_documents += held
    manifest = UnitManifest(
        key=key,
        unit=unit,
        documents=documents,
        held_out_documents=held_out_documents,
        lines=tuple(lines),
        rejected=tuple(rejected),
        train=train.close(),
        held_out=held_out.close(),
    )
    _check_inputs(work, unit)  # one that changed while it was read fits no manifest
    write_manifest(unit_path(work.data_dir, unit), manifest)
    return True


def _check_inputs(work: Work, unit: int) -> None:
    for index in {piece.input for piece in work.plan.units[unit]}:
        source = work.plan.inputs[index]
        if problem := input_problem(source.path, source.size, source.mtime_ns):
            raise InputError(
                f"{problem}: put it back, or run prepare and shard again on what there is now, e.g. "
                "`python submit.py resume RUN`"
            )


def _documents(work: Work, unit: int, lines: list[int], rejected: list[tuple[int, int, str]]) -> Iterator[str]:
    """Texts of the unit's documents in order; counts lines by piece and lists rejected documents on the way."""
    for place, (index, start, end) in enumerate(work.plan.units[unit]):
        for document in read_documents(work.plan.inputs[index], start, end, work.data.text_field):
            lines[place] = document.line
            if document.reason is not None:
                rejected.append((place, document.line, document.reason))
            elif document.text:
                yield document.text


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Batches large enough to keep the tokenizer's threads busy, small enough for any memory."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if len(batch) == _BATCH_DOCUMENTS or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def shard(
    data: DataConfig,
    data_dir: Path,
    task: int,
    tasks: int,
    log: Callable[[str], None],
    striping: StripeConfig = StripeConfig(),
) -> None:
    """Do the units of task `task` of `tasks` that are missing. Raises what :func:`write_unit` raises."""
    work = Work.load(data, data_dir)
    units = range(task, len(work.plan.units), tasks)
    shards = work.data_dir / SHARDS
    shards.mkdir(exist_ok=True)
    stripe(shards, striping, log)
    for number, unit in enumerate(units, 1):
        written = write_unit(work, unit)
        log(f"shard: unit {unit} {'written' if written else 'was there already'} ({number} of {len(units)})")


def finalize(data: DataConfig, data_dir: Path, log: Callable[[str], None]) -> Manifest:
    """Write `rejected.jsonl` and `manifest.json` once all units are done, and remove files that no unit lists.

    Checks sizes; hashes are those of the writing tasks. Raises InputError naming units that are missing or not
    whole, UserError when more documents are unreadable than `data.max_rejected` allows or none is held out.
    """
    work = Work.load(data, data_dir)
    data_dir, prepared = work.data_dir, work.prepared
    found = [load_unit(data_dir, unit, key, hashes=False) for unit, key in enumerate(work.keys)]
    units = [unit for unit in found if unit is not None]
    if len(units) < len(found):
        missing = [str(index) for index, unit in enumerate(found) if unit is None]
        named = ", ".join(missing[:20]) + (", …" if len(missing) > 20 else "")
        raise InputError(f"{data_dir / SHARDS}: units missing or not whole: {named}: {WAY_OUT}")
    manifest = _manifest(work, units)
    _reject(work, units, manifest)
    if data.held_out and not manifest.held_out:
        raise UserError(
            f"data.held_out: none of {manifest.documents} documents falls into the held-out fraction {data.held_out}, "
            "so nothing could be evaluated: start a new run with a larger fraction, more documents, or 0"
        )
    write_manifest(data_dir / "manifest.json", manifest)
    listed = {Path(entry.file).name for entry in (*manifest.train, *manifest.held_out)}
    listed |= {unit_path(data_dir, unit).name for unit in range(prepared.unit_count)}
    for path in (data_dir / SHARDS).glob("unit-*"):
        if path.name not in listed:
            path.unlink(missing_ok=True)
    log(
        f"shard: {manifest.documents:,} documents ({manifest.held_out_documents:,} held out, "
        f"{manifest.rejected_documents:,} rejected), {manifest.train_tokens:,} + {manifest.held_out_tokens:,} tokens"
    )
    return manifest


def _manifest(work: Work, units: list[UnitManifest]) -> Manifest:
    train = tuple(entry for unit in units for entry in unit.train)
    held_out = tuple(entry for unit in units for entry in unit.held_out)
    return Manifest(
        format_version=FORMAT_VERSION,
        order_version=ORDER_VERSION,
        key=work.prepared.shards_key,
        source=tuple(work.data.sources),
        tokenizer_sha256=work.prepared.tokenizer.sha256,
        vocab_size=work.encoder.vocab_size,
        eos_id=work.encoder.eos_id,
        dtype=work.encoder.dtype,
        documents=sum(unit.documents for unit in units),
        held_out_documents=sum(unit.held_out_documents for unit in units),
        rejected_documents=sum(len(unit.rejected) for unit in units),
        train_tokens=sum(entry.tokens for entry in train),
        held_out_tokens=sum(entry.tokens for entry in held_out),
        train_bytes=sum(entry.bytes for entry in train),
        held_out_bytes=sum(entry.bytes for entry in held_out),
        train=train,
        held_out=held_out,
    )


def _reject(work: Work, units: list[UnitManifest], manifest: Manifest) -> None:
    """Write `rejected.jsonl`: file, line (from 1; parquet: row) and reason. Raises UserError over the limit."""
    before: dict[int, int] = {}  # lines of an input in the pieces so far: units and pieces are in its order
    rows: list[dict[str, str | int]] = []
    for unit in units:
        pieces = work.plan.units[unit.unit]
        starts = [before.get(piece.input, 0) for piece in pieces]
        for place, line, reason in unit.rejected:
            path = work.plan.inputs[pieces[place].input].path
            rows.append({"file": path, "line": starts[place] + line, "reason": reason})
        for piece, start, count in zip(pieces, starts, unit.lines, strict=True):
            before[piece.input] = start + count
    listing = work.data_dir / "rejected.jsonl"
    write_atomic(listing, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    total = manifest.documents + len(rows)
    if len(rows) > work.data.max_rejected * total:
        first = rows[0]
        raise UserError(
            f"{len(rows)} of {total} documents ({len(rows) / total:.2%}) cannot be read, more than data.max_rejected "
            f"({work.data.max_rejected:.2%}) allows; the first is {first['file']} line {first['line']}: "
            f"{first['reason']}; all are in {listing}. Mend or remove them, or raise data.max_rejected"
        )

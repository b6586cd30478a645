"""The data folder of a run on existing tokens (`data.records: tokens`): files are used in place, not copied.

    data_dir/tokenizer.json, units.json, prepare.json   as for text; a unit is a range of tokens of a file
    data_dir/shards/unit-00003.json                     the SHA-256 of the range and its position in the file
    data_dir/manifest.json                              all ranges

A range has at most `data.shard_tokens` tokens, so that several tasks can read a large file and several ranks can verify
it. Many small files share a unit. The end of each file is held out: about the last `data.held_out` of its tokens, from
the nearest end of a document on. Training separates documents by their end-of-text token. If documents of a file's
index do not have this token, the file is an error; `data import` copies it and adds the token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from data_prep.data_folder import Log
from data_prep.find_inputs import find_inputs
from data_prep.text_folder import TextFolder, UnitManifest
from data_prep.work_units import InputRange, WorkPlan, write_plan
from pipeline.base.errors import UserError
from pipeline.base.files import sha256_file, write_atomic
from pipeline.data.manifest import ShardEntry
from pipeline.run.code import call_in_child_process

if TYPE_CHECKING:
    from data_prep.token_files import TokenFile, TokenStatistics
    from data_prep.tokenizer import Encoder

MAX_FILES_CHECKED_EARLY = 100
"""Number of files that are checked before the run is created. The prepare stage checks all files."""
TOKEN_ENDINGS = dict.fromkeys((".bin", ".ds", ".h5", ".hdf5", ".arrow", ".tar", ".tar.gz"), "tokens")
_SEARCH_BLOCK = 1 << 20
"""Number of tokens that are searched at once for the end of a document."""
MANY_UNITS = 512
"""If there are more ranges than this, small ones share a unit, because each unit costs a file and an fsync."""


def group_into_units(ranges: Sequence[InputRange], max_tokens: int) -> tuple[tuple[InputRange, ...], ...]:
    """Group ranges into units, in order.

    A unit has one range. If there are more than `MANY_UNITS` ranges, a unit has several ranges, with at most
    `max_tokens` tokens in total.
    """
    if len(ranges) <= MANY_UNITS:
        return tuple((token_range,) for token_range in ranges)
    units: list[list[InputRange]] = []
    unit_tokens = 0
    for token_range in ranges:
        tokens = token_range.end - token_range.start
        if not units or unit_tokens + tokens > max_tokens:
            units.append([])
            unit_tokens = 0
        units[-1].append(token_range)
        unit_tokens += tokens
    return tuple(map(tuple, units))


class TokensFolder(TextFolder):
    """The data folder of a run on tokens."""

    prepared_label = "files of tokens"
    endings = TOKEN_ENDINGS

    def check_inputs(self) -> list[str]:
        """Check the inputs and, in a child process with h5py and numpy, whether the first files can be mapped."""
        files = super().check_inputs()
        call_in_child_process("data_prep.token_files", "check_mappable", *files[:MAX_FILES_CHECKED_EARLY])
        return files

    def prepare_inputs(self, log: Log) -> None:
        """Check all files, split them into ranges and copy the tokenizer. Raises UserError for an unusable file."""
        from data_prep.token_files import require_mappable
        from data_prep.tokenizer import load_encoder

        tokenizer = self.data.tokenizer
        assert tokenizer.path is not None
        inputs = find_inputs(self.data, self.endings)
        # Load the user's file, not the copy, so that errors name it.
        encoder = load_encoder(tokenizer.path, tokenizer.eos_token, self.data.add_special_tokens)
        formats: set[str] = set()
        have_bos: set[bool] = set()
        total_tokens = 0
        is_split = not self.data.held_out
        ranges = list[InputRange]()
        for number, source in enumerate(inputs):
            file = require_mappable(source.path)
            if file.note:
                log(f"warning: {source.path}{file.note}")
            assert file.tokens is not None
            have_bos.add(self._starts_with_bos(file, encoder))
            total_tokens += file.tokens
            formats.add(file.format)
            split = self._find_held_out_start(file, encoder.eos_id)
            starts = [*self._list_range_starts(0, split), *self._list_range_starts(split, file.tokens), file.tokens]
            # A file without tokens has one empty range, which is an error when it is read.
            spans = [span for span in pairwise(starts) if span[0] < span[1]] or [(0, 0)]
            ranges += [InputRange(number, *span) for span in spans]
            is_split = is_split or split < file.tokens
        if not is_split:
            for source in inputs:
                self._scan_tokens(require_mappable(source.path), encoder.eos_id, encoder.vocab_size)
            raise UserError(
                "data.no_held_out",
                f"data.held_out: no document ends near the start of the last {self.data.held_out:.1%} of any file, so "
                "there would be nothing to evaluate: set data.held_out: 0, or add an end-of-text token "
                f"({encoder.eos_id}, {tokenizer.eos_token}) after each document",
            )
        write_atomic(self.path / "tokenizer.json", tokenizer.path.read_bytes())
        units = group_into_units(ranges, min(self.data.shard_tokens, total_tokens // MANY_UNITS))
        write_plan(self.path / "units.json", WorkPlan(tuple(inputs), units))
        files = f"{len(inputs)} file{'s' * (len(inputs) != 1)}"
        summary = f"{total_tokens:,} tokens in {files}, {', '.join(sorted(formats))}"
        self.write_prepared(replace(encoder, bos_ids=self._choose_bos_ids(encoder, have_bos, log)), len(units), summary)
        log(f"prepare: {summary}")

    def _starts_with_bos(self, file: TokenFile, encoder: Encoder) -> bool:
        """Return True if the file's first document starts with the tokens that the tokenizer adds before a text."""
        assert file.tokens is not None
        count = len(encoder.bos_ids)
        first = file.read_tokens(0, min(count + 1, file.tokens)).tolist()
        if first[:1] == [encoder.eos_id] != list(encoder.bos_ids[:1]):  # llm.c begins documents with this token.
            first = first[1:]
        return tuple(first[:count]) == encoder.bos_ids

    def _choose_bos_ids(self, encoder: Encoder, have_bos: Set[bool], log: Log) -> tuple[int, ...]:
        """Return the special tokens with which documents start.

        `have_bos` contains the result of `_starts_with_bos` for each file.
        """
        setting = self.data.add_special_tokens
        if encoder.bos_ids and (False in have_bos if setting is True else len(have_bos) > 1):
            names = " ".join(str(encoder.tokenizer.id_to_token(token_id)) for token_id in encoder.bos_ids)
            log(
                f"warning: some files do not start with {names}, which the tokenizer adds before a text. Prompts of "
                f"evaluation tasks and of `generate` get {'it' if setting is True else 'nothing'} anyway "
                f"(data.add_special_tokens: {json.dumps(setting)})"
            )
        return encoder.bos_ids if setting is True or have_bos == {True} else ()

    def _list_range_starts(self, start: int, stop: int) -> list[int]:
        """Return the starts of equal ranges of at most `data.shard_tokens` tokens that cover [start, stop)."""
        count = max(1, -(-(stop - start) // self.data.shard_tokens))
        return [start + (stop - start) * number // count for number in range(count)]

    def build_unit(self, unit: int) -> bool:
        """Check the ranges of one unit and write its manifest. Raises UserError if an id is outside the vocabulary."""
        from data_prep.token_files import require_mappable

        if self.load_unit(unit) is not None:
            return False
        self.remove_leftovers(unit)
        ranges = self.plan.units[unit]
        self._check_inputs(ranges)
        train = list[ShardEntry]()
        held_out = list[ShardEntry]()
        for index, ranges_of_file in groupby(ranges, lambda token_range: token_range.input):
            file = require_mappable(self.inputs[index].path, check=False)  # `prepare_inputs` has checked the index.
            for token_range in ranges_of_file:
                entry, is_held_out = self._describe_range(file, token_range)
                (held_out if is_held_out else train).append(entry)
        self._check_inputs(ranges)  # If an input changed meanwhile, there must be no manifest of the unit.
        self._write_unit_manifest(unit, train, held_out, lines=(0,) * len(ranges))
        return True

    def _describe_range(self, file: TokenFile, input_range: InputRange) -> tuple[ShardEntry, bool]:
        """Return the manifest entry of a range of tokens, and whether the range is held out. Reads all its tokens."""
        from data_prep.token_files import MAPPABLE_TYPES

        index, start, end = input_range
        source = self.inputs[index]
        if file.tokens is None or end > file.tokens or file.offset is None:
            raise UserError(
                "data.input_changed", f"{source.path} has {file.tokens:,} tokens, but `prepare` found at least {end:,}"
            )
        tokens = file.select_range(start, end)
        statistics = self._scan_tokens(tokens, self.prepared.eos_id, self.prepared.vocab_size)
        if source.path not in self._held_out_starts:
            self._held_out_starts[source.path] = self._find_held_out_start(file, self.prepared.eos_id)
        held_out = self._held_out_starts[source.path] <= start < file.tokens
        # The hash of the first range also covers the file's bytes before the tokens. The hash of the last range also
        # covers the bytes after them.
        first_byte = tokens.offset or 0 if start else 0
        end_byte = (file.select_range(end, end).offset if end < file.tokens else source.size) or 0
        entry = ShardEntry(
            file=source.path,
            size=source.size,
            sha256=sha256_file(source.path, (first_byte, end_byte)),
            part=None if (first_byte, end_byte) == (0, source.size) else (first_byte, end_byte),
            tokens=end - start,
            documents=statistics.eos_tokens,
            bytes=self._count_text_bytes(tokens) if held_out else 0,
            offset=tokens.offset or 0,
            dtype=MAPPABLE_TYPES[file.dtype],
        )
        return entry, held_out

    def _scan_tokens(self, file: TokenFile, eos_id: int, vocab_size: int) -> TokenStatistics:
        """Read all tokens and return statistics.

        Raises UserError as `scan_tokens` does, and if a document of the index does not end with `eos_id`.
        """
        from data_prep.token_files import scan_tokens

        statistics = scan_tokens(file, eos_id, vocab_size)
        if statistics.unended_documents:
            raise UserError(
                "data.unended_documents",
                f"{file.path}: {statistics.unended_documents:,} documents of its index do not end with the token "
                f"{eos_id} ({self.data.tokenizer.eos_token}), so training could not separate them: copy the file with "
                "`data import`, which adds the token",
            )
        return statistics

    @cached_property
    def _held_out_starts(self) -> dict[str, int]:
        """Cache of `_find_held_out_start` by file, because a file has several ranges."""
        return {}

    def _find_held_out_start(self, file: TokenFile, eos_id: int) -> int:
        """Return the position of the first held-out token: the document end that is nearest to the desired position.

        Return the number of tokens (nothing is held out) if `data.held_out` is 0. Also return it if the nearest end
        would hold out nothing, or twice as much as desired.
        """
        import numpy as np

        assert file.tokens is not None
        held_out_tokens = int(file.tokens * self.data.held_out)
        desired = file.tokens - held_out_tokens
        last = file.tokens - 1  # If the only end is here, nothing would be held out.
        for near in range(0, held_out_tokens, _SEARCH_BLOCK):
            far = min(near + _SEARCH_BLOCK, held_out_tokens)
            ends: list[int] = []
            for start, stop in (
                (max(0, desired - far), desired - near),
                (desired + near, min(desired + far, last)),
            ):
                if start < stop:
                    ends += (np.flatnonzero(file.read_tokens(start, stop) == eos_id) + start + 1).tolist()
            if ends:
                return int(min(ends, key=lambda end: abs(end - desired)))
        return file.tokens

    def combine_units(self, units: Sequence[UnitManifest], log: Log) -> None:
        """Write the manifest, and log the files without held-out tokens if `data.held_out` is not 0."""
        split_files = {entry.file for unit in units for entry in unit.held_out}
        if self.data.held_out and (files := [source.path for source in self.inputs if source.path not in split_files]):
            log(
                f"shard: nothing is held out of {len(files)} files, because no document ends at a suitable place: "
                f"{files[0]}, …"
            )
        super().combine_units(units, log)

    def _count_text_bytes(self, tokens: TokenFile) -> int:
        """Return the UTF-8 bytes of the text of held-out tokens, for bits per byte."""
        decode = self.encoder.tokenizer.decode
        documents = tokens._replace(document_ends=None).iterate_documents(self.prepared.eos_id)
        return sum(len(decode(document.tolist(), skip_special_tokens=True).encode()) for document in documents)

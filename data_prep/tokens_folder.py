"""The data folder of a run on existing tokens (`data.records: tokens`). Token files are used in place, not copied.

    data_dir/tokenizer.json, units.json, prepare.json   as for text; a work unit is one or more ranges of tokens
    data_dir/shards/unit-00003.json                     the ranges of one work unit, with SHA-256 and position
    data_dir/manifest.json                              all ranges

A range has at most `data.shard_tokens` tokens, so that several array tasks can read a large file and several ranks can
verify it. If there are many small files, they share work units. The end of each file is held out: about the fraction
`data.held_out` of its tokens, starting at the nearest end of a document.

Training separates documents by their end-of-text token. If the index of a file lists documents without this token, the
file is rejected. `data import` can copy the file and add the token.
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
from data_prep.text_folder import TextFolder, UnitManifest, UnitShards
from data_prep.work_units import InputRange, WorkPlan, write_plan
from pipeline.base.errors import UserError
from pipeline.base.files import sha256_file, write_atomic
from pipeline.data.manifest import ShardEntry
from pipeline.run.code import call_in_child_process

if TYPE_CHECKING:
    from data_prep.token_files import TokenFile, TokenStatistics
    from data_prep.tokenizer import Encoder

MAX_FILES_CHECKED_EARLY = 100
"""Maximum number of files that are checked before the run is created. The prepare stage checks all files."""
TOKEN_ENDINGS = dict.fromkeys((".bin", ".ds", ".h5", ".hdf5", ".arrow", ".tar", ".tar.gz"), "tokens")
"""The name endings of token files, with the format of inputs (`Input.format`)."""
_SEARCH_BLOCK = 1 << 20
"""Number of tokens that are searched at once for the end of a document."""
MANY_UNITS = 512
"""If there are more ranges than this, small ranges share work units, because each unit needs a file and an fsync."""


def group_into_units(ranges: Sequence[InputRange], max_tokens: int) -> tuple[tuple[InputRange, ...], ...]:
    """Group ranges of tokens into work units, in order.

    Each unit has one range. But if there are more than `MANY_UNITS` ranges, consecutive ranges with at most
    `max_tokens` tokens in total share a unit. A larger range has its own unit.
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
        """Return the files that the config names, and check whether training can memory-map the first files.

        The check runs in a child process, because it needs h5py and numpy. At most `MAX_FILES_CHECKED_EARLY` files
        are checked.
        """
        files = super().check_inputs()
        call_in_child_process("data_prep.token_files", "check_mappable", *files[:MAX_FILES_CHECKED_EARLY])
        return files

    def prepare_inputs(self, log: Log) -> None:
        """Check all files, split them into ranges, and write the files of `prepare`.

        Raises UserError if a file cannot be used, or if no tokens would be held out although `data.held_out` is not 0.
        """
        from data_prep.token_files import require_mappable
        from data_prep.tokenizer import load_encoder

        tokenizer = self.data.tokenizer
        assert tokenizer.path is not None
        inputs = find_inputs(self.data, self.endings)
        # Load the user's file, not the copy, so that errors name the user's file.
        encoder = load_encoder(tokenizer.path, tokenizer.eos_token, self.data.add_special_tokens)
        formats: set[str] = set()
        bos_results: set[bool] = set()
        total_tokens = 0
        has_held_out_tokens = False
        ranges = list[InputRange]()
        for input_index, source in enumerate(inputs):
            file = require_mappable(source.path)
            if file.note:
                log(f"warning: {source.path}{file.note}")
            assert file.tokens is not None
            bos_results.add(self._starts_with_bos(file, encoder))
            total_tokens += file.tokens
            formats.add(file.format)
            held_out_start = self._find_held_out_start(file, encoder.eos_id)
            starts = [
                *self._list_range_starts(0, held_out_start),
                *self._list_range_starts(held_out_start, file.tokens),
                file.tokens,
            ]
            # A file without tokens gets one empty range, so that the shard stage reads the file and reports the error.
            spans = [span for span in pairwise(starts) if span[0] < span[1]] or [(0, 0)]
            ranges += [InputRange(input_index, *span) for span in spans]
            has_held_out_tokens = has_held_out_tokens or held_out_start < file.tokens
        if self.data.held_out and not has_held_out_tokens:
            # Unusable tokens are reported first, because a wrong tokenizer is a likely reason.
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
        encoder = replace(encoder, bos_ids=self._choose_bos_ids(encoder, bos_results, log))
        self.write_prepared(encoder, len(units), summary)
        log(f"prepare: {summary}")

    def _starts_with_bos(self, file: TokenFile, encoder: Encoder) -> bool:
        """Return True if the file's first document starts with the tokens that the tokenizer adds before a text.

        If the tokenizer adds no tokens there, also return True.
        """
        assert file.tokens is not None
        count = len(encoder.bos_ids)
        first_tokens = file.read_tokens(0, min(count + 1, file.tokens)).tolist()
        # Files of llm.c begin with the end-of-text token. Skip this token unless `bos_ids` also begins with it.
        if first_tokens[:1] == [encoder.eos_id] != list(encoder.bos_ids[:1]):
            first_tokens = first_tokens[1:]
        return tuple(first_tokens[:count]) == encoder.bos_ids

    def _choose_bos_ids(self, encoder: Encoder, bos_results: Set[bool], log: Log) -> tuple[int, ...]:
        """Return the special tokens to put before prompts.

        If `data.add_special_tokens` is true, these are the tokens that the tokenizer adds before a text. If it is auto,
        they are the same tokens if all files start with them, otherwise none. A warning is logged if some files do not
        start with them; with auto, only if other files do. `bos_results` contains the results of `_starts_with_bos` for
        all files.
        """
        setting = self.data.add_special_tokens
        if encoder.bos_ids and (False in bos_results if setting is True else len(bos_results) > 1):
            names = " ".join(str(encoder.tokenizer.id_to_token(token_id)) for token_id in encoder.bos_ids)
            log(
                f"warning: some files do not start with {names}, which the tokenizer adds before a text. Prompts of "
                f"evaluation tasks and of `generate` get {'it' if setting is True else 'nothing'} anyway "
                f"(data.add_special_tokens: {json.dumps(setting)})"
            )
        return encoder.bos_ids if setting is True or bos_results == {True} else ()

    def _list_range_starts(self, start: int, stop: int) -> list[int]:
        """Return the starts of equal ranges of at most `data.shard_tokens` tokens that cover [start, stop)."""
        count = max(1, -(-(stop - start) // self.data.shard_tokens))
        return [start + (stop - start) * number // count for number in range(count)]

    def build_unit(self, unit: int) -> bool:
        """Check the ranges of one work unit and write its manifest. Return False if the manifest exists already.

        Raises UserError if a token id is outside the vocabulary, and InputError if a file has changed.
        """
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
        self._check_inputs(ranges)  # If an input has changed meanwhile, the manifest must not be written.
        # Token files have no lines.
        self._write_unit_manifest(unit, UnitShards(tuple(train), tuple(held_out)), lines=(0,) * len(ranges))
        return True

    def _describe_range(self, file: TokenFile, input_range: InputRange) -> tuple[ShardEntry, bool]:
        """Read all tokens of a range, and return its manifest entry and whether it is held out."""
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
        is_held_out = self._held_out_starts[source.path] <= start < file.tokens
        # The hash of the first range also covers the file's bytes before the tokens. The hash of the last range also
        # covers the bytes after them.
        first_byte = (tokens.offset or 0) if start else 0
        end_byte = (file.select_range(end, end).offset if end < file.tokens else source.size) or 0
        entry = ShardEntry(
            file=source.path,
            size=source.size,
            sha256=sha256_file(source.path, (first_byte, end_byte)),
            part=None if (first_byte, end_byte) == (0, source.size) else (first_byte, end_byte),
            tokens=end - start,
            documents=statistics.eos_tokens,
            bytes=self._count_text_bytes(tokens) if is_held_out else 0,
            offset=tokens.offset or 0,
            dtype=MAPPABLE_TYPES[file.dtype],
        )
        return entry, is_held_out

    def _scan_tokens(self, file: TokenFile, eos_id: int, vocab_size: int) -> TokenStatistics:
        """Read all tokens of a file or range and return statistics.

        Raises UserError as `scan_tokens` does, and if the index lists a document that does not end with `eos_id`.
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
        """Cache of the results of `_find_held_out_start` by path, because a file can have several ranges."""
        return {}

    def _find_held_out_start(self, file: TokenFile, eos_id: int) -> int:
        """Return the position of the first held-out token of a file.

        The held-out tokens begin at the document end that is nearest to the desired position. Return the number of
        tokens, so that nothing is held out, if `data.held_out` is 0 or no document ends near the desired position. An
        end is near if at least one token, and at most twice the desired number of tokens, would be held out.
        """
        import numpy as np

        assert file.tokens is not None
        held_out_tokens = int(file.tokens * self.data.held_out)
        desired = file.tokens - held_out_tokens
        last_position = file.tokens - 1  # A document that ends with the last token would leave nothing to hold out.
        # Search blocks before and after the desired position at growing distances, from `near` to `far` tokens.
        for near in range(0, held_out_tokens, _SEARCH_BLOCK):
            far = min(near + _SEARCH_BLOCK, held_out_tokens)
            ends: list[int] = []
            for start, stop in (
                (max(0, desired - far), desired - near),
                (desired + near, min(desired + far, last_position)),
            ):
                if start < stop:
                    ends += (np.flatnonzero(file.read_tokens(start, stop) == eos_id) + start + 1).tolist()
            if ends:
                return int(min(ends, key=lambda end: abs(end - desired)))
        return file.tokens

    def combine_units(self, units: Sequence[UnitManifest], log: Log) -> None:
        """Write the manifest. If `data.held_out` is not 0, log how many files have no held-out tokens."""
        files_with_held_out = {entry.file for unit in units for entry in unit.held_out}
        paths = [source.path for source in self.inputs if source.path not in files_with_held_out]
        if self.data.held_out and paths:
            log(
                f"shard: nothing is held out of {len(paths)} files, because no document ends at a suitable place: "
                f"{paths[0]}, …"
            )
        super().combine_units(units, log)

    def _count_text_bytes(self, tokens: TokenFile) -> int:
        """Return the number of UTF-8 bytes of the text of held-out tokens. Evaluation needs it for bits per byte."""
        decode = self.encoder.tokenizer.decode
        # Without the index, documents are separated by the end-of-text token, as training separates them.
        documents = tokens._replace(document_ends=None).iterate_documents(self.prepared.eos_id)
        return sum(len(decode(document.tolist(), skip_special_tokens=True).encode()) for document in documents)

"""The data folder of a run on tokens that exist (`data.records: tokens`): files are taken where they lie, not copied.

    data_dir/tokenizer.json, units.json, prepare.json   as for text; a unit is a part of a file
    data_dir/shards/unit-00003.json                     its sha256, and where it is in the file
    data_dir/manifest.json                              all of them

A part is of `data.shard_tokens` tokens at most, so that several tasks read a large file, and several ranks hash it
before a training. Many small files share a unit. Each is read twice: its ids compared with the tokenizer's and its
documents counted, then hashed; what is held out once more, to count its text. **Held out** is the end of each file:
the last `data.held_out` of its tokens, in parts too, cut at the nearest end of a document; where that would be twice as
much, or there is none (a file of one document), it is trained on whole. A part is an entry of the manifest that says
from which byte on the file is mapped, as for a shard of our own.

Documents are parted by their end-of-text token, in training too, so a file whose index knows of documents that do not
end with one is refused; a copy (`data import`) has them.
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

MOST_LOOKED_AT = 100
"""So many files are looked at before a run is made; `prepare` looks at all."""
TOKEN_ENDINGS = dict.fromkeys((".bin", ".ds", ".h5", ".hdf5", ".arrow", ".tar", ".tar.gz"), "tokens")
_BLOCK = 1 << 20
MANY_UNITS = 512
"""If there are more parts of files than this, small ones share a unit: each unit costs a synced file."""


def group_into_units(pieces: Sequence[InputRange], tokens: int) -> tuple[tuple[InputRange, ...], ...]:
    """Lay parts of files into units, in order: each in its own, or, if they are many, several of at most `tokens`."""
    if len(pieces) <= MANY_UNITS:
        return tuple((piece,) for piece in pieces)
    units: list[list[InputRange]] = []
    filled = 0
    for piece in pieces:
        size = piece.end - piece.start
        if not units or filled + size > tokens:
            units.append([])
            filled = 0
        units[-1].append(piece)
        filled += size
    return tuple(map(tuple, units))


class TokensFolder(TextFolder):
    """The data folder of a run on tokens."""

    words = "files of tokens"
    endings = TOKEN_ENDINGS

    def look(self) -> list[str]:
        """And whether the first files are what can be mapped, asked of h5py and numpy, elsewhere."""
        files = super().look()
        call_in_child_process("data_prep.token_files", "check_mappable", *files[:MOST_LOOKED_AT])
        return files

    def prepare_inputs(self, log: Log) -> None:
        """List and look at the files; the tokenizer is copied. Raises UserError naming a file that will not do."""
        from data_prep.token_files import require_mappable
        from data_prep.tokenizer import load_encoder

        given, inputs = self.data.tokenizer, find_inputs(self.data, self.endings)
        assert given.path is not None
        # complains about the file that the user named
        encoder = load_encoder(given.path, given.eos_token, self.data.add_special_tokens)
        formats: set[str] = set()
        beginnings: set[bool] = set()
        tokens, parted, pieces = 0, not self.data.held_out, list[InputRange]()
        for number, source in enumerate(inputs):
            file = require_mappable(source.path)
            if file.note:
                log(f"warning: {source.path}{file.note}")
            assert file.tokens is not None
            beginnings.add(self._begins_so(file, encoder))
            tokens, formats, border = tokens + file.tokens, formats | {file.format}, self._border(file, encoder.eos_id)
            borders = [*self._cut(0, border), *self._cut(border, file.tokens), file.tokens]
            spans = [span for span in pairwise(borders) if span[0] < span[1]] or [(0, 0)]  # no tokens: refused later
            pieces += [InputRange(number, *span) for span in spans]
            parted = parted or border < file.tokens
        if not parted:
            for source in inputs:
                self._scan(require_mappable(source.path), encoder.eos_id, encoder.vocab_size)
            raise UserError(
                "data.no_held_out",
                f"data.held_out: no document ends near where the last {self.data.held_out:.1%} of a file begins, so "
                "nothing could be evaluated: set data.held_out: 0, or put an end-of-text token "
                f"({encoder.eos_id}, {given.eos_token}) behind each document",
            )
        write_atomic(self.path / "tokenizer.json", given.path.read_bytes())
        units = group_into_units(pieces, min(self.data.shard_tokens, tokens // MANY_UNITS))
        write_plan(self.path / "units.json", WorkPlan(tuple(inputs), units))
        told = f"{tokens:,} tokens in {len(inputs)} file{'s' * (len(inputs) != 1)}, {', '.join(sorted(formats))}"
        self.write_prepared(replace(encoder, bos_ids=self._bos_ids(encoder, beginnings, log)), len(units), told)
        log(f"prepare: {told}")

    def _begins_so(self, file: TokenFile, encoder: Encoder) -> bool:
        """Whether the file's first document begins with the tokens that the tokenizer would put there."""
        assert file.tokens is not None
        count = len(encoder.bos_ids)
        first = file.read(0, min(count + 1, file.tokens)).tolist()
        if first[:1] == [encoder.eos_id] != list(encoder.bos_ids[:1]):  # llm.c puts it in front of documents
            first = first[1:]
        return tuple(first[:count]) == encoder.bos_ids

    def _bos_ids(self, encoder: Encoder, beginnings: Set[bool], log: Log) -> tuple[int, ...]:
        """Return the tokens that the documents begin with; `beginnings`: whether files begin with the tokenizer's."""
        wanted = self.data.add_special_tokens
        if encoder.bos_ids and (False in beginnings if wanted is True else len(beginnings) > 1):
            names = " ".join(str(encoder.tokenizer.id_to_token(one)) for one in encoder.bos_ids)
            log(
                f"warning: some files do not begin with {names}, which the tokenizer puts before a text. Prompts of "
                f"tasks and of `generate` get {'it' if wanted is True else 'nothing'} all the same: "
                f"data.add_special_tokens: {json.dumps(wanted)}"
            )
        return encoder.bos_ids if wanted is True or beginnings == {True} else ()

    def _cut(self, start: int, stop: int) -> list[int]:
        """Where parts of these tokens begin."""
        parts = max(1, -(-(stop - start) // self.data.shard_tokens))
        return [start + (stop - start) * part // parts for part in range(parts)]

    def build_unit(self, unit: int) -> bool:
        """Read one part of a file, or several small files. Raises UserError, too, for ids that are not the
        tokenizer's."""
        from data_prep.token_files import require_mappable

        if self.unit(unit) is not None:
            return False
        self.remove_leftovers(unit)
        pieces = self.plan.units[unit]
        self._check_inputs(pieces)
        train, held_out = list[ShardEntry](), list[ShardEntry]()
        for index, parts in groupby(pieces, lambda piece: piece.input):
            file = require_mappable(self.inputs[index].path, check=False)  # `prepare_inputs` found its index right
            for piece in parts:
                entry, is_held_out = self._entry(file, piece)
                (held_out if is_held_out else train).append(entry)
        self._check_inputs(pieces)  # one that changed while it was read fits no manifest
        self._write_unit_manifest(unit, train, held_out, lines=(0,) * len(pieces))
        return True

    def _entry(self, file: TokenFile, piece: InputRange) -> tuple[ShardEntry, bool]:
        """Read one part of a file; its entry in the manifest, and whether it is held out."""
        from data_prep.token_files import MAPPABLE_TYPES

        (index, start, end), fixed = piece, self.prepared
        source = self.inputs[index]
        if file.tokens is None or end > file.tokens or file.offset is None:
            raise UserError(
                "data.input_changed", f"{source.path} has {file.tokens:,} tokens, not the {end:,} that were prepared"
            )
        part = file.part(start, end)
        seen = self._scan(part, fixed.eos_id, fixed.vocab_size)
        if source.path not in self._borders:
            self._borders[source.path] = self._border(file, fixed.eos_id)
        held_out = self._borders[source.path] <= start < file.tokens
        behind = file.part(end, end).offset if end < file.tokens else source.size
        bounds = part.offset or 0 if start else 0, behind or 0  # what stands before and behind all tokens, too
        entry = ShardEntry(
            file=source.path,
            size=source.size,
            sha256=sha256_file(source.path, bounds),
            part=None if bounds == (0, source.size) else bounds,
            tokens=end - start,
            documents=seen.ended,
            bytes=self._text_bytes(part) if held_out else 0,
            offset=part.offset or 0,
            dtype=MAPPABLE_TYPES[file.dtype],
        )
        return entry, held_out

    def _scan(self, file: TokenFile, eos_id: int, vocab_size: int) -> TokenStatistics:
        """Read all. Raises UserError as `scan` does, and for documents of the index that do not end with `eos_id`."""
        from data_prep.token_files import scan_tokens

        seen = scan_tokens(file, eos_id, vocab_size)
        if seen.unended:
            raise UserError(
                "data.unended_documents",
                f"{file.path}: {seen.unended:,} documents of its index do not end with the token {eos_id} "
                f"({self.data.tokenizer.eos_token}), so nothing would part them: `data import` copies them with one",
            )
        return seen

    @cached_property
    def _borders(self) -> dict[str, int]:
        """`_border` of files, found once for all their parts."""
        return {}

    def _border(self, file: TokenFile, eos_id: int) -> int:
        """Where held-out tokens begin: at the end of a document that is nearest to the wanted place; at the file's end
        where nothing is wanted, or that would hold out twice as much."""
        import numpy as np

        assert file.tokens is not None
        part = int(file.tokens * self.data.held_out)
        wanted, last = file.tokens - part, file.tokens - 1  # the last token ends nothing that could be held out
        for near in range(0, part, _BLOCK):
            far, found = min(near + _BLOCK, part), []
            for start, stop in ((max(0, wanted - far), wanted - near), (wanted + near, min(wanted + far, last))):
                if start < stop:
                    found += (np.flatnonzero(file.read(start, stop) == eos_id) + start + 1).tolist()
            if found:
                return int(min(found, key=lambda border: abs(border - wanted)))
        return file.tokens

    def combine_units(self, units: Sequence[UnitManifest], log: Log) -> None:
        """And tell which files are trained on whole though a part was wanted."""
        cut = {entry.file for unit in units for entry in unit.held_out}
        if self.data.held_out and (files := [one.path for one in self.inputs if one.path not in cut]):
            log(f"shard: nothing is held out of {len(files)} files, no document ends where it should: {files[0]}, …")
        super().combine_units(units, log)

    def _text_bytes(self, part: TokenFile) -> int:
        """The UTF-8 bytes of what is held out: what bits per byte are of."""
        decode = self.encoder.tokenizer.decode
        documents = part._replace(ends=None).documents(self.prepared.eos_id)
        return sum(len(decode(one.tolist(), skip_special_tokens=True).encode()) for one in documents)

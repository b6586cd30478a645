"""The data folder of a run on tokens that exist (`data.records: tokens`): files are taken where they lie, not copied.

    data_dir/tokenizer.json, units.json, prepare.json   as for text; a unit is a file
    data_dir/shards/unit-00003.json                     its size and sha256, and how it is split
    data_dir/manifest.json                              all of them

Each file is read once: hashed, its ids compared with the tokenizer's, its documents counted. **Held out** is its end:
the last `data.held_out` of its tokens, cut at the nearest end of a document; where that would be twice as much, or
there is none (a file of one document), it is trained on whole. Both parts are entries of the manifest that say from
which byte on the same file is mapped, as for a shard of our own.

Documents are parted by their end-of-text token, in training too, so a file whose index knows of documents that do not
end with one is refused; a copy (`data import`) has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from data_prep.inputs.folder import Log
from data_prep.inputs.listing import find_inputs
from data_prep.text.text_folder import TextFolder, UnitManifest
from data_prep.text.units import Piece, Plan, write_plan
from pipeline.base.errors import UserError
from pipeline.base.files import sha256_file, write_atomic
from pipeline.data.manifest import ShardEntry, write_manifest
from pipeline.run.code import ask_child

if TYPE_CHECKING:
    from data_prep.tokens.token_file import Seen, TokenFile

MOST_LOOKED_AT = 100
"""So many files are looked at before a run is made; `prepare` looks at all."""
ENDINGS = dict.fromkeys((".bin", ".ds", ".h5", ".hdf5", ".arrow", ".tar", ".tar.gz"), "tokens")
_BLOCK = 1 << 20


class TokensFolder(TextFolder):
    """The data folder of a run on tokens."""

    words = "files of tokens"
    endings = ENDINGS

    def look(self) -> list[str]:
        """And whether the first files are what can be mapped, asked of h5py and numpy, elsewhere."""
        files = super().look()
        ask_child("data_prep.tokens.formats", "look_at", *files[:MOST_LOOKED_AT])
        return files

    def fix(self, log: Log) -> None:
        """List and look at the files; the tokenizer is copied. Raises UserError naming a file that will not do."""
        from data_prep.text.tokenizer import load_encoder
        from data_prep.tokens.formats import mappable

        given, inputs = self.data.tokenizer, find_inputs(self.data, self.endings)
        assert given.path is not None
        encoder = load_encoder(given.path, given.eos_token)  # complains about the file that the user named
        formats: set[str] = set()
        tokens, parted = 0, not self.data.held_out
        for source in inputs:
            file = mappable(source.path)
            if file.note:
                log(f"warning: {source.path}{file.note}")
            tokens, formats = tokens + (file.tokens or 0), formats | {file.format}
            parted = parted or self._border(file, encoder.eos_id) < (file.tokens or 0)
        if not parted:
            for source in inputs:
                self._scan(mappable(source.path), encoder.eos_id, encoder.vocab_size)  # may know a better reason
            raise UserError(
                f"data.held_out: no document ends near where the last {self.data.held_out:.1%} of a file begins, so "
                "nothing could be evaluated: set data.held_out: 0, or put an end-of-text token "
                f"({encoder.eos_id}, {given.eos_token}) behind each document"
            )
        write_atomic(self.path / "tokenizer.json", given.path.read_bytes())
        units = tuple((Piece(number, 0, source.size),) for number, source in enumerate(inputs))
        write_plan(self.path / "units.json", Plan(tuple(inputs), units))
        self.note_prepared(load_encoder(self.path / "tokenizer.json", given.eos_token), len(units))
        log(f"prepare: {tokens:,} tokens in {len(inputs)} files: {', '.join(sorted(formats))}")

    def make(self, unit: int) -> bool:
        """Read one file through. Raises UserError, too, for ids that are not the tokenizer's."""
        from data_prep.tokens.formats import mappable
        from data_prep.tokens.token_file import MAPPED

        if self.unit(unit) is not None:
            return False
        self._check_inputs(self.plan.units[unit])
        source, fixed = self.inputs[unit], self.prepared
        file = mappable(source.path)
        seen = self._scan(file, fixed.eos_id, fixed.vocab_size)
        assert file.offset is not None and file.tokens is not None
        cut = self._border(file, fixed.eos_id)
        begin, left = file.offset + cut * int(file.dtype[-2:]) // 8, file.tokens - cut
        documents, text_bytes = self._counted(file._replace(offset=begin, tokens=left, ends=None))
        facts: dict[str, Any] = {"file": source.path, "size": source.size, "sha256": sha256_file(source.path)}
        facts["dtype"], trained_on = MAPPED[file.dtype], seen.ended - documents
        train = ShardEntry(**facts, offset=file.offset, tokens=cut, documents=trained_on, bytes=0)
        held_out = ShardEntry(**facts, offset=begin, tokens=left, documents=documents, bytes=text_bytes)
        self._check_inputs(self.plan.units[unit])  # one that changed while it was read fits no manifest
        manifest = UnitManifest(
            key=self._unit_key(unit),
            unit=unit,
            documents=seen.ended,
            held_out_documents=documents,
            lines=(0,),
            rejected=(),
            train=(train,),
            held_out=(held_out,) if left else (),
        )
        write_manifest(self.unit_path(unit), manifest)
        return True

    def _scan(self, file: TokenFile, eos_id: int, vocab_size: int) -> Seen:
        """Read all. Raises UserError as `scan` does, and for documents of the index that do not end with `eos_id`."""
        from data_prep.tokens.token_file import scan

        seen = scan(file, eos_id, vocab_size)
        if seen.unended:
            raise UserError(
                f"{file.path}: {seen.unended:,} documents of its index do not end with the token {eos_id} "
                f"({self.data.tokenizer.eos_token}), so nothing would part them: `data import` copies them with one"
            )
        return seen

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

    def whole(self, units: Sequence[UnitManifest], log: Log) -> None:
        """And tell which files are trained on whole though a part was wanted."""
        if self.data.held_out and (files := [unit.train[0].file for unit in units if not unit.held_out]):
            log(f"shard: nothing is held out of {len(files)} files, no document ends where it should: {files[0]}, …")
        super().whole(units, log)

    def _counted(self, part: TokenFile) -> tuple[int, int]:
        """End-of-text tokens of what is held out, and the UTF-8 bytes of its text: what bits per byte are of."""
        documents = text_bytes = 0
        decode = self.encoder.tokenizer.decode
        for document in part.documents(self.prepared.eos_id):
            documents += int(document[-1] == self.prepared.eos_id)
            text_bytes += len(decode(document.tolist(), skip_special_tokens=True).encode())
        return documents, text_bytes

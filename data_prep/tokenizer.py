"""The tokenizer: train a byte-level BPE or take a given `tokenizer.json`, then encode documents.

Byte-level BPE (Sennrich et al., arXiv 1508.07909, on bytes as in GPT-2): the alphabet is all 256 bytes, so any
text has tokens and comes back exactly. Training and encoding are those of the package `tokenizers`.

A document's tokens are followed by the end-of-text token, and that id means the end of a document and nothing
else: text that happens to contain the token's name (the sources of Sluice do) is encoded as plain characters.
`tokenizers` calls this `encode_special_tokens`; it is a switch of the loaded object, not of the file.

Around each document stand the special tokens that the tokenizer's post-processor adds (`data.add_special_tokens`), as
transformers encodes a text by default: Llama's and Mistral's beginning-of-sequence token, for example.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from data_prep.documents import Document
from pipeline.base.errors import UserError
from pipeline.base.files import open_regular_file
from pipeline.data.manifest import MASK_DOCUMENT_START, MASK_LEARNED
from pipeline.data.special_tokens import get_added_tokens


def train_bpe(texts: Sequence[str], vocab_size: int, eos_token: str) -> str:
    """Train a byte-level BPE; the JSON of the tokenizer, the same for the same texts in the same order.

    Id 0 is the end-of-text token, ids 1 to 256 are the bytes. Little text gives fewer tokens than `vocab_size`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eos_token],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True) + "\n"


class EncodedRecord(NamedTuple):
    """The tokens of a prompt with its response, or of a dialogue."""

    tokens: np.ndarray
    mask: np.ndarray
    length: int
    """How many tokens the whole record has."""
    covered: int
    """How many characters of its text `tokens` cover."""


@dataclasses.dataclass(frozen=True)
class Encoder:
    """A tokenizer ready to encode documents."""

    tokenizer: Tokenizer
    eos_id: int
    vocab_size: int
    """Largest token id plus one."""
    dtype: str
    """`uint16` where the ids fit, else `uint32`."""
    bos_ids: tuple[int, ...] = ()
    """Tokens that stand before each document."""
    closing_ids: tuple[int, ...] = ()
    """Tokens that the tokenizer's post-processor adds behind each document."""

    @property
    def end(self) -> tuple[int, ...]:
        """Tokens that end a document: those that the tokenizer adds, and the end-of-text token once."""
        return self.closing_ids if self.closing_ids[-1:] == (self.eos_id,) else (*self.closing_ids, self.eos_id)

    @cached_property
    def unknown_id(self) -> int | None:
        """The token that stands for what the tokenizer does not know, whose text is lost; None where there is none."""
        model = json.loads(self.tokenizer.to_str())["model"]  # a Unigram's has no attribute
        name = model.get("unk_token")
        return model.get("unk_id") if name is None else self.tokenizer.token_to_id(name)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Tokens of each text with its special tokens, the end-of-text token last: 1-d arrays of `dtype`.

        If the token that begins a document is also the one that ends it, the end of the document before serves as both.
        """
        begin, end = () if self.bos_ids == (self.eos_id,) else self.bos_ids, self.end
        found = []
        for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            ids = encoding.ids
            ids[:0] = begin
            ids += end
            found.append(np.fromiter(ids, self.dtype, len(ids)))  # half of what np.array costs
        return found

    def encode_records(
        self, records: Sequence[Document], *, chat: bool, most: int | None = None
    ) -> list[EncodedRecord]:
        """Tokens of each record and their `mask` (pipeline/data/manifest.py): of `dtype` and uint8, shape (tokens,).
        Tokens from number `most` on are left out.

        A token that has a character of what is learned is learned, but for the first: nothing is before it. With
        `chat` names of special tokens are these tokens, and the text begins and ends as it does. Otherwise special
        tokens are added as to any text, and those that end it are learned.
        """
        begin, end = ((), ()) if chat else (self.bos_ids, self.end)
        self.tokenizer.encode_special_tokens = not chat
        encodings = self.tokenizer.encode_batch([record.text for record in records], add_special_tokens=False)
        found = []
        for record, encoding in zip(records, encodings, strict=True):
            tokens = np.array([*begin, *encoding.ids, *end], dtype=self.dtype)
            offsets = [*[(0, 0)] * len(begin), *encoding.offsets, *[(0, 0)] * len(end)]
            starts, ends = np.array(offsets).reshape(-1, 2).T
            mask = np.zeros(len(tokens), np.uint8)
            for first, last in record.learned:
                mask[(starts < last) & (ends > first)] = MASK_LEARNED
            mask[len(tokens) - len(end) :] = MASK_LEARNED
            mask[:1] = MASK_DOCUMENT_START
            length, covered = len(tokens), len(record.text)
            if most is not None and length > most:
                tokens, mask, covered = tokens[:most], mask[:most], int(ends[:most].max())
            found.append(EncodedRecord(tokens, mask, length, covered))
        return found


def check_tokenizer(path: str, eos_token: str, add_special_tokens: str) -> None:
    """Raise UserError as `load_encoder` does. `add_special_tokens`: as JSON."""
    load_encoder(path, eos_token, json.loads(add_special_tokens))


def load_encoder(path: str | Path, eos_token: str, add_special_tokens: Literal["auto"] | bool = False) -> Encoder:
    """Load a `tokenizer.json`; `add_special_tokens` as in the section `data` of a config.

    Raises UserError naming the file when it cannot be read, lacks `eos_token`, would take the token's name in a text
    for the token itself, or has no special tokens to add if `add_special_tokens` is True.
    """
    try:
        tokenizer = Tokenizer.from_str(open_regular_file(path).read().decode())
    except FileNotFoundError:
        raise UserError("data.no_tokenizer", f"data.tokenizer.path: there is no file {path}") from None
    except IsADirectoryError:
        raise UserError(
            "data.no_tokenizer", f"data.tokenizer.path: {path} is a folder: name the tokenizer.json in it"
        ) from None
    except Exception as error:  # the package raises bare Exception for a file that it does not understand
        raise UserError(
            "data.invalid_tokenizer",
            f"{path} is no tokenizer.json that can be read: {error}. Of a SentencePiece model, or vocab.json with "
            "merges.txt, transformers writes one: AutoTokenizer.from_pretrained(its folder).save_pretrained(…)",
        ) from error
    eos_id = tokenizer.token_to_id(eos_token)
    if eos_id is None:
        raise UserError(
            "data.no_eos_token", f"{path} has no token {eos_token!r}; set data.tokenizer.eos_token to one that it has"
        )
    tokenizer.add_special_tokens([AddedToken(eos_token, special=True, normalized=False)])  # keeps its id
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if eos_id in tokenizer.encode(eos_token, add_special_tokens=False).ids:
        raise UserError(
            "data.ambiguous_eos_token",
            f"{path} gives the token {eos_token!r} to text that contains its name, so that text could end a "
            "document; set data.tokenizer.eos_token to a token that only marks the end",
        )
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    begin, end = get_added_tokens(tokenizer) if add_special_tokens else ((), ())
    if add_special_tokens is True and not begin and not end:
        raise UserError(
            "data.no_special_tokens",
            f"data.add_special_tokens: the post-processor of {path} adds none to a text: set auto or false, or put a "
            "TemplateProcessing that adds one into the file",
        )
    if unknown := [token for token in (*begin, *end) if tokenizer.id_to_token(token) is None]:
        raise UserError(
            "data.invalid_tokenizer",
            f"{path}: its post-processor adds the id {unknown[0]}, which is no token of it: mend the file, or set "
            "data.add_special_tokens: false",
        )
    return Encoder(tokenizer, eos_id, vocab_size, "uint16" if vocab_size <= 1 << 16 else "uint32", begin, end)

"""The tokenizer: train a byte-level BPE or take a given `tokenizer.json`, then encode documents.

Byte-level BPE (Sennrich et al., arXiv 1508.07909, on bytes as in GPT-2): the alphabet is all 256 bytes, so any
text has tokens and comes back exactly. Training and encoding are those of the package `tokenizers`.

A document's tokens are followed by the end-of-text token, and that id means the end of a document and nothing
else: text that happens to contain the token's name (the sources of Sluice do) is encoded as plain characters.
`tokenizers` calls this `encode_special_tokens`; it is a switch of the loaded object, not of the file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from data_prep.inputs.sources import Document
from pipeline.base.errors import UserError
from pipeline.base.files import open_regular
from pipeline.data.manifest import BEGINS, LEARNED


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


@dataclasses.dataclass(frozen=True)
class Encoder:
    """A tokenizer ready to encode documents."""

    tokenizer: Tokenizer
    eos_id: int
    vocab_size: int
    """Largest token id plus one."""
    dtype: str
    """`uint16` where the ids fit, else `uint32`."""

    @cached_property
    def unknown_id(self) -> int | None:
        """The token that stands for what the tokenizer does not know, whose text is lost; None where there is none."""
        model = json.loads(self.tokenizer.to_str())["model"]  # a Unigram's has no attribute
        name = model.get("unk_token")
        return model.get("unk_id") if name is None else self.tokenizer.token_to_id(name)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Tokens of each text, the end-of-text token last: arrays of `dtype`, shape (tokens of the text + 1,)."""
        found = []
        for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            ids = encoding.ids
            ids.append(self.eos_id)
            found.append(np.fromiter(ids, self.dtype, len(ids)))  # half of what np.array costs
        return found

    def encode_records(self, records: Sequence[Document], *, chat: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        """Tokens of each record and their `mask` (pipeline/data/manifest.py): of `dtype` and uint8, shape (tokens,).

        A token that has a character of what is learned is learned, but for the first: nothing is before it. With
        `chat` names of special tokens are these tokens, and the text ends as it does; else the end-of-text token
        follows, and is learned.
        """
        self.tokenizer.encode_special_tokens = not chat
        encodings = self.tokenizer.encode_batch([record.text for record in records], add_special_tokens=False)
        found = []
        for record, encoding in zip(records, encodings, strict=True):
            tokens = np.array([*encoding.ids, self.eos_id], dtype=self.dtype)
            starts, ends = np.array([*encoding.offsets, (0, 0)]).T
            mask = np.zeros(len(tokens), np.uint8)
            for start, end in record.learned:
                mask[(starts < end) & (ends > start)] = LEARNED
            mask[-1], mask[0] = LEARNED, BEGINS
            found.append((tokens[:-1], mask[:-1]) if chat else (tokens, mask))
        return found


def load_encoder(path: str | Path, eos_token: str) -> Encoder:
    """Load a `tokenizer.json`.

    Raises UserError naming the file when it cannot be read, lacks `eos_token`, or would take the token's name
    in a text for the token itself.
    """
    try:
        tokenizer = Tokenizer.from_str(open_regular(path).read().decode())
    except FileNotFoundError:
        raise UserError(f"data.tokenizer.path: there is no file {path}") from None
    except IsADirectoryError:
        raise UserError(f"data.tokenizer.path: {path} is a folder: name the tokenizer.json in it") from None
    except Exception as error:  # the package raises bare Exception for a file that it does not understand
        raise UserError(
            f"{path} is no tokenizer.json that can be read: {error}. Of a SentencePiece model, or vocab.json with "
            "merges.txt, transformers writes one: AutoTokenizer.from_pretrained(its folder).save_pretrained(…)"
        ) from error
    eos_id = tokenizer.token_to_id(eos_token)
    if eos_id is None:
        raise UserError(f"{path} has no token {eos_token!r}; set data.tokenizer.eos_token to one that it has")
    tokenizer.add_special_tokens([AddedToken(eos_token, special=True, normalized=False)])  # keeps its id
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if eos_id in tokenizer.encode(eos_token, add_special_tokens=False).ids:
        raise UserError(
            f"{path} gives the token {eos_token!r} to text that contains its name, so that text could end a "
            "document; set data.tokenizer.eos_token to a token that only marks the end"
        )
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return Encoder(tokenizer, eos_id, vocab_size, "uint16" if vocab_size <= 1 << 16 else "uint32")

"""The tokenizer: train a byte-level BPE or load a `tokenizer.json`, then encode documents.

The alphabet of a byte-level BPE (Sennrich et al., arXiv 1508.07909, on bytes as in GPT-2) is all 256 bytes. Any text
can therefore be encoded and decoded exactly. Training and encoding use the package `tokenizers`.

The end-of-text token follows each document and has no other use. If a text contains the characters of this token (such
as `<|endoftext|>`), they are encoded as plain characters. The property `encode_special_tokens` of the loaded tokenizer
ensures this; it is not part of the file. With `data.add_special_tokens`, documents also get the special tokens of the
tokenizer's post-processor, as in transformers. An example is the beginning-of-sequence token of Llama and Mistral.
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
    """Train a byte-level BPE and return the content of its `tokenizer.json`.

    The result is the same for the same texts in the same order. Id 0 is the end-of-text token, ids 1 to 256 are the
    bytes. If there is little text, the vocabulary has fewer tokens than `vocab_size`.
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
    """The tokens and the mask of a record: of a prompt with its response, or of a dialogue."""

    tokens: np.ndarray
    """Integers of the encoder's `dtype`, shape (tokens,)."""
    mask: np.ndarray
    """Bits `MASK_LEARNED` and `MASK_DOCUMENT_START` (pipeline/data/manifest.py) for each token: uint8, (tokens,)."""
    full_length: int
    """Number of tokens of the whole record, before truncation."""
    covered_characters: int
    """Number of characters at the start of the text that `tokens` represent."""


@dataclasses.dataclass(frozen=True)
class Encoder:
    """A tokenizer that encodes documents with their special tokens."""

    tokenizer: Tokenizer
    eos_id: int
    """Id of the end-of-text token."""
    vocab_size: int
    """Largest token id plus one."""
    dtype: str
    """`uint16` if the ids fit, otherwise `uint32`."""
    bos_ids: tuple[int, ...] = ()
    """Ids that the tokenizer's post-processor adds before each document; empty if `data.add_special_tokens` is off."""
    closing_ids: tuple[int, ...] = ()
    """Ids that the post-processor adds after each document; empty if `data.add_special_tokens` is off."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids at the end of a document: `closing_ids`, then the end-of-text token unless it is already the last id."""
        return self.closing_ids if self.closing_ids[-1:] == (self.eos_id,) else (*self.closing_ids, self.eos_id)

    @cached_property
    def unknown_id(self) -> int | None:
        """Id of the token for text that the tokenizer cannot encode; None if there is no such token."""
        # The JSON is parsed, because the Python object of a Unigram model has no attribute for this id.
        model = json.loads(self.tokenizer.to_str())["model"]
        unknown_token = model.get("unk_token")
        return model.get("unk_id") if unknown_token is None else self.tokenizer.token_to_id(unknown_token)

    @property
    def _text_bos_ids(self) -> tuple[int, ...]:
        """Ids before each text.

        If the tokenizer adds only the end-of-text token before a text, this token is not added. Otherwise there would
        be two end-of-text tokens between two documents.
        """
        return () if self.bos_ids == (self.eos_id,) else self.bos_ids

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the tokens of each text with special tokens and the end-of-text token: 1-d arrays of `dtype`."""
        bos_ids = self._text_bos_ids
        end_ids = self.end_ids
        documents = []
        for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            ids = encoding.ids
            ids[:0] = bos_ids
            ids += end_ids
            documents.append(np.fromiter(ids, self.dtype, len(ids)))  # This is twice as fast as np.array.
        return documents

    def count_covered_bytes(self, text: str, max_tokens: int) -> int:
        """Return the size in UTF-8 of the part of `text` that the first `max_tokens` tokens of its document cover."""
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        text_tokens = max_tokens - len(self._text_bos_ids)
        end = max((end for _, end in encoding.offsets[: max(0, text_tokens)]), default=0)
        return len(text[:end].encode())

    def encode_records(
        self, records: Sequence[Document], *, chat: bool, max_tokens: int | None = None
    ) -> list[EncodedRecord]:
        """Encode records with their masks.

        A token that overlaps a learned span of characters is learned. The first token of a record is never learned,
        because no token precedes it.

        Args:
            records: prompts with responses, or dialogues.
            chat: whether the records are dialogues. The chat template has then written the texts of all special tokens,
                so no token is added. For other records, special tokens are added as to any text, and those at the end
                are learned.
            max_tokens: number of tokens after which a record is truncated; None: records are not truncated.
        """
        bos_ids, end_ids = ((), ()) if chat else (self.bos_ids, self.end_ids)
        # In a dialogue, texts such as `<|im_end|>` become special tokens, because the chat template has written them.
        self.tokenizer.encode_special_tokens = not chat
        encodings = self.tokenizer.encode_batch([record.text for record in records], add_special_tokens=False)
        encoded = []
        for record, encoding in zip(records, encodings, strict=True):
            tokens = np.array([*bos_ids, *encoding.ids, *end_ids], dtype=self.dtype)
            offsets = [*[(0, 0)] * len(bos_ids), *encoding.offsets, *[(0, 0)] * len(end_ids)]
            # The character span of each token; (0, 0) for added tokens.
            starts, ends = np.array(offsets).reshape(-1, 2).T
            mask = np.zeros(len(tokens), np.uint8)
            for learned_start, learned_end in record.learned:
                mask[(starts < learned_end) & (ends > learned_start)] = MASK_LEARNED
            # `mask[-len(end_ids) :]` would be the whole mask if there are no end tokens.
            mask[len(tokens) - len(end_ids) :] = MASK_LEARNED
            mask[:1] = MASK_DOCUMENT_START
            full_length = len(tokens)
            covered_characters = len(record.text)
            if max_tokens is not None and full_length > max_tokens:
                tokens = tokens[:max_tokens]
                mask = mask[:max_tokens]
                covered_characters = int(ends[:max_tokens].max())
            encoded.append(EncodedRecord(tokens, mask, full_length, covered_characters))
        return encoded


def check_tokenizer(path: str, eos_token: str, add_special_tokens: str) -> None:
    """Raise UserError as `load_encoder` does. `add_special_tokens` is a value as JSON text."""
    load_encoder(path, eos_token, json.loads(add_special_tokens))


def load_encoder(path: str | Path, eos_token: str, add_special_tokens: Literal["auto"] | bool = False) -> Encoder:
    """Load a `tokenizer.json` and return an encoder.

    Args:
        path: the file.
        eos_token: text of the end-of-text token.
        add_special_tokens: value of `data.add_special_tokens`.

    Raises UserError with the path in these cases:

    - The file cannot be read or has no `eos_token`.
    - The tokenizer encodes the characters of this token in a text as the token itself.
    - `add_special_tokens` is True, but the post-processor adds no token.
    - The post-processor adds an id that is not in the vocabulary.
    """
    try:
        tokenizer = Tokenizer.from_str(open_regular_file(path).read().decode())
    except FileNotFoundError:
        raise UserError("data.no_tokenizer", f"data.tokenizer.path: there is no file {path}") from None
    except IsADirectoryError:
        raise UserError(
            "data.no_tokenizer", f"data.tokenizer.path: {path} is a folder: name the tokenizer.json in it"
        ) from None
    except Exception as error:  # The package tokenizers raises plain Exception if it cannot parse a file.
        raise UserError(
            "data.invalid_tokenizer",
            f"{path} is not a readable tokenizer.json: {error}. For a SentencePiece model, or vocab.json with "
            "merges.txt, transformers writes one: AutoTokenizer.from_pretrained(its folder).save_pretrained(…)",
        ) from error
    eos_id = tokenizer.token_to_id(eos_token)
    if eos_id is None:
        raise UserError(
            "data.no_eos_token", f"{path} has no token {eos_token!r}: set data.tokenizer.eos_token to a token of it"
        )
    # `encode_special_tokens` affects only special tokens, and the file may not list the token as special. The token
    # keeps its id.
    tokenizer.add_special_tokens([AddedToken(eos_token, special=True, normalized=False)])
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if eos_id in tokenizer.encode(eos_token, add_special_tokens=False).ids:
        raise UserError(
            "data.ambiguous_eos_token",
            f"{path} encodes the text {eos_token!r} as the token of this name, so a text could end a document: set "
            "data.tokenizer.eos_token to a token that only marks the end",
        )
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    bos_ids, closing_ids = get_added_tokens(tokenizer) if add_special_tokens else ((), ())
    if add_special_tokens is True and not bos_ids and not closing_ids:
        raise UserError(
            "data.no_special_tokens",
            f"data.add_special_tokens: the post-processor of {path} adds no token to a text: set auto or false, or add "
            "a TemplateProcessing to the file",
        )
    if unknown_ids := [token_id for token_id in (*bos_ids, *closing_ids) if tokenizer.id_to_token(token_id) is None]:
        raise UserError(
            "data.invalid_tokenizer",
            f"{path}: its post-processor adds the id {unknown_ids[0]}, which is not in its vocabulary: repair the "
            "file, or set data.add_special_tokens: false",
        )
    return Encoder(tokenizer, eos_id, vocab_size, "uint16" if vocab_size <= 1 << 16 else "uint32", bos_ids, closing_ids)

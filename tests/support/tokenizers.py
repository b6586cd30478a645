"""Make small tokenizers that add special tokens to a text in the ways of published tokenizers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from data_prep.tokenizer import train_bpe

SPECIAL_TOKENS = ("<|end|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|pad|>")
"""The first token has the ID 0. The IDs of the other tokens follow the IDs of the vocabulary."""


def make_byte_tokenizer(text: str = "", size: int = 270) -> Tokenizer:
    """Return a byte-level BPE tokenizer with all of SPECIAL_TOKENS, without a post-processor.

    It is trained on `text`. Its vocabulary consists of `size` tokens, including the first special token, and of the
    other special tokens. If there is little text, there are fewer than `size` tokens.
    """
    tokenizer = Tokenizer.from_str(train_bpe([text], size, SPECIAL_TOKENS[0]))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS[1:]))
    return tokenizer


def get_token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the ID of a token. Raise AssertionError if the tokenizer does not have it."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id


def add_post_processor(tokenizer: Tokenizer, kind: str) -> Tokenizer:
    """Set the post-processor of the tokenizer and return the tokenizer.

    Args:
        tokenizer: a tokenizer with all of SPECIAL_TOKENS.
        kind: key of `post_processors`: a family of published tokenizers, or the special tokens that are added.
    """
    ids = {token: get_token_id(tokenizer, token) for token in SPECIAL_TOKENS}

    def make_template(single: str) -> processors.TemplateProcessing:
        """Return a post-processor that adds the special tokens in `single` to a text. `$A` represents the text."""
        tokens_and_ids = [(token, ids[token]) for token in SPECIAL_TOKENS if token in single.split()]
        return processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=tokens_and_ids)

    post_processors: dict[str, Any] = {
        "qwen": None,
        "llama 3": processors.Sequence([processors.ByteLevel(trim_offsets=False), make_template("<s> $A")]),
        "mistral": make_template("<s> $A"),
        "begin and end": make_template("<s> $A </s>"),
        "end only": make_template("$A <|end|>"),
        "two at the beginning": make_template("<s> <|im_start|> $A"),
        "same token for begin and end": make_template("<|end|> $A"),
        "bert": processors.BertProcessing(("</s>", ids["</s>"]), ("<s>", ids["<s>"])),
        "roberta": processors.RobertaProcessing(("</s>", ids["</s>"]), ("<s>", ids["<s>"])),
    }
    if post_processors[kind] is not None:
        tokenizer.post_processor = post_processors[kind]
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Tokenizer, template: str | None = None, **settings: Any) -> Path:
    """Write `tokenizer.json` and `tokenizer_config.json`; return the path of `tokenizer.json`.

    Args:
        folder: folder for both files. It is created if it does not exist.
        tokenizer: the tokenizer.
        template: chat template; None for none.
        settings: further keys of `tokenizer_config.json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    chat_template = {} if template is None else {"chat_template": template}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **settings, **chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def write_records(file: Path, records: Sequence[Any]) -> Path:
    """Write the records to a .jsonl file and return its path."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file

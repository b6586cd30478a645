"""Small tokenizers of the published kinds: what their post-processors put around a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from data_prep.tokenizer import train_bpe

SPECIAL = ("<|end|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|pad|>")
"""Their special tokens; their ids follow those of the vocabulary, but for the first, which is 0."""


def make_byte_tokenizer(text: str = "", size: int = 270) -> Tokenizer:
    """A byte-level BPE with all of SPECIAL, and no post-processor."""
    tokenizer = Tokenizer.from_str(train_bpe([text], size, SPECIAL[0]))
    tokenizer.add_special_tokens(list(SPECIAL[1:]))
    return tokenizer


def get_token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the tokenizer has."""
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


def add_post_processor(tokenizer: Tokenizer, kind: str) -> Tokenizer:
    """The tokenizer, adding tokens to a text as one of this kind does."""
    ids = {token: get_token_id(tokenizer, token) for token in SPECIAL}

    def template(single: str) -> processors.TemplateProcessing:
        used = [(token, ids[token]) for token in SPECIAL if token in single.split()]
        return processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=used)

    made: dict[str, Any] = {
        "qwen": None,
        "llama 3": processors.Sequence([processors.ByteLevel(trim_offsets=False), template("<s> $A")]),
        "mistral": template("<s> $A"),
        "with end": template("<s> $A </s>"),
        "end alone": template("$A <|end|>"),
        "two before": template("<s> <|im_start|> $A"),
        "one for both": template("<|end|> $A"),
        "bert": processors.BertProcessing(("</s>", ids["</s>"]), ("<s>", ids["<s>"])),
        "roberta": processors.RobertaProcessing(("</s>", ids["</s>"]), ("<s>", ids["<s>"])),
    }
    if made[kind] is not None:
        tokenizer.post_processor = made[kind]
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Tokenizer, template: str | None = None, **settings: Any) -> Path:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`; the first of them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    more = {} if template is None else {"chat_template": template}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", **settings, **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    return folder / "tokenizer.json"


def write_records(file: Path, lines: Sequence[Any]) -> Path:
    """A .jsonl file of these objects."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file

"""Determine the special tokens of a trained model, and write them to the small files of an export.

config.json, generation_config.json, tokenizer_config.json and special_tokens_map.json each contain the BOS, EOS and pad
tokens. Programs read different files, so all files must agree with each other and with the training data.
`submit.py generate` stops at the tokens that the exported files contain.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from pipeline.base.files import parse_json_or_none, read_json
from pipeline.checkpoint.identity import read_source
from pipeline.data.chat_template import ChatTemplate, find_template, read_special_tokens
from pipeline.data.manifest import CHAT_FILE, Manifest
from pipeline.data.special_tokens import EndOfTurn, find_end_of_turn, get_added_tokens
from pipeline.run.directory import Run

GENERATION_CONFIG = "generation_config.json"
"""File of a Hugging Face model with the tokens at which `generate` stops, by id."""
_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Files that contain tokens as texts, not as ids."""


@dataclass(frozen=True)
class ModelTokens:
    """Special tokens of a trained model."""

    end_ids: tuple[int, ...]
    """Ids of the tokens at which generation stops. The first id is that of `eos_token`."""
    eos_token: str
    """The EOS token that the files of the tokenizer contain."""
    bos_id: int | None
    """Id of the BOS token; None if there is none."""
    pad_id: int | None
    """Id of the pad token; None if there is none."""
    texts: Mapping[str, str]
    """Texts of the special tokens except the EOS token, by the keys of tokenizer_config.json, such as `bos_token`."""
    chat_template: str | None
    """The chat template of the training data. None if the run used no chat template, or the template of the source
    model, whose files contain it."""
    notes: tuple[str, ...]
    """Notes and warnings for the user of the exported model."""

    @property
    def ids(self) -> dict[str, Any]:
        """Values for config.json: `bos_token_id`, `eos_token_id` (a list if there are several) and `pad_token_id`."""
        eos_ids = self.end_ids[0] if len(self.end_ids) == 1 else list(self.end_ids)
        return {"bos_token_id": self.bos_id, "eos_token_id": eos_ids, "pad_token_id": self.pad_id}

    def update_side_file(self, name: str, text: str) -> str:
        """Return the content of a file of the source model, with the EOS tokens of the trained model.

        If the training data used another chat template than the source model, the key `chat_template` is removed,
        because the export has a file chat_template.jinja. Other values do not change. special_tokens_map.json does not
        change if it has no EOS token. If nothing has to change, or if `text` is not a JSON object, `text` is returned.

        Args:
            name: the name of the file, such as generation_config.json.
            text: the content of the file.
        """
        values = parse_json_or_none(text.encode())
        if not isinstance(values, dict):
            return text
        tokenizer_config, special_tokens_map = _TOKENIZER_FILES
        if name == GENERATION_CONFIG and set(_as_list(values.get("eos_token_id"))) != set(self.end_ids):
            values["eos_token_id"] = self.ids["eos_token_id"]
        elif name == tokenizer_config or (name == special_tokens_map and "eos_token" in values):
            has_other_template = self.chat_template is not None and values.pop("chat_template", None) is not None
            has_same_eos = _get_token_text(values.get("eos_token")) == self.eos_token
            if has_same_eos and not has_other_template:
                return text
            if not has_same_eos:
                values["eos_token"] = self.eos_token
        else:
            return text
        return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


def find_model_tokens(run: Run, manifest: Manifest, tokenizer: Tokenizer) -> ModelTokens:
    """Return the special tokens of the run's model.

    Generation stops at the EOS token of the run and at the EOS tokens of the source model. If the run was trained on
    dialogues, generation also stops at the token that ends an answer. The `eos_token` in the files of the tokenizer is
    the first token of this list that exists:

    1. the token that the chat template writes as `eos_token`;
    2. the EOS token of the run's config, if the user chose another token than the `eos_token` of the source model;
    3. the token that ends an answer in the chat template;
    4. the EOS token of the run's config.

    Args:
        run: the run.
        manifest: describes the shards of the run.
        tokenizer: the tokenizer of the run.

    Raises:
        CheckpointError: if `source.json` is missing or damaged.
    """
    source = read_source(run)
    eos_token = run.config.data.tokenizer.eos_token
    side_files: Mapping[str, str] = source.get("along", {})
    tokenizer_config, special_tokens_map, generation_config = (
        _parse_object(side_files.get(name)) for name in (*_TOKENIZER_FILES, GENERATION_CONFIG)
    )
    chat = read_json(run.data_dir / CHAT_FILE) if run.config.data.records == "messages" else None
    chat_tokens = (chat or {}).get("tokens", {})
    if side_files:
        tokens = read_special_tokens(tokenizer_config, special_tokens_map)
    else:
        tokens = read_special_tokens(chat_tokens)
    texts = {key: text for key, text in tokens.items() if text}

    end_of_turn = EndOfTurn((), "")
    if chat is not None:
        end_of_turn = find_end_of_turn(ChatTemplate(chat["template"], chat["tokens"]), tokenizer)
        is_eos_explicit = texts.get("eos_token") not in (None, eos_token)
        template_eos = chat["tokens"].get("eos_token") if "eos_token" in chat["template"] else None
        if template_eos is not None:
            eos_token = template_eos
        elif end_of_turn.ids and not is_eos_explicit:
            eos_token = str(tokenizer.id_to_token(end_of_turn.ids[0]))

    def get_source_id(key: str) -> Any:
        """Return a value of the source model's generation_config.json or config.json, such as `eos_token_id`."""
        config: Mapping[str, Any] = source.get("token_ids", {})
        return generation_config[key] if generation_config.get(key) is not None else config.get(key)

    def find_token_id(key: str) -> int | None:
        """Return the id of a token such as `bos_token`: from the source model, or otherwise from the tokenizer."""
        source_id = get_source_id(f"{key}_id")
        return source_id if isinstance(source_id, int) else tokenizer.token_to_id(texts.get(key, ""))

    prefix_ids, suffix_ids = get_added_tokens(tokenizer)
    bos_id = find_token_id("bos_token")
    pad_id = find_token_id("pad_token")
    if bos_id is None and len(prefix_ids) == 1 and (bos_text := tokenizer.id_to_token(prefix_ids[0])) is not None:
        bos_id = prefix_ids[0]
        texts["bos_token"] = bos_text
    source_end_ids = _as_list(get_source_id("eos_token_id"))
    candidates = [tokenizer.token_to_id(eos_token), *end_of_turn.ids, manifest.eos_id, *source_end_ids]
    end_ids = tuple(dict.fromkeys(each for each in candidates if isinstance(each, int)))
    notes = []
    if end_of_turn.problem:
        stops = " and ".join(sorted({str(tokenizer.id_to_token(each)) for each in end_ids}))
        notes.append(
            f"warning: {end_of_turn.problem}. Generation stops at {stops} only; end answers in the chat template"
        )
    if chat is None and prefix_ids != manifest.bos_ids:
        prefix = _format_tokens(tokenizer, prefix_ids)
        trained_prefix = _format_tokens(tokenizer, manifest.bos_ids)
        notes.append(
            f"note: the exported tokenizer adds {prefix} before a text, but the training documents began with "
            f"{trained_prefix}: encode prompts with add_special_tokens=False"
        )
    if suffix_ids:
        notes.append(
            f"note: the exported tokenizer adds {_format_tokens(tokenizer, suffix_ids)} after a text, which would end "
            "a prompt: encode prompts without it"
        )
    template = chat and chat["template"]
    if template == find_template(tokenizer_config, side_files.get("chat_template.jinja"))[0]:
        template = None  # The files of the source model already contain this template.
    texts.pop("eos_token", None)
    return ModelTokens(end_ids, eos_token, bos_id, pad_id, texts, template, tuple(notes))


def _format_tokens(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
    """Return the tokens with these ids as text, separated by spaces; `no special token` if `ids` is empty."""
    return " ".join(str(tokenizer.id_to_token(each)) for each in ids) or "no special token"


def _as_list(value: Any) -> list[Any]:
    """Return the ids in a value of config.json, which may be a number, a list or null."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _get_token_text(value: Any) -> str | None:
    """Return the text of a token from a tokenizer file, which may be a string or an object with the key `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _parse_object(text: str | None) -> dict[str, Any]:
    """Return the JSON object in `text`; {} if `text` is None or contains no JSON object."""
    value = parse_json_or_none(text.encode()) if text is not None else None
    return value if isinstance(value, dict) else {}

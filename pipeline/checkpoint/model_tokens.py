"""Special tokens of a trained model: where its texts end, and what the small files of an export say of them.

config.json, generation_config.json, tokenizer_config.json and special_tokens_map.json each name the tokens that end a
text, begin one and fill one up. Programs read different ones, so all must agree with each other and with what was
trained. `generate` ends where the exported files say that a text ends.
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

GENERATION = "generation_config.json"
_NAMES = ("tokenizer_config.json", "special_tokens_map.json")
"""Files that name tokens by their texts."""


@dataclass(frozen=True)
class ModelTokens:
    """Special tokens of a trained model."""

    end_ids: tuple[int, ...]
    """Tokens that end a text; the first is that of `eos_token`."""
    eos_token: str
    """What the tokenizer calls its end token."""
    bos_id: int | None
    pad_id: int | None
    names: Mapping[str, str]
    """Other special tokens by the names that a tokenizer has for them, such as `bos_token`."""
    chat_template: str | None
    """The template that wrote the dialogues of the training, if it is not among the source model's files."""
    notes: tuple[str, ...]
    """What a user of the exported model has to know."""

    @property
    def ids(self) -> dict[str, Any]:
        """As in config.json: `bos_token_id`, `eos_token_id` (a list if there are several) and `pad_token_id`."""
        end = self.end_ids[0] if len(self.end_ids) == 1 else list(self.end_ids)
        return {"bos_token_id": self.bos_id, "eos_token_id": end, "pad_token_id": self.pad_id}

    def corrected(self, name: str, text: str) -> str:
        """Return a file of the source model with the end tokens of the trained one; all else stays as it is.

        If the training had another chat template, that of the file is left out: there is chat_template.jinja.
        """
        values = parse_json_or_none(text.encode())
        if not isinstance(values, dict):
            return text
        if name == GENERATION and set(_as_list(values.get("eos_token_id"))) != set(self.end_ids):
            values["eos_token_id"] = self.ids["eos_token_id"]
        elif name == _NAMES[0] or (name == _NAMES[1] and "eos_token" in values):
            replaced = self.chat_template is not None and values.pop("chat_template", None) is not None
            if _content(values.get("eos_token")) == self.eos_token and not replaced:
                return text
            if _content(values.get("eos_token")) != self.eos_token:
                values["eos_token"] = self.eos_token
        else:
            return text
        return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


def find_model_tokens(run: Run, manifest: Manifest, tokenizer: Tokenizer) -> ModelTokens:
    """Return the special tokens of the run's model. Raises CheckpointError as `read_source` does.

    Texts end with the run's end token, with the token that closes answers if dialogues were trained, and with those of
    the model that training started from. The tokenizer's own `eos_token` is what the chat template writes by that name,
    as in training. If it does not use the name: the token that the config gives explicitly, or the one that closes
    answers.
    """
    source, eos_token = read_source(run), run.config.data.tokenizer.eos_token
    along: Mapping[str, str] = source.get("along", {})
    settings, mapping, generation = (_object(along.get(name)) for name in (*_NAMES, GENERATION))
    chat = read_json(run.data_dir / CHAT_FILE) if run.config.data.records == "messages" else None
    names = read_special_tokens(settings, mapping) if along else read_special_tokens((chat or {}).get("tokens", {}))
    names = {key: text for key, text in names.items() if text}

    turn = EndOfTurn((), "")
    if chat is not None:
        turn = find_end_of_turn(ChatTemplate(chat["template"], chat["tokens"]), tokenizer)
        explicit = names.get("eos_token") not in (None, eos_token)
        written = chat["tokens"].get("eos_token") if "eos_token" in chat["template"] else None
        if written is not None:
            eos_token = written
        elif turn.ids and not explicit:
            eos_token = str(tokenizer.id_to_token(turn.ids[0]))

    def theirs(key: str) -> Any:
        config: Mapping[str, Any] = source.get("token_ids", {})
        return generation[key] if generation.get(key) is not None else config.get(key)

    def id_of(name: str) -> int | None:
        known = theirs(f"{name}_id")
        return known if isinstance(known, int) else tokenizer.token_to_id(names.get(name, ""))

    begin, behind = get_added_tokens(tokenizer)
    bos_id, pad_id = id_of("bos_token"), id_of("pad_token")
    if bos_id is None and len(begin) == 1 and (name := tokenizer.id_to_token(begin[0])) is not None:
        bos_id, names["bos_token"] = begin[0], name
    ends = [tokenizer.token_to_id(eos_token), *turn.ids, manifest.eos_id, *_as_list(theirs("eos_token_id"))]
    notes = []
    if turn.problem:
        stops = " and ".join(sorted({str(tokenizer.id_to_token(one)) for one in ends if isinstance(one, int)}))
        notes.append(f"warning: {turn.problem}. Generation stops at {stops} only; end answers in the chat template")
    if chat is None and begin != manifest.bos_ids:
        adds, had = (_spelled(tokenizer, ids) for ids in (begin, manifest.bos_ids))
        notes.append(
            f"note: the exported tokenizer puts {adds} before a text, and documents of the training began with {had}: "
            "encode prompts with add_special_tokens=False"
        )
    if behind:
        notes.append(
            f"note: the exported tokenizer puts {_spelled(tokenizer, behind)} behind a text, which ends a prompt: "
            "encode prompts without it"
        )
    template = chat and chat["template"]
    if template == find_template(settings, along.get("chat_template.jinja"))[0]:
        template = None
    names.pop("eos_token", None)
    end_ids = tuple(dict.fromkeys(one for one in ends if isinstance(one, int)))
    return ModelTokens(end_ids, eos_token, bos_id, pad_id, names, template, tuple(notes))


def _spelled(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
    return " ".join(str(tokenizer.id_to_token(one)) for one in ids) or "no special token"


def _as_list(value: Any) -> list[Any]:
    """Return the ids that a key of config.json has, which may be a number, a list or null."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _content(value: Any) -> str | None:
    """Return the text of a token, which a file may give with its properties."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _object(text: str | None) -> dict[str, Any]:
    """Return the JSON object that a file holds; empty if it holds none."""
    found = parse_json_or_none(text.encode()) if text is not None else None
    return found if isinstance(found, dict) else {}

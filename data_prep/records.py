"""Prompts and dialogues: which text a line of `data.records` comes to, and which of it is learned.

    prompts     {"prompt": …, "response": …}              both one after the other; the response is learned, and the
                                                          end-of-text token behind it
    messages    {"messages": [{"role": …, "content": …}]}  what the tokenizer's chat template makes of them; what it
                                                          writes of the assistant's messages is learned

Chat templates are run by pipeline/data/chat_template.py. What one marks by `{% generation %}` is learned. One that
marks nothing is asked for the dialogue up to before and after each answer; both must be how the whole begins.

Template and special tokens come from the folder of `data.tokenizer.path`, or the template from `data.chat_template`;
`prepare` keeps them in `chat.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

from data_prep.documents import Record, RecordReader, RejectedError, get_text_field
from pipeline.base.errors import UserError
from pipeline.base.files import read_json
from pipeline.config.datasets import CHAT_TEMPLATES, DataConfig
from pipeline.config.hugging_face import check_added_tokens, open_inside, read_inside
from pipeline.data.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    UnusableTemplateError,
    allows_undefined,
    find_template,
    load_template,
    read_special_tokens,
    split_marks,
    uses_variable,
)
from pipeline.data.chat_template_worker import MARKS
from pipeline.data.special_tokens import get_added_tokens, load_tokenizer


def build_chat_json(tokenizer: str | Path, eos_token: str, chat_template: str = "") -> bytes:
    """Return the content of `chat.json`: the chat template, and the special tokens beside a `tokenizer.json`.

    chat_template: `data.chat_template`; empty: the template is that of the tokenizer's folder. The same files give the
    same bytes. Raises UserError, naming the file, if there is no chat template or none that Jinja can read.
    """
    folder = Path(tokenizer).parent
    settings, file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    source: Path | str = file if file.is_file() else settings
    try:
        known, jinja = read_inside(folder, settings.name), None
        if chat_template:
            jinja, source = load_template(Path(chat_template)), f"data.chat_template: {chat_template}"
        else:
            with suppress(FileNotFoundError), open_inside(folder, file.name) as opened:
                jinja = opened.read_bytes().decode()
        template, tokens = find_template(known, jinja)
        if template is None:
            raise UserError(
                "data.no_chat_template",
                f"data.records messages needs a chat template: there is no {file}, nor one in {settings}; set "
                f"data.chat_template to a file, or to one of {', '.join(CHAT_TEMPLATES)}",
            )
        tokens |= _used_tokens(template, Path(tokenizer), known, eos_token)
        added = check_added_tokens(Path(tokenizer), read_json(tokenizer))
        special = {eos_token, *(one["content"] for one in added if one.get("special"))}
        chat = {"template": template, "tokens": tokens, "special": sorted(special)}
        content = json.dumps(chat, ensure_ascii=False, sort_keys=True).encode()
        Dialogues(chat).check()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError("data.invalid_chat_template", f"{source}: no chat template that can be used: {error}") from None
    return content + b"\n"


def _used_tokens(template: str, tokenizer: Path, settings: Any, eos_token: str) -> dict[str, str]:
    """Return those of `bos_token` and `eos_token` that the template uses, as the exported tokenizer will give them.

    They are what the files beside `tokenizer.json` say; else the one token that it puts before a text, and
    `data.tokenizer.eos_token`. settings: the content of tokenizer_config.json. Raises UserError if one is nowhere.
    """
    used = [name for name in ("bos_token", "eos_token") if uses_variable(template, name)]
    if not used:
        return {}
    folder, file = tokenizer.parent, "special_tokens_map.json"
    try:
        mapping = read_inside(folder, file)
    except ValueError as error:
        raise UserError("data.damaged_file", f"{folder / file} cannot be read: {error}") from None
    settings = settings if isinstance(settings, dict) else {}
    mapping = mapping if isinstance(mapping, dict) else {}
    named = {**read_special_tokens(settings), **read_special_tokens(settings, mapping)}
    found = {name: named[name] for name in used if name in named}
    if "eos_token" in used:
        found.setdefault("eos_token", eos_token)
    if "bos_token" in used and "bos_token" not in found:
        loaded = load_tokenizer(tokenizer)
        begin, _ = get_added_tokens(loaded)
        bos_token = loaded.id_to_token(begin[0]) if len(begin) == 1 else None
        if bos_token is not None:
            found["bos_token"] = bos_token
        elif "bos_token" not in {**settings, **mapping} and not allows_undefined(template, "bos_token"):
            raise UserError(
                "data.no_bos_token",
                f"{folder / 'tokenizer_config.json'}: no bos_token, which the chat template writes, and {tokenizer} "
                "does not put a single token before a text: set bos_token there, or null if dialogues are to begin "
                "without one, or set data.chat_template to a template that does not use it",
            )
    return found


def make_record_reader(data: DataConfig, chat: bytes | None) -> RecordReader | None:
    """What makes a record of a line's object; None for text. `chat`: the content of `chat.json`, for messages."""
    if data.records == "messages":
        return Dialogues(json.loads(chat or b"")).read
    return None if data.records == "text" else _pair


def _pair(value: Mapping[str, Any]) -> Record:
    prompt, response = get_text_field(value, "prompt"), get_text_field(value, "response")
    if not response:
        raise RejectedError("field 'response' is empty")
    return prompt + response, ((len(prompt), len(prompt) + len(response)),)


class Dialogues:
    """Dialogues in the words of a chat template."""

    def __init__(self, chat: Mapping[str, Any]) -> None:
        self.template = ChatTemplate(chat["template"], chat["tokens"])
        self.forbidden = [*chat["special"], *MARKS]

    def check(self) -> None:
        """Render two dialogues. Raises UnusableTemplateError if the template cannot be used for any dialogue."""
        dialogue = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
        for messages in (dialogue, dialogue[1:]):
            try:
                self.template.render(messages)
            except UnusableTemplateError:
                raise
            except ChatTemplateError:  # it may want other roles
                continue

    def read(self, value: dict[str, Any]) -> Record:
        """The record of a line's object. Raises Rejected where it has no dialogue, or one that teaches nothing."""
        messages = self._checked(value)
        answers = [] if self.template.has_marks else [n for n, one in enumerate(messages) if one["role"] == "assistant"]
        beginnings = [(len(messages), False)]
        for number in answers:
            beginnings += [(number, True), (number + 1, False)]
        whole, *parts = self._written(messages, beginnings)
        text, learned = split_marks(whole)
        if not self.template.has_marks:
            learned = self._spans(text, answers, parts)
        if not learned:
            raise RejectedError("no message of the role 'assistant': nothing to learn")
        return text, tuple(learned)

    def _checked(self, value: Mapping[str, Any]) -> list[dict[str, str]]:
        messages = value.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RejectedError(f"no field 'messages' with a list of them; there are {shorten(str(list(value)), 200)}")
        if value.get("tools"):
            raise RejectedError("field 'tools' is not supported")
        found = []
        for number, message in enumerate(messages, 1):
            if not isinstance(message, dict):
                raise RejectedError(f"message {number} is no object but {type(message).__name__}")
            try:
                found.append({field: get_text_field(message, field) for field in ("role", "content")})
            except RejectedError as error:
                raise RejectedError(f"message {number}: {error}") from None
            if more := [key for key, one in message.items() if one is not None and key not in found[-1]]:
                raise RejectedError(f"message {number}: field {more[0]!r} is not supported")
            for text in found[-1].values():
                if taken := [token for token in self.forbidden if token in text]:
                    raise RejectedError(
                        f"message {number} holds {taken[0]!r}, which would be taken for a special token"
                    )
        return found

    def _written(self, messages: Sequence[Mapping[str, str]], beginnings: Sequence[tuple[int, bool]]) -> list[str]:
        try:
            return self.template.render_prefixes(messages, beginnings)
        except UnusableTemplateError as error:
            raise UserError(
                "data.invalid_chat_template", f"data.records messages: the chat template cannot be used: {error}"
            ) from None
        except ChatTemplateError as error:
            raise RejectedError(f"the chat template does not take it: {error}") from None

    @staticmethod
    def _spans(text: str, answers: Sequence[int], parts: Sequence[str]) -> list[tuple[int, int]]:
        """Where these messages stand in the whole `text`; `parts`: for each the text up to before and after it."""
        found = []
        for number, before, after in zip(answers, parts[::2], parts[1::2], strict=True):
            if not text.startswith(before) or not text.startswith(after) or len(before) >= len(after):
                raise RejectedError(
                    f"the chat template writes message {number + 1}, or what leads to it, otherwise where more "
                    "follow (Qwen3's leaves out earlier thinking): set data.chat_template to a template that marks "
                    "answers by {% generation %} … {% endgeneration %}, such as qwen3 or chatml, which come with Sluice"
                )
            found.append((len(before), len(after)))
        return found

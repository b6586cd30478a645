"""Convert objects to records (`data.records`): the text of a prompt or dialogue, and the parts that are learned.

    prompts     {"prompt": …, "response": …}               The text is the prompt followed by the response. The response
                                                           and the end-of-text token after it are learned.
    messages    {"messages": [{"role": …, "content": …}]}  The text is the output of the tokenizer's chat template. The
                                                           text of the assistant's messages is learned.

Text that is learned contributes to the loss. pipeline/data/chat_template.py runs chat templates. If a template has
`{% generation %}` marks, the marked text is learned. Otherwise the dialogue is also rendered up to the start and up to
the end of each answer. The difference is the answer. Both results must be prefixes of the whole text.

The template is `data.chat_template`, or a file in the folder of `data.tokenizer.path`. This folder also has the special
tokens. `prepare` saves template and special tokens in `chat.json`.
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
    """Return the content of `chat.json`: the chat template and the special tokens. The same files give the same bytes.

    Args:
        tokenizer: path of `tokenizer.json`. Its folder has files with special tokens, and may have a chat template.
        eos_token: `data.tokenizer.eos_token`.
        chat_template: `data.chat_template`. If this is empty, the template in the tokenizer's folder is used.

    Raises UserError with the file if there is no chat template, or if the template cannot be used.
    """
    folder = Path(tokenizer).parent
    settings_file = folder / "tokenizer_config.json"
    template_file = folder / "chat_template.jinja"
    source: Path | str = template_file if template_file.is_file() else settings_file
    try:
        settings = read_inside(folder, settings_file.name)
        jinja = None
        if chat_template:
            source = f"data.chat_template: {chat_template}"
            jinja = load_template(Path(chat_template))
        else:
            with suppress(FileNotFoundError), open_inside(folder, template_file.name) as opened:
                jinja = opened.read_bytes().decode()
        template, tokens = find_template(settings, jinja)
        if template is None:
            raise UserError(
                "data.no_chat_template",
                f"data.records messages needs a chat template, but neither {template_file} nor {settings_file} has "
                f"one: set data.chat_template to a file, or to one of {', '.join(CHAT_TEMPLATES)}",
            )
        tokens |= _find_used_tokens(template, Path(tokenizer), settings, eos_token)
        added_tokens = check_added_tokens(Path(tokenizer), read_json(tokenizer))
        special_tokens = {eos_token, *(token["content"] for token in added_tokens if token.get("special"))}
        chat = {"template": template, "tokens": tokens, "special": sorted(special_tokens)}
        content = json.dumps(chat, ensure_ascii=False, sort_keys=True).encode()
        DialogueReader(chat).check_template()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError("data.invalid_chat_template", f"{source}: the chat template cannot be used: {error}") from None
    return content + b"\n"


def _find_used_tokens(template: str, tokenizer: Path, settings: Any, eos_token: str) -> dict[str, str]:
    """Return the values of the variables `bos_token` and `eos_token`, if the template uses them.

    Files in the folder of `tokenizer.json` usually define these variables. Otherwise `eos_token` is
    `data.tokenizer.eos_token`, and `bos_token` is the token that the tokenizer adds before a text, if it adds exactly
    one. The exported tokenizer has the same values.

    Args:
        template: the chat template.
        tokenizer: path of `tokenizer.json`.
        settings: the parsed content of tokenizer_config.json.
        eos_token: `data.tokenizer.eos_token`.

    Raises UserError if the template needs `bos_token`, but nothing defines this variable. A null in one of the files is
    a definition: the variable then has no value. Also raises it if special_tokens_map.json cannot be read.
    """
    used_names = [name for name in ("bos_token", "eos_token") if uses_variable(template, name)]
    if not used_names:
        return {}
    folder = tokenizer.parent
    map_file = folder / "special_tokens_map.json"
    try:
        mapping = read_inside(folder, map_file.name)
    except ValueError as error:
        raise UserError("data.damaged_file", f"{map_file} cannot be read: {error}") from None
    settings = settings if isinstance(settings, dict) else {}
    mapping = mapping if isinstance(mapping, dict) else {}
    # If a token is null in special_tokens_map.json, its value in tokenizer_config.json is used.
    defined_tokens = {**read_special_tokens(settings), **read_special_tokens(settings, mapping)}
    tokens = {name: defined_tokens[name] for name in used_names if name in defined_tokens}
    if "eos_token" in used_names:
        tokens.setdefault("eos_token", eos_token)
    if "bos_token" in used_names and "bos_token" not in tokens:
        loaded_tokenizer = load_tokenizer(tokenizer)
        ids_before_text, _ = get_added_tokens(loaded_tokenizer)
        bos_token = loaded_tokenizer.id_to_token(ids_before_text[0]) if len(ids_before_text) == 1 else None
        if bos_token is not None:
            tokens["bos_token"] = bos_token
        elif "bos_token" not in {**settings, **mapping} and not allows_undefined(template, "bos_token"):
            raise UserError(
                "data.no_bos_token",
                f"{folder / 'tokenizer_config.json'}: the chat template uses bos_token, which is not defined, and "
                f"{tokenizer} does not put a single token before a text: set bos_token there, or null if dialogues "
                "begin without one, or set data.chat_template to a template that does not use it",
            )
    return tokens


def make_record_reader(data: DataConfig, chat: bytes | None) -> RecordReader | None:
    """Return the function that converts an object to a record; None if the data is plain text.

    `chat` is the content of `chat.json` if the data is dialogues, otherwise None.
    """
    if data.records == "messages":
        return DialogueReader(json.loads(chat or b"")).read_dialogue
    return None if data.records == "text" else _read_prompt


def _read_prompt(value: Mapping[str, Any]) -> Record:
    """Return the record of an object with a prompt and its response.

    Raises RejectedError if a field is missing or not text, or if the response is empty.
    """
    prompt = get_text_field(value, "prompt")
    response = get_text_field(value, "response")
    if not response:
        raise RejectedError("field 'response' is empty")
    return prompt + response, ((len(prompt), len(prompt) + len(response)),)


class DialogueReader:
    """Converts objects to records of dialogues with a chat template.

    Args:
        chat: the parsed content of `chat.json`.
    """

    def __init__(self, chat: Mapping[str, Any]) -> None:
        self.template = ChatTemplate(chat["template"], chat["tokens"])
        self.forbidden_texts = [*chat["special"], *MARKS]
        """Texts that a message must not contain, because they would become special tokens or marks."""

    def check_template(self) -> None:
        """Raise UnusableTemplateError if the template cannot be used for any dialogue, by rendering two dialogues."""
        dialogue = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
        for messages in (dialogue, dialogue[1:]):
            try:
                self.template.render(messages)
            except UnusableTemplateError:
                raise
            except ChatTemplateError:  # The template may not accept these roles.
                continue

    def read_dialogue(self, value: dict[str, Any]) -> Record:
        """Return the record of an object with a dialogue.

        Raises RejectedError if the object has no valid dialogue, the template rejects it, or no text is learned.
        """
        messages = self._check_messages(value)
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if self.template.has_marks:
            answers = []  # The marks in the whole text are enough.
        # Each prefix is a pair: number of messages, and whether to add the generation prompt. The first is the whole
        # text.
        prefixes = [(len(messages), False)]
        for index in answers:
            prefixes += [(index, True), (index + 1, False)]
        whole_text, *prefix_texts = self._render_prefixes(messages, prefixes)
        text, learned = split_marks(whole_text)
        if not self.template.has_marks:
            learned = self._find_answers(text, answers, prefix_texts)
        if not learned:
            raise RejectedError("no message of the role 'assistant': nothing to learn")
        return text, tuple(learned)

    def _check_messages(self, value: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return role and content of each message of an object.

        Raises RejectedError if the object has no messages, or if a message is malformed or not supported.
        """
        messages = value.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RejectedError(
                f"no field 'messages' with a list of messages; the fields are {shorten(str(list(value)), 200)}"
            )
        if value.get("tools"):
            raise RejectedError("field 'tools' is not supported")
        checked_messages: list[dict[str, str]] = []
        for number, message in enumerate(messages, 1):
            if not isinstance(message, dict):
                raise RejectedError(f"message {number} is not an object but {type(message).__name__}")
            try:
                fields = {field: get_text_field(message, field) for field in ("role", "content")}
            except RejectedError as error:
                raise RejectedError(f"message {number}: {error}") from None
            other_keys = [key for key, content in message.items() if content is not None and key not in fields]
            if other_keys:
                raise RejectedError(f"message {number}: field {other_keys[0]!r} is not supported")
            for text in fields.values():
                if forbidden_texts := [forbidden for forbidden in self.forbidden_texts if forbidden in text]:
                    raise RejectedError(
                        f"message {number} contains {forbidden_texts[0]!r}, which would become a special token"
                    )
            checked_messages.append(fields)
        return checked_messages

    def _render_prefixes(
        self, messages: Sequence[Mapping[str, str]], prefixes: Sequence[tuple[int, bool]]
    ) -> list[str]:
        """Return the texts of several prefixes of a dialogue (see `ChatTemplate.render_prefixes`).

        Raises RejectedError if the template fails on this dialogue, and UserError if it fails on any dialogue.
        """
        try:
            return self.template.render_prefixes(messages, prefixes)
        except UnusableTemplateError as error:
            raise UserError(
                "data.invalid_chat_template", f"data.records messages: the chat template cannot be used: {error}"
            ) from None
        except ChatTemplateError as error:
            raise RejectedError(f"the chat template rejects the dialogue: {error}") from None

    @staticmethod
    def _find_answers(text: str, answers: Sequence[int], prefix_texts: Sequence[str]) -> list[tuple[int, int]]:
        """Return the spans [start, end) of the answers in the text of a dialogue.

        Args:
            text: the rendered dialogue.
            answers: the indices of the assistant's messages.
            prefix_texts: two texts for each answer: the dialogue up to the start, and up to the end of the answer.

        Raises RejectedError if one of these texts is not a prefix of the whole text.
        """
        spans = []
        for index, before, after in zip(answers, prefix_texts[::2], prefix_texts[1::2], strict=True):
            if not text.startswith(before) or not text.startswith(after) or len(before) >= len(after):
                raise RejectedError(
                    f"the chat template writes message {index + 1}, or the text before it, differently if more "
                    "messages follow (Qwen3's drops earlier thinking): set data.chat_template to a template that marks "
                    "answers with {% generation %} … {% endgeneration %}, such as Sluice's qwen3 or chatml"
                )
            spans.append((len(before), len(after)))
        return spans

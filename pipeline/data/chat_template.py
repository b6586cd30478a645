"""Render dialogues as text with a chat template, a Jinja program that is published with a tokenizer.

A template runs in a child process (pipeline/data/chat_template_worker.py), in Jinja's sandbox. Templates can use the
functions that transformers provides (`utils/chat_template_utils.py`), except the current time and other functions with
changing results. The reason is that the same dialogue must always have the same text. A template may mark the
assistant's answers with `{% generation %} … {% endgeneration %}`.

`prepare` writes the template and the special tokens to `chat.json` in the data folder (data_prep/records.py). This
module needs neither torch nor tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.base.errors import UserError
from pipeline.base.files import open_regular_file
from pipeline.config.datasets import CHAT_TEMPLATES
from pipeline.data.chat_template_worker import MARKS
from pipeline.run.worker import WorkerDiedError, WorkerPool

_MAX_PREFIXES_PER_REQUEST = 16
"""Maximum number of prefixes (first messages of a dialogue) that one request renders.

Most templates need less time than the request itself, so one request renders several prefixes.
"""
_MAX_CHARACTERS_PER_REQUEST = 1 << 20
"""Maximum number of characters of messages in one request, summed over its prefixes. One prefix is always allowed."""
_MAX_CPU_S = 60
"""Maximum processor time of one request, in seconds.

Whether a template exceeds the limits of time and memory depends on the machine. Rejecting only the dialogue would give
different shards on different machines. Therefore the whole template becomes unusable.
"""
_MAX_MEMORY = 1 << 31
"""Maximum memory of one request, in bytes."""
_RENDERER = WorkerPool("pipeline.data.chat_template_worker", _MAX_CPU_S, _MAX_MEMORY)
_TEMPLATES_DIR = Path(__file__).parent / "chat_templates"
"""Templates that mark answers, for training: one for each family of models from which a run can start."""
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplateError(ValueError):
    """Error for a dialogue that a template cannot render. The message is the shortened message of the template."""


class UnusableTemplateError(ChatTemplateError):
    """Error for a template that cannot be used for any dialogue.

    The reason is one of these: the source is not a template, the text would change between calls, or the limits of time
    or memory are exceeded.
    """


class ChatTemplate:
    """A chat template that renders dialogues in a child process."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """Store a template, to be compiled when it is first used.

        Args:
            source: the Jinja program.
            tokens: the texts of the special tokens, by the names that templates use, such as `eos_token`.
        """
        self._source = source
        self._tokens = dict(tokens)
        self.has_marks = _GENERATION_TAG.search(source) is not None
        """Whether the template marks the assistant's answers."""

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = False) -> str:
        """Return the text of a dialogue. :data:`MARKS` enclose the parts in `{% generation %}`.

        Args:
            messages: the messages of the dialogue, each with `role` and `content`.
            add_generation_prompt: whether to end with the text that precedes an answer.

        Raises:
            ChatTemplateError: if the template fails on this dialogue.
            UnusableTemplateError: if the template cannot be used for any dialogue.
        """
        (text,) = self.render_prefixes(messages, [(len(messages), add_generation_prompt)])
        return text

    def render_prefixes(self, messages: Sequence[Mapping[str, str]], prefixes: Sequence[tuple[int, bool]]) -> list[str]:
        """Return the texts of several prefixes of a dialogue, as `render` returns them.

        Args:
            messages: the messages of the dialogue.
            prefixes: for each text, the number of first messages to render and `add_generation_prompt`.

        Raises:
            ChatTemplateError: if the template fails on a prefix.
            UnusableTemplateError: if the template cannot be used for any dialogue.
        """
        texts: list[str] = []
        # 1 is added, because the number must not be 0.
        characters = 1 + sum(len(text) for message in messages for text in message.values())
        step = max(1, min(_MAX_PREFIXES_PER_REQUEST, _MAX_CHARACTERS_PER_REQUEST // characters))
        for start in range(0, len(prefixes), step):
            texts += self._request_texts(messages, prefixes[start : start + step])
        return texts

    def compile(self) -> None:
        """Raise UnusableTemplateError if the source is not a Jinja template or uses a filter that is not allowed."""
        self._request_texts([], [])  # This request compiles the template, but renders nothing.

    def _request_texts(self, messages: Sequence[Mapping[str, str]], prefixes: Sequence[tuple[int, bool]]) -> list[str]:
        """Render prefixes in one request to the child process and return their texts. Raises as `render_prefixes`."""
        request = {"source": self._source, "tokens": self._tokens, "messages": [*messages], "prefixes": prefixes}
        try:
            answer = _RENDERER.request(request)
        except WorkerDiedError as error:
            raise UnusableTemplateError(f"the process that ran it failed: {error}") from None
        if "unusable" in answer:
            raise UnusableTemplateError(answer["unusable"])
        if "failed" in answer:
            raise ChatTemplateError(answer["failed"])
        texts: list[str] = answer["texts"]
        return texts


def split_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return rendered text without :data:`MARKS`, and the spans [start, end) of the characters that were marked.

    The spans count characters of the returned text.
    """
    plain_text = ""
    spans = []
    for index, piece in enumerate(re.split(f"[{''.join(MARKS)}]", text)):
        is_marked = index % 2 == 1  # Opening and closing marks alternate.
        if is_marked and piece:
            spans.append((len(plain_text), len(plain_text) + len(piece)))
        plain_text += piece
    return plain_text, spans


def find_template(settings: Any, jinja: str | None) -> tuple[str | None, dict[str, str]]:
    """Return a tokenizer's chat template (None if it has no template), and its special tokens by name.

    Args:
        settings: the parsed content of tokenizer_config.json.
        jinja: the content of chat_template.jinja in the same directory, which takes precedence; None without this file.
    """
    settings = settings if isinstance(settings, dict) else {}
    template = settings.get("chat_template")
    if isinstance(template, list):
        # The file has several named templates.
        default_templates = [
            named_template
            for named_template in template
            if isinstance(named_template, dict) and named_template.get("name") == "default"
        ]
        template = default_templates[0].get("template") if default_templates else None
    if jinja is not None:
        template = jinja
    return template if isinstance(template, str) else None, read_special_tokens(settings)


def read_special_tokens(settings: Mapping[str, Any], mapping: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the texts of a tokenizer's special tokens by name, such as `eos_token`, as transformers reads them.

    Args:
        settings: the parsed content of tokenizer_config.json.
        mapping: the parsed content of special_tokens_map.json; used only if `settings` does not list the added tokens
            (`added_tokens_decoder`).
    """
    values = {**settings, **({} if "added_tokens_decoder" in settings else mapping or {})}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in values.items()}
    return {key: text for key, text in texts.items() if key.endswith("_token") and isinstance(text, str)}


def uses_variable(template: str, name: str) -> bool:
    """Return True if a template contains the name of a variable outside of comments."""
    return re.search(rf"\b{name}\b", _COMMENT.sub("", template)) is not None


def allows_undefined(template: str, name: str) -> bool:
    """Return True if a template tests whether a variable has a value, and therefore also works without this variable.

    The function searches for usual forms of such tests, for example `if NAME` or `NAME is defined`.
    """
    test = rf"\b(if|and|or|not)\s+{name}\b|\b{name}\s*(is\b|or\b|\|\s*d(efault)?\b)"
    return re.search(test, _COMMENT.sub("", template)) is not None


def load_template(name: Path) -> str:
    """Return the text of the template that `data.chat_template` names.

    Args:
        name: path of a file, or the name of a template that is part of Sluice.

    Raises:
        UserError: if the file cannot be read or is not UTF-8.
    """
    file = _TEMPLATES_DIR / f"{name}.jinja" if str(name) in CHAT_TEMPLATES else name
    try:
        with open_regular_file(file) as stream:
            return stream.read().decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            "data.no_chat_template",
            f"data.chat_template: cannot read {file}: {reason}; name a file, or one of {', '.join(CHAT_TEMPLATES)}",
        ) from None

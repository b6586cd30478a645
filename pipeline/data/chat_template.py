"""Chat templates: a Jinja program, published with a tokenizer, that turns a dialogue into text.

It runs in a child process (pipeline/data/chat_template_worker.py), in Jinja's sandbox with what transformers gives it
(`utils/chat_template_utils.py`), except the current time and whatever else would change from one call to the next: the
same dialogue must always give the same text. A template may mark what the assistant says by `{% generation %} …
{% endgeneration %}`.

`prepare` writes template and special tokens to `chat.json` in the data folder (data_prep/records.py). Nothing here
needs torch or tokenizers.
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

_AT_ONCE = 16
"""Beginnings of a dialogue that are rendered in one request, because a request takes longer than most templates."""
_CHARACTERS_AT_ONCE = 1 << 20
"""Of messages that come to these beginnings: a long dialogue is rendered one by one."""
_CPU_S = 60
"""Seconds of processor time of one request. To exceed them, or the memory, is an error of the template: they
depend on the machine, so they must not decide which dialogues are taken."""
_MEMORY = 1 << 31
"""Bytes of memory of one request."""
_RENDERER = WorkerPool("pipeline.data.chat_template_worker", _CPU_S, _MEMORY)
_FOLDER = Path(__file__).parent / "chat_templates"
"""Templates for training of the families of models that a run can start from. They mark answers."""
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplateError(ValueError):
    """A template failed on a dialogue; the message is the template's own, shortened."""


class UnusableTemplateError(ChatTemplateError):
    """A template cannot be used for any dialogue: its text would change, or it exceeds the limits."""


class ChatTemplate:
    """One chat template, ready to render dialogues."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """Run nothing yet. `tokens` are the special tokens by the names that templates use, such as `eos_token`."""
        self._source, self._tokens = source, dict(tokens)
        self.has_marks = _MARKED.search(source) is not None
        """Whether the template marks what the assistant says."""

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = False) -> str:
        """Return the text of a dialogue, with :data:`MARKS` around what the template marks.

        Raises ChatTemplateError if the template fails on it, UnusableTemplateError if it would on any: it is not a
        template, uses what is not there for templates, or exceeds the limits.
        """
        (text,) = self.render_prefixes(messages, [(len(messages), add_generation_prompt)])
        return text

    def render_prefixes(
        self, messages: Sequence[Mapping[str, str]], beginnings: Sequence[tuple[int, bool]]
    ) -> list[str]:
        """Return what `render` does of the first messages of a dialogue, for each (how many, add_generation_prompt).

        Raises what `render` raises.
        """
        found: list[str] = []
        characters = 1 + sum(len(text) for message in messages for text in message.values())
        step = max(1, min(_AT_ONCE, _CHARACTERS_AT_ONCE // characters))
        for start in range(0, len(beginnings), step):
            found += self._ask(messages, beginnings[start : start + step])
        return found

    def compile(self) -> None:
        """Raise UnusableTemplateError if this is not a template, or uses what is not there for templates."""
        self._ask([], [])

    def _ask(self, messages: Sequence[Mapping[str, str]], beginnings: Sequence[tuple[int, bool]]) -> list[str]:
        request = {"source": self._source, "tokens": self._tokens, "messages": [*messages], "beginnings": beginnings}
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
    """Return rendered text without its marks, and the character spans [start, end) that they enclosed."""
    plain, spans = "", []
    for number, part in enumerate(re.split(f"[{''.join(MARKS)}]", text)):
        if number % 2 and part:
            spans.append((len(plain), len(plain) + len(part)))
        plain += part
    return plain, spans


def find_template(settings: Any, jinja: str | None) -> tuple[str | None, dict[str, str]]:
    """Return a tokenizer's chat template (None: it has none), and its special tokens by name.

    settings: the content of tokenizer_config.json; jinja: that of chat_template.jinja beside it, which comes first.
    """
    settings = settings if isinstance(settings, dict) else {}
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by names
        named = [one for one in template if isinstance(one, dict) and one.get("name") == "default"]
        template = named[0].get("template") if named else None
    found = template if jinja is None else jinja
    return found if isinstance(found, str) else None, read_special_tokens(settings)


def read_special_tokens(settings: Mapping[str, Any], mapping: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return a tokenizer's special tokens by name, such as `eos_token`, as transformers reads them.

    settings: the content of tokenizer_config.json; mapping: that of special_tokens_map.json beside it, which is read
    only if the first one does not list all added tokens.
    """
    values = {**settings, **({} if "added_tokens_decoder" in settings else mapping or {})}
    texts = {key: one.get("content") if isinstance(one, dict) else one for key, one in values.items()}
    return {key: one for key, one in texts.items() if key.endswith("_token") and isinstance(one, str)}


def uses_variable(template: str, name: str) -> bool:
    """Whether a template uses a variable, other than in a comment."""
    return re.search(rf"\b{name}\b", _COMMENT.sub("", template)) is not None


def allows_undefined(template: str, name: str) -> bool:
    """Whether a template asks if a variable has a value, so that it can do without."""
    asks = rf"\b(if|and|or|not)\s+{name}\b|\b{name}\s*(is\b|or\b|\|\s*d(efault)?\b)"
    return re.search(asks, _COMMENT.sub("", template)) is not None


def load_template(name: Path) -> str:
    """Return the text of `data.chat_template`: of a file, or of a template that comes with Sluice, by its name.

    Raises UserError if the file cannot be read.
    """
    file = _FOLDER / f"{name}.jinja" if str(name) in CHAT_TEMPLATES else name
    try:
        with open_regular_file(file) as stream:
            return stream.read().decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            "data.no_chat_template",
            f"data.chat_template: cannot read {file}: {reason}; name a file, or one of {', '.join(CHAT_TEMPLATES)}",
        ) from None

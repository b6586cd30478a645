"""Chat templates: a Jinja program, published with a tokenizer, that turns a dialogue into text.

It runs in Jinja's sandbox with what transformers gives it (`utils/chat_template_utils.py`), except the current time:
the same dialogue must always give the same text. A template may mark what the assistant says by `{% generation %} …
{% endgeneration %}`.

`prepare` writes template and special tokens to `chat.json` in the data folder (data_prep/text/records.py). Nothing here
needs torch or tokenizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.base.errors import UserError
from pipeline.base.files import open_regular
from pipeline.config.datasets import CHAT_TEMPLATES

MARKS = ("\ufdd0", "\ufdd1")
"""Around marked text in what `ChatTemplate.render` returns: characters that Unicode reserves for programs."""
_FOLDER = Path(__file__).parent / "chat_templates"
"""Templates for training of the families of models that a run can start from. They mark answers."""
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplateError(ValueError):
    """A template failed on a dialogue; the message is the template's own, shortened."""


class _Generation(Extension):
    """The tag `{% generation %} … {% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{MARKS[0]}{caller()}{MARKS[1]}"


class ChatTemplate:
    """One chat template, ready to render dialogues."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """Compile `source`; `tokens` are the special tokens by the names that templates use, such as `eos_token`.

        Raises jinja2.TemplateError if `source` is not a template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        self._template, self._tokens = environment.from_string(source), tokens
        self.has_marks = _MARKED.search(source) is not None
        """Whether the template marks what the assistant says."""

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = False) -> str:
        """Return the text of a dialogue, with :data:`MARKS` around what the template marks.

        Raises ChatTemplateError if the template fails on it.
        """
        values = {**self._tokens, "messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(values, tools=None, documents=None)
        except Exception as error:  # a template is a foreign program and may raise anything
            raise ChatTemplateError(shorten(str(error), 200)) from None


def split_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return rendered text without its marks, and the character spans [start, end) that they enclosed."""
    plain, spans = "", []
    for number, part in enumerate(re.split(f"[{''.join(MARKS)}]", text)):
        if number % 2 and part:
            spans.append((len(plain), len(plain) + len(part)))
        plain += part
    return plain, spans


def _to_json(value: Any, indent: int | None = None) -> str:
    """Replace Jinja's filter of this name, which escapes HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def find_template(settings: Any, jinja: str | None) -> tuple[str | None, dict[str, str]]:
    """Return a tokenizer's chat template (None: it has none), and its special tokens by name.

    settings: the content of tokenizer_config.json; jinja: that of chat_template.jinja beside it, which comes first.
    """
    settings = settings if isinstance(settings, dict) else {}
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by names
        named = [one for one in template if isinstance(one, dict) and one.get("name") == "default"]
        template = named[0].get("template") if named else None
    texts = {key: one.get("content") if isinstance(one, dict) else one for key, one in settings.items()}
    tokens = {key: one for key, one in texts.items() if key.endswith("_token") and isinstance(one, str)}
    found = template if jinja is None else jinja
    return found if isinstance(found, str) else None, tokens


def read_template(name: Path) -> str:
    """Return the text of `data.chat_template`: of a file, or of a template that comes with Sluice, by its name.

    Raises UserError if the file cannot be read.
    """
    file = _FOLDER / f"{name}.jinja" if str(name) in CHAT_TEMPLATES else name
    try:
        with open_regular(file) as stream:
            return stream.read().decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"data.chat_template: cannot read {file}: {reason}; name a file, or one of {', '.join(CHAT_TEMPLATES)}"
        ) from None

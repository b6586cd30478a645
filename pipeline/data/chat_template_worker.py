"""Render chat templates in a child process: `python -m pipeline.data.chat_template_worker`.

A template is an untrusted program. Jinja's sandbox prevents access to files and to Python's internals. In addition, a
dialogue must always have the same text, because shards that are created again must be identical. This module therefore
does not allow:

- the filters `random` and `pprint`, the function `lipsum`, and functions that return the time;
- converting a function or an iterator to text, because this text contains a memory address;
- sets, which have no order.

This module limits the size of the text. pipeline/run/worker.py limits processor time and memory.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, wraps
from textwrap import shorten
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner

from pipeline.run.worker import AnswerPart, serve_requests

MARKS = ("\ufdd0", "\ufdd1")
"""The characters before and after text in `{% generation %}`. Unicode reserves them for internal use in programs."""
MAX_CHARACTERS = 1 << 24
"""Maximum number of characters in the text of one dialogue. A dialogue with a longer text is rejected."""
_FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    BlockReference,
)
"""Types of functions and methods. Converted to text, these values contain a memory address."""
_CHANGING_FILTERS = ("random", "pprint")
"""Filters with results that change between calls. `pprint` sorts values without an order by their memory addresses."""
_CHANGING_FUNCTIONS = ("lipsum", "strftime_now", "now")
"""Functions of Jinja and transformers with results that change between calls. Templates cannot use them."""
_REMEDY = "set data.chat_template to a copy without it, or to a template that comes with Sluice"


class _ChangingTextError(Exception):
    """Error for a template with a text that would change between calls. The message says which value is the reason."""


class _ValueWithoutText:
    """A value that a template may use, but not convert to text."""

    def __repr__(self) -> str:
        """Raise _ChangingTextError, because the template converts this value to text."""
        raise _ChangingTextError(
            "it writes a function or an iterator, whose text is an address in memory and changes between processes: "
            "call the function, or add |list after the iterator"
        )

    def __format__(self, specification: str) -> str:
        """Raise _ChangingTextError."""
        return repr(self)


class _Function(_ValueWithoutText):
    """A function or method that a template can call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._function(*arguments, **options)


class _Iterator(_ValueWithoutText):
    """An iterator, such as the result of the filter `map`."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)


class _Cycler(_ValueWithoutText, Cycler):
    """Jinja's `cycler`, which cannot be converted to text."""


class _Joiner(_ValueWithoutText, Joiner):
    """Jinja's `joiner`, which cannot be converted to text."""


def _wrap_value(value: Any) -> Any:
    """Return a value that a template computed, wrapped if its text would contain a memory address.

    Raises:
        _ChangingTextError: if the value is a set.
    """
    if isinstance(value, set | frozenset):
        raise _ChangingTextError("it makes a set, which has no order: use a list")
    if isinstance(value, _FUNCTIONS):
        return _Function(value)
    if isinstance(value, Iterator) and not isinstance(value, LoopContext | _ValueWithoutText):
        return _Iterator(value)
    return value


class _Undefined(Undefined):
    """An undefined variable. A template may only test whether the variable is defined; any other use is an error."""

    def _fail_with_undefined_error(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise _ChangingTextError for a function that this module removed, otherwise Jinja's error."""
        if self._undefined_name in _CHANGING_FUNCTIONS:
            raise _ChangingTextError(
                f"it calls {self._undefined_name}, which is not available because the text would change between calls: "
                f"{_REMEDY}"
            )
        super()._fail_with_undefined_error(*arguments, **options)


class _Generation(Extension):
    """The tag `{% generation %} … {% endgeneration %}`, which puts :data:`MARKS` around the assistant's answers."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the node of a tag and its body."""
        line_number = next(parser.stream).lineno  # The first token is the name of the tag.
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_add_marks"), [], [], body).set_lineno(line_number)

    def _add_marks(self, caller: Callable[[], str]) -> str:
        """Return the text of the tag's body, which `caller` renders, between marks."""
        return f"{MARKS[0]}{caller()}{MARKS[1]}"


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which the text of a template cannot change between calls.

    Each value that a template computes by an attribute, an index, a call, a filter or `-` is passed to `_wrap_value`.
    """

    intercepted_binops = frozenset(["-"])
    """Operators for which Jinja calls `call_binop`. The difference of the keys of two dictionaries is a set."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], undefined=_Undefined
        )
        for name in _CHANGING_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _to_json
        self.filters = {name: _wrap_filter(function) for name, function in self.filters.items()}
        replacements = {"cycler": _Cycler, "joiner": _Joiner, "raise_exception": _raise_exception}
        del self.globals["lipsum"]
        self.globals = {name: _wrap_value(value) for name, value in {**self.globals, **replacements}.items()}

    def getattr(self, obj: Any, attribute: str) -> Any:
        return _wrap_value(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return _wrap_value(super().getitem(obj, argument))

    # The underscores, which Jinja also uses, keep these parameters apart from the names in `options`.
    def call(__self, __context: Any, __obj: Any, *arguments: Any, **options: Any) -> Any:
        return _wrap_value(super().call(__context, __obj, *arguments, **options))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        return _wrap_value(super().call_binop(context, operator, left, right))


def _wrap_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that calls `function` and passes the result to `_wrap_value`."""

    # `wraps` also copies the attribute that tells Jinja whether to pass the context or the environment.
    @wraps(function)
    def apply_filter(*arguments: Any, **options: Any) -> Any:
        return _wrap_value(function(*arguments, **options))

    return apply_filter


def _to_json(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON. This function replaces Jinja's filter `tojson`, which escapes HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: Any) -> None:
    """Raise TemplateError: the function `raise_exception` that transformers provides to templates."""
    raise TemplateError(str(message))


@lru_cache(maxsize=4)
def _compile(source: str) -> Template:
    """Compile a template.

    Raises:
        jinja2.TemplateError: if `source` is not a template.
        _ChangingTextError: if the template uses one of `_CHANGING_FILTERS`.
    """
    environment = _Environment()
    for node in environment.parse(source).find_all(nodes.Filter):
        if node.name in _CHANGING_FILTERS:
            raise _ChangingTextError(
                f"line {node.lineno} uses the filter {node.name}, whose result changes between calls: {_REMEDY}"
            )
    return environment.from_string(source)


def _render(template: Template, values: Mapping[str, Any]) -> str:
    """Render a template with `values` and return the text.

    Raises:
        jinja2.TemplateError: if the template fails, or the text is too long or cannot be encoded as UTF-8.
        _ChangingTextError: if the text would change between calls.
    """
    chunks = []
    length = 0
    for chunk in template.generate(values):
        chunks.append(chunk)
        length += len(chunk)
        if length > MAX_CHARACTERS:
            raise TemplateError(f"it writes more than {MAX_CHARACTERS:,} characters")
    text = "".join(chunks)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TemplateError("it writes a lone surrogate") from None
    return text


def _answer_request(request: Mapping[str, Any]) -> Iterable[AnswerPart]:
    """Yield the answer to a request of `ChatTemplate`, as one dictionary.

    The dictionary has exactly one key: `texts` (the texts of the prefixes), `failed` (a message about this dialogue) or
    `unusable` (a message about the template).
    """
    answer: dict[str, Any]
    is_compiled = False
    try:
        template = _compile(request["source"])
        is_compiled = True
        texts = []
        messages = request["messages"]
        for count, add_generation_prompt in request["prefixes"]:
            values = {"messages": messages[:count], "add_generation_prompt": add_generation_prompt}
            # transformers also sets `tools` and `documents` to None if there are none
            texts.append(_render(template, {**request["tokens"], **values, "tools": None, "documents": None}))
        answer = {"texts": texts}
    except _ChangingTextError as error:
        answer = {"unusable": str(error)}
    except MemoryError:
        answer = {"unusable": "it needs too much memory for one dialogue (the limit is 2 GiB)"}
    except Exception as error:  # A template is an untrusted program and may raise any exception.
        answer = {"failed" if is_compiled else "unusable": shorten(str(error), 200)}
    yield AnswerPart(answer)


if __name__ == "__main__":
    serve_requests(_answer_request)

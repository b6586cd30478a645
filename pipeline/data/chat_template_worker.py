"""Render chat templates in a process of their own: `python -m pipeline.data.chat_template_worker`.

A template is a foreign program. Jinja's sandbox keeps it from files and from Python's internals; this module also keeps
it from everything whose text changes from one call to the next, because shards that are made again must be the same:

- the filters `random` and `pprint`, the function `lipsum`, and any clock;
- the text of functions and iterators, which is an address in memory;
- sets, which have no order.

The process bounds what a template can take: its output here, processor time and memory in pipeline/run/worker.py.
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
"""Around marked text: characters that Unicode reserves for programs."""
MOST_CHARACTERS = 1 << 24
"""Of the text of one dialogue. A longer one is an error of this dialogue."""
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
_CHANGING_FILTERS = ("random", "pprint")
"""`pprint` sorts what has no order by addresses."""
_CHANGING_FUNCTIONS = ("lipsum", "strftime_now", "now")
_WAY_OUT = "set data.chat_template to a copy without it, or to a template that comes with Sluice"


class _ChangingTextError(Exception):
    """A template uses something whose text is not the same in each call."""


class _NoText:
    """What may be used, but not written."""

    def __repr__(self) -> str:
        raise _ChangingTextError(
            "it writes a function or an iterator, whose text is an address in memory and changes from one process to "
            "the next: call the function, or put |list behind the iterator"
        )

    def __format__(self, specification: str) -> str:
        return repr(self)


class _Function(_NoText):
    """A function or method."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._function(*arguments, **options)


class _Iterator(_NoText):
    """What a filter such as `map` returns."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)


class _Cycler(_NoText, Cycler):
    """Jinja's own."""


class _Joiner(_NoText, Joiner):
    """Jinja's own."""


def _stable(value: Any) -> Any:
    """The value; if its text would be an address, one that has no text. Raises _ChangingTextError for a set."""
    if isinstance(value, set | frozenset):
        raise _ChangingTextError("it makes a set, which has no order: use a list")
    if isinstance(value, _FUNCTIONS):
        return _Function(value)
    if isinstance(value, Iterator) and not isinstance(value, LoopContext | _NoText):
        return _Iterator(value)
    return value


class _Undefined(Undefined):
    """A name that is not there. A template may ask whether it is."""

    def _fail_with_undefined_error(self, *arguments: Any, **options: Any) -> NoReturn:
        if self._undefined_name in _CHANGING_FUNCTIONS:
            raise _ChangingTextError(
                f"it calls {self._undefined_name}, which is not there because the text would change from one call to "
                f"the next: {_WAY_OUT}"
            )
        super()._fail_with_undefined_error(*arguments, **options)


class _Generation(Extension):
    """The tag `{% generation %} … {% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{MARKS[0]}{caller()}{MARKS[1]}"


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with nothing in it that changes."""

    intercepted_binops = frozenset(["-"])
    """The difference of two dictionaries' keys is a set."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], undefined=_Undefined
        )
        for name in _CHANGING_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _to_json
        self.filters = {name: _stable_filter(function) for name, function in self.filters.items()}
        more = {"cycler": _Cycler, "joiner": _Joiner, "raise_exception": _raise_exception}
        del self.globals["lipsum"]
        self.globals = {name: _stable(value) for name, value in {**self.globals, **more}.items()}

    def getattr(self, obj: Any, attribute: str) -> Any:
        return _stable(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return _stable(super().getitem(obj, argument))

    def call(__self, __context: Any, __obj: Any, *arguments: Any, **options: Any) -> Any:
        return _stable(super().call(__context, __obj, *arguments, **options))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        return _stable(super().call_binop(context, operator, left, right))


def _stable_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # with what Jinja notes on a filter: which arguments it wants to be given
    def filtered(*arguments: Any, **options: Any) -> Any:
        return _stable(function(*arguments, **options))

    return filtered


def _to_json(value: Any, indent: int | None = None) -> str:
    """Replace Jinja's filter of this name, which escapes HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


@lru_cache(maxsize=4)
def _compile(source: str) -> Template:
    """Raises jinja2.TemplateError if it is no template, _ChangingTextError for a filter that is not there."""
    environment = _Environment()
    for node in environment.parse(source).find_all(nodes.Filter):
        if node.name in _CHANGING_FILTERS:
            raise _ChangingTextError(
                f"line {node.lineno} uses the filter {node.name}, whose text changes from one call to the next: "
                f"{_WAY_OUT}"
            )
    return environment.from_string(source)


def _render(template: Template, values: Mapping[str, Any]) -> str:
    """Raises TemplateError for a text that no document can have."""
    parts, length = [], 0
    for part in template.generate(values):
        parts.append(part)
        if (length := length + len(part)) > MOST_CHARACTERS:
            raise TemplateError(f"it writes more than {MOST_CHARACTERS:,} characters")
    text = "".join(parts)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TemplateError("it writes a lone surrogate") from None
    return text


def _answer(request: Mapping[str, Any]) -> Iterable[AnswerPart]:
    """The texts of the beginnings of a dialogue, or why there are none."""
    found: dict[str, Any]
    is_compiled = False
    try:
        template = _compile(request["source"])
        is_compiled = True
        texts, messages = [], request["messages"]
        for count, add_generation_prompt in request["beginnings"]:
            values = {"messages": messages[:count], "add_generation_prompt": add_generation_prompt}
            texts.append(_render(template, {**request["tokens"], **values, "tools": None, "documents": None}))
        found = {"texts": texts}
    except _ChangingTextError as error:
        found = {"unusable": str(error)}
    except MemoryError:
        found = {"unusable": "it needs too much memory for one dialogue (2 GiB are the limit)"}
    except Exception as error:  # a template is a foreign program and may raise anything
        found = {"failed" if is_compiled else "unusable": shorten(str(error), 200)}
    yield AnswerPart(found)


if __name__ == "__main__":
    serve_requests(_answer)

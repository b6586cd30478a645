"""Tasks of an evaluation as files: jsonl, one item a line. The login node checks them, so nothing here is heavy.

    {"prompt": "The capital of France is", "choices": ["Rome", "Paris"], "answer": 1}     multiple choice
    {"prompt": "Q: 3 + 4?\\nA:", "answer": "7"}                                           a free answer

All lines of a file are of one kind. A blank stands between a prompt and a choice, unless the prompt ends with one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.base.errors import UserError
from pipeline.base.files import open_regular_file, parse_json_or_none

LINE_FORMATS = '{"prompt": text, "choices": [two texts or more], "answer": number} or {"prompt": text, "answer": text}'


@dataclass(frozen=True)
class Item:
    """A question. `choices` is empty where the answer is free."""

    prompt: str
    choices: tuple[str, ...]
    right: int
    """Which choice is right; means nothing of a free answer."""
    answer: str
    """The right one."""


def derive_task_names(files: Sequence[Path]) -> list[str]:
    """How figures of each file begin: its name without its ending. Raises UserError where two are alike."""
    found = [file.stem for file in files]
    if twins := [name for name in found if found.count(name) > 1]:
        raise UserError(f"evaluate.tasks: two files are called {twins[0]}, and figures have their names: rename one")
    return found


def read_task_file(file: Path) -> list[Item]:
    """The items of a file. Raises UserError naming file and line of what is none."""
    try:
        with open_regular_file(file) as stream:
            items = [
                _item(parse_json_or_none(line), f"{file}:{number}")
                for number, line in enumerate(stream, 1)
                if line.strip()
            ]
    except OSError as error:
        raise UserError(f"evaluate.tasks: cannot read {file}: {error.strerror}") from error
    if not items:
        raise UserError(f"evaluate.tasks: {file} has no items; a line is {LINE_FORMATS}")
    if len({bool(item.choices) for item in items}) > 1:
        raise UserError(f"evaluate.tasks: {file} has items with and without choices: make two files of it")
    return items


def _item(value: Any, where: str) -> Item:
    known = {"prompt", "choices", "answer"}
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
        raise UserError(f"evaluate.tasks: {where}: a line is {LINE_FORMATS}")
    if odd := value.keys() - known:
        raise UserError(f"evaluate.tasks: {where}: there is no key {min(odd)}; a line is {LINE_FORMATS}")
    choices, answer = value.get("choices"), value.get("answer")
    if choices is None:
        if not isinstance(answer, str) or not answer.strip():
            raise UserError(f"evaluate.tasks: {where}: answer should be a text; a line is {LINE_FORMATS}")
        return Item(value["prompt"], (), 0, answer.strip())
    texts = isinstance(choices, list) and len(choices) > 1 and all(isinstance(one, str) and one for one in choices)
    if not texts:
        raise UserError(f"evaluate.tasks: {where}: choices should be a list of two texts or more")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise UserError(f"evaluate.tasks: {where}: answer should be the number of a choice, 0 to {len(choices) - 1}")
    return Item(value["prompt"], tuple(choices), answer, choices[answer])

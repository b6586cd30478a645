"""Read and check task files: JSON Lines files with one item (question) per line.

    {"prompt": "The capital of France is", "choices": ["Rome", "Paris"], "answer": 1}     multiple choice
    {"prompt": "Q: 3 + 4?\\nA:", "answer": "7"}                                           a free answer

All lines of a file have the same form. Prompt and choice are separated by a space, unless the prompt ends with white
space. This module does not import torch, because the login node checks task files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.base.errors import UserError
from pipeline.base.files import open_regular_file, parse_json_or_none

_LINE_FORMATS = '{"prompt": text, "choices": [two texts or more], "answer": number} or {"prompt": text, "answer": text}'
"""The two forms of a line, for error messages."""


@dataclass(frozen=True)
class TaskItem:
    """A question of a task file."""

    prompt: str
    choices: tuple[str, ...]
    """The choices; empty if the answer is free text."""
    correct_choice: int
    """Index of the correct choice; 0 and unused if the answer is free text."""
    answer: str
    """Text of the correct answer."""


def derive_task_names(files: Sequence[Path]) -> list[str]:
    """Return the names of the tasks, which are the file names without suffix. Raises UserError if two are equal."""
    names = [file.stem for file in files]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise UserError(
            "evaluate.duplicate_task",
            f"evaluate.tasks: two files have the name {duplicates[0]}, so their metrics would collide: rename one file",
        )
    return names


def read_task_file(file: Path) -> list[TaskItem]:
    """Return the items of a task file.

    Raises UserError if the file cannot be read, has no items, has items of both forms, or has a malformed line. The
    message names the file and the line.
    """
    try:
        with open_regular_file(file) as stream:
            items = [
                _parse_item(parse_json_or_none(line), f"{file}:{number}")
                for number, line in enumerate(stream, 1)
                if line.strip()
            ]
    except OSError as error:
        raise UserError("evaluate.unreadable_task", f"evaluate.tasks: cannot read {file}: {error.strerror}") from error
    if not items:
        raise UserError("evaluate.empty_task", f"evaluate.tasks: {file} has no items; a line is {_LINE_FORMATS}")
    if len({bool(item.choices) for item in items}) > 1:
        message = f"evaluate.tasks: {file} has items with and without choices: split it into two files"
        raise UserError("evaluate.mixed_task", message)
    return items


def _parse_item(value: Any, location: str) -> TaskItem:
    """Return the item in a line.

    Args:
        value: the JSON value of the line; None if the line is not valid JSON.
        location: the file and number of the line, for error messages.

    Raises:
        UserError: if the line is malformed.
    """

    def make_error(problem: str) -> UserError:
        """Return an error with the location of the line."""
        return UserError("evaluate.malformed_item", f"evaluate.tasks: {location}: {problem}")

    keys = {"prompt", "choices", "answer"}
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
        raise make_error(f"a line is {_LINE_FORMATS}")
    if unknown_keys := value.keys() - keys:
        raise make_error(f"unknown key {min(unknown_keys)}; a line is {_LINE_FORMATS}")
    choices = value.get("choices")
    answer = value.get("answer")
    if choices is None:
        if not isinstance(answer, str) or not answer.strip():
            raise make_error(f"answer must be a text that is not blank; a line is {_LINE_FORMATS}")
        return TaskItem(value["prompt"], (), 0, answer.strip())
    has_texts = isinstance(choices, list) and all(isinstance(choice, str) and choice for choice in choices)
    if not has_texts or len(choices) < 2:
        raise make_error("choices must be a list of two or more texts that are not empty")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise make_error(f"answer must be the number of a choice, 0 to {len(choices) - 1}")
    return TaskItem(value["prompt"], tuple(choices), answer, choices[answer])

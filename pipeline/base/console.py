"""Print plain text to a terminal, because paths, configs and events may contain rich markup or control characters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from pipeline.base.errors import make_printable


class PlainConsole(Console):
    """A rich console without markup, emoji and control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of rich, with `?` in place of control characters in text. Control codes of rich remain."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=make_printable(segment.text))


def supports_live_output(console: Console) -> bool:
    """Return whether lines of the output can be overwritten. They cannot in a pipe or with TERM=dumb."""
    return console.is_terminal and not console.is_dumb_terminal

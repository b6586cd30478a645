"""The terminal as everything that is shown meets it: as text. What stands in other people's paths, configs and events
is neither markup of rich nor a command to the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from pipeline.base.errors import make_printable


class PlainConsole(Console):
    """rich's console without markup, emoji and control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What rich makes of something, control characters shown as `?`; its own, which move a live table, stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=make_printable(segment.text))


def supports_live_output(console: Console) -> bool:
    """Whether lines can be overwritten: not in a pipe, nor with TERM=dumb, where rich shows nothing live."""
    return console.is_terminal and not console.is_dumb_terminal

"""`report.html`: one file that needs nothing else. A summary first, then pictures, then the tables of the terminal.

Light or dark as the reader's system is; on a phone the pictures stand below each other, and text keeps its size. The
script only tells the values under the pointer: without it everything is there. Whatever comes from a run is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from pipeline.base.errors import printable
from pipeline.base.plot import COLOURS
from pipeline.run.code import CODE_ROOT

_TEMPLATES = CODE_ROOT / "slurm/templates"


def table(cells: Sequence[Sequence[str]]) -> str:
    """Cells, the first row being the header; "" where there is none."""
    if not cells:
        return ""
    tags = ["th"] + ["td"] * (len(cells) - 1)
    rows = ("".join(f"<{t}>{escape(cell)}</{t}>" for cell in row) for t, row in zip(tags, cells, strict=True))
    return f'<div class="table"><table><tr>{"</tr><tr>".join(rows)}</tr></table></div>'


def page(
    name: str,
    title: str,
    summary: Mapping[str, str],
    sections: Mapping[str, Sequence[str]],
    told: Sequence[str],
    config: str,
) -> str:
    """The whole document. `title`: what the run is besides its name. `sections`: figures and tables by heading; `told`:
    what is to be said besides, in words."""
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in summary.items() if words)
    shown = ""
    for heading, parts in sections.items():
        pictures = "".join(part for part in parts if part.startswith("<figure"))
        tables = "".join(part for part in parts if not part.startswith("<figure"))
        grid = f'<div class="grid">{pictures}</div>' if pictures else ""
        shown += f"<h2>{escape(heading)}</h2>{grid}{tables}" if pictures or tables else ""
    words = "".join(f"<p>{escape(line)}</p>" for line in told)
    colours = "".join(f".c{number}{{--c:{colour}}}" for number, colour in enumerate(COLOURS))
    style, script = ((_TEMPLATES / f"report.{kind}").read_text() for kind in ("css", "js"))
    return printable(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{colours}{style}</style></head>'
        f"<body><h1>{escape(name)}</h1><p>{escape(title)}</p><dl>{facts}</dl>{shown}{words}"
        f"<details><summary>The config</summary><pre>{escape(config)}</pre></details>"
        f"<script>{script}</script></body></html>\n"
    )

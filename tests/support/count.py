"""Lines of code of the product by folder: without docstrings (those under fields, too), comments and blank lines.

python -m tests.support.count
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(text: str) -> int:
    """Lines with code in Python source."""
    documentation = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    spans = (range(t.start[0], t.end[0] + 1) for t in tokens if t.type not in _NO_CODE)
    return len({line for span in spans for line in span} - documentation)


def main() -> None:
    """Print the table."""
    files = [
        ROOT / "submit.py",
        *(
            p
            for name in ("cli", "slurm", "tracking", "planning", "pipeline", "data_prep")
            for p in (ROOT / name).rglob("*.py")
        ),
    ]
    lines = {path: code_lines(path.read_text()) for path in files}
    rooms: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for path, count in lines.items():
        room = path.parent.relative_to(ROOT).as_posix() if path.parent != ROOT else path.name
        rooms[room] += count
        number[room] += 1
    for room in sorted(rooms):
        print(f"{rooms[room]:6} in {number[room]:3} files  {room}")
    print(f"{sum(rooms.values()):6} in {len(lines):3} files")


if __name__ == "__main__":
    main()

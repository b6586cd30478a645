"""Count the lines of code and the files of each package, the config keys and the commands.

    python -m tests.support.count

Docstrings, the strings below fields, comments and blank lines are not counted as lines of code.
"""

from __future__ import annotations

import ast
import io
import json
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cli.main import COMMANDS
from tests.architecture.imports import ALLOWED_IMPORTS

ROOT = Path(__file__).resolve().parents[2]
NOT_CODE_TOKENS = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def count_code_lines(source: str) -> int:
    """Return the number of lines of Python source that contain code."""
    docstring_lines = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    spans = (range(token.start[0], token.end[0] + 1) for token in tokens if token.type not in NOT_CODE_TOKENS)
    return len({line for span in spans for line in span} - docstring_lines)


def iter_config_keys(schema: Mapping[str, Any], node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of each config key below `node` of the JSON Schema `schema`. Sections are not yielded."""
    for name, field in node.get("properties", {}).items():
        branches = [field, *field.get("anyOf", ()), *field.get("allOf", ())]
        references = [branch["$ref"].rpartition("/")[2] for branch in branches if "$ref" in branch]
        sections = [schema["$defs"][name] for name in references if "properties" in schema["$defs"][name]]
        if not sections:
            yield prefix + name
        for section in sections:
            yield from iter_config_keys(schema, section, f"{prefix}{name}.")


def main() -> None:
    """Print lines and files by package, then the totals, the config keys and the commands."""
    paths = [ROOT / "submit.py", *(path for name in ALLOWED_IMPORTS for path in (ROOT / name).rglob("*.py"))]
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in paths:
        package = path.parent.relative_to(ROOT).as_posix() if path.parent != ROOT else path.name
        lines[package] += count_code_lines(path.read_text())
        files[package] += 1
    for package in sorted(lines):
        print(f"{lines[package]:6} lines in {files[package]:3} files  {package}")
    schema = json.loads((ROOT / "configs/schema.json").read_text())
    print(f"{lines.total():6} lines in {files.total():3} files")
    print(f"{len(set(iter_config_keys(schema, schema))):6} config keys")
    print(f"{len(COMMANDS):6} commands: {' '.join(COMMANDS)}")


if __name__ == "__main__":
    main()

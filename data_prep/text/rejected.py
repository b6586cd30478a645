"""`rejected.jsonl`: the documents that could not be read, by file and line, as an editor counts them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from data_prep.text.units import Plan
from pipeline.base.errors import UserError
from pipeline.base.files import write_atomic

Unit = tuple[Sequence[int], Sequence[tuple[int, int, str]]]
"""Lines that start in each of its pieces; of each document that could not be read piece, line within it and reason."""
_ALWAYS_ALLOWED = 5
"""As many unreadable documents are accepted on small inputs, if at least half of all documents can be read."""


def allowed_rejections(limit: float, total: int) -> float:
    """Return how many of `total` documents may be unreadable: the fraction `limit`, and on small inputs a few.

    `limit` 0 allows none.
    """
    return max(limit * total, min(_ALWAYS_ALLOWED, total / 2)) if limit else 0


def list_rejected(listing: Path, plan: Plan, units: Sequence[Unit], documents: int, limit: float) -> None:
    """Write `rejected.jsonl`: file, line (from 1; parquet: row) and reason.

    documents: those that can be read. Raises UserError if more than `allowed_rejections` cannot.
    """
    before = [0] * len(plan.inputs)  # lines of each input in the pieces so far: units and pieces are in its order
    rows: list[dict[str, str | int]] = []
    for (lines, rejected), pieces in zip(units, plan.units, strict=True):
        starts = []
        for piece, count in zip(pieces, lines, strict=True):
            starts.append(before[piece.input])
            before[piece.input] += count
        for place, line, reason in rejected:
            path = plan.inputs[pieces[place].input].path
            rows.append({"file": path, "line": starts[place] + line, "reason": reason})
    write_atomic(listing, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    total = documents + len(rows)
    if len(rows) > allowed_rejections(limit, total):
        first = rows[0]
        raise UserError(
            f"{len(rows)} of {total} documents ({len(rows) / total:.2%}) cannot be read, more than "
            f"data.max_rejected ({limit:.2%}) allows; the first is {first['file']} line "
            f"{first['line']}: {first['reason']}; all are in {listing}. Mend or remove them, or raise "
            "data.max_rejected"
        )

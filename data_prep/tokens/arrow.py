"""Arrow files, as Hugging Face's `datasets` leaves them on disk: streams (or files) of record batches.

A row is a document: its list of ids in `input_ids` (or `tokens`). Texts in them are a format of
data_prep/inputs/sources.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from data_prep.inputs.row_files import arrow_batches
from data_prep.tokens.token_file import Ids, TokenFile
from pipeline.base.errors import UserError

NAMES = ("input_ids", "tokens")


def fits(path: str, head: bytes) -> bool:
    """Whether it has the mark of a file, or of a stream's first message."""
    return head.startswith((b"ARROW1", b"\xff\xff\xff\xff"))


def look(path: str) -> TokenFile:
    """Read the schema. Raises UserError where no column holds ids."""
    import pyarrow

    schema, _ = arrow_batches(path)
    for name in NAMES:
        kind = schema.field(name).type if name in schema.names else pyarrow.null()
        types = pyarrow.types
        lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        if any(test(kind) for test in lists) and pyarrow.types.is_integer(kind.value_type):
            return TokenFile(path, "Arrow", str(kind.value_type), rows=partial(_rows, path, name))
    raise UserError(
        f"{path}: no column {' or '.join(NAMES)} with lists of integers; there are {schema.names}. Where it is text, "
        "name it in data.source of a run, with data.text_field"
    )


def _rows(path: str, name: str) -> Iterator[Ids]:
    for batch in arrow_batches(path)[1]:
        column = batch.column(batch.schema.names.index(name))
        values, lengths = column.flatten(), column.value_lengths()
        if column.null_count or values.null_count:
            raise UserError(f"{path}: a row of {name} is null: filter it out")
        ids, ends = np.asarray(values), np.cumsum(lengths)
        yield from (ids[start:end] for start, end in pairwise([0, *ends.tolist()]))

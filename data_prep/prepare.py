"""Stage prepare: fix the tokenizer and the work units before anything is sharded (one process).

For a model of the user's own: list and look at the files of its arrays.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping

from data_prep import arrays
from data_prep.text.state import prepare_missing
from pipeline.base.errors import Exit
from pipeline.base.place import Place
from pipeline.base.signals import StopFlag
from pipeline.run.directory import Run
from pipeline.run.stages import Progress


def missing(run: Run) -> str | None:
    """Why prepare is not done; None when tokenizer and units validate."""
    if run.user_model is not None:
        return arrays.prepare_missing(run.config.data, run.user_model, run.data, run.code / "data_prep")
    return prepare_missing(run.config.data, run.data, run.code / "data_prep")


def progress(run: Run) -> Progress:
    """How far it is."""
    what = "tokenizer and work units" if run.user_model is None else "files of samples"
    return Progress(f"{what} fixed" if missing(run) is None else "-")


def main(run: Run, place: Place, options: Mapping[str, str], flag: StopFlag) -> Exit:
    """Train or read the tokenizer and cut the source into work units; ranks beyond the first have nothing to do."""
    from data_prep.text.prepare_text import prepare

    gc.enable()
    flag.leave_at_once()
    if place.rank > 0:
        return Exit.DONE

    def log(text: str) -> None:
        print(text, flush=True)

    if run.user_model is not None:
        arrays.prepare(run.config.data, run.user_model, run.data, log)
    else:
        prepare(run.config.data, run.data, log)
    return Exit.DONE

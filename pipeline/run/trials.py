"""The record of a search: the trials so far, their values, and the step to which each trial trains next.

The record is `search/study.json` in the directory of the sweep. pipeline/search/study.py writes it; this module reads
it, because the config of a trial and the end of its training follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.base.errors import InputError
from pipeline.base.files import read_json, write_json
from pipeline.run.lines import has_fields, is_count, is_mapping, is_number, is_text

STUDY_FILE = "search/study.json"
"""The path of the record, relative to the directory of the sweep."""


@dataclass(frozen=True)
class Result:
    """The result of a trial at a rung."""

    value: float | None
    """The metric of the search; None if the trial has failed."""
    is_final: bool = False
    """Whether a callback completed the trial before the rung, so that the trial cannot continue."""
    message: str = ""
    """Why the trial has failed; "" if it has not."""


@dataclass(frozen=True)
class Trial:
    """A trial of a search. Its number is its position in the study, and the name of its directory."""

    parameters: Mapping[str, Any]
    """The value of each varied key, by dotted key."""
    rung: int = 0
    """The index of the rung to which the trial trains, or has trained."""
    results: Mapping[int, Result] = field(default_factory=dict)
    """The results so far, by index of the rung."""

    @property
    def result(self) -> Result | None:
        """The result at `rung`; None if the trial has not reached this rung yet."""
        return self.results.get(self.rung)

    @property
    def has_failed(self) -> bool:
        """Whether the trial has failed. It is not trained again."""
        return self.result is not None and self.result.value is None


@dataclass(frozen=True)
class Study:
    """The state of a search after its latest decision."""

    rungs: tuple[int, ...] = ()
    """The steps of the rungs, ascending; empty before the first decision."""
    trials: tuple[Trial, ...] = ()
    """The trials in the order in which they were sampled."""
    is_finished: bool = False
    """Whether no trial will be added and no trial will continue."""

    def get_pause_step(self, number: int) -> int | None:
        """Return the step at which a trial pauses; None if it trains to the last step."""
        rung = self.trials[number].rung
        return None if rung == len(self.rungs) - 1 else self.rungs[rung]

    def find_best(self) -> int | None:
        """Return the number of the best trial: of those at the highest rung, the one with the lowest value.

        Failed trials are left out. Return None if no other trial has a value yet.
        """
        values = [
            (-rung, result.value, number)
            for number, trial in enumerate(self.trials)
            for rung, result in trial.results.items()
            if result.value is not None and not trial.has_failed
        ]
        return min(values)[2] if values else None


def read_study(sweep_dir: Path) -> Study:
    """Return the study of the sweep in `sweep_dir`; an empty study before the first decision.

    Raises InputError if the record is damaged.
    """
    path = sweep_dir / STUDY_FILE
    try:
        content = read_json(path)
    except FileNotFoundError:
        return Study()
    except ValueError:
        content = None
    try:
        trials = tuple(_parse_trial(trial) for trial in content["trials"])
        return Study(tuple(content["rungs"]), trials, content["is_finished"] is True)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError("search.damaged_study", f"{path} is damaged: restore it, or start a new run") from error


def _parse_trial(content: Any) -> Trial:
    """Return a trial from its JSON values. Raises ValueError if they are malformed."""
    if not has_fields(content, {"parameters": is_mapping, "rung": is_count, "results": is_mapping}, {}):
        raise ValueError("a trial is malformed")
    results = {}
    for rung, result in content["results"].items():
        if not has_fields(result, {}, {"value": is_number, "message": is_text}):
            raise ValueError("a result is malformed")
        results[int(rung)] = Result(result.get("value"), result.get("is_final") is True, result.get("message", ""))
    return Trial(content["parameters"], content["rung"], results)


def write_study(sweep_dir: Path, study: Study) -> None:
    """Write the record of a study, atomically."""
    path = sweep_dir / STUDY_FILE
    path.parent.mkdir(exist_ok=True)
    trials = []
    for trial in study.trials:
        results: dict[str, dict[str, Any]] = {}
        for rung, result in sorted(trial.results.items()):
            values = {"value": result.value, "is_final": result.is_final or None, "message": result.message or None}
            results[str(rung)] = {key: value for key, value in values.items() if value is not None}
        trials.append({"parameters": dict(trial.parameters), "rung": trial.rung, "results": results})
    write_json(path, {"rungs": list(study.rungs), "is_finished": study.is_finished, "trials": trials})

"""Sample the parameters of trials with Optuna, and write the study in Optuna's format.

Optuna keeps no state between two calls. Each trial is sampled from an in-memory study with the trials before it, by a
sampler whose seed depends only on the seed of the sweep and on the number of the trial. A repeated call therefore
returns the same parameters.

Optuna is imported only here and only in functions, because it is an optional package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.base.errors import ConfigError, UserError
from pipeline.base.files import replace_atomically
from pipeline.config.read import make_point_configs
from pipeline.config.search import Distribution, SearchConfig, round_value
from pipeline.config.sections import Config
from pipeline.run.trials import Study, Trial

JOURNAL_FILE = "search/journal.log"
"""The path of Optuna's journal, relative to the directory of the sweep."""
MAX_ATTEMPTS = 100
"""How often the parameters of a trial are sampled until they give a valid config."""


def check_optuna() -> None:
    """Raise UserError if Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise UserError(
            "search.optuna_missing",
            "sweep.search needs the package optuna, which is not installed: pip install 'sluice[optuna]', or use "
            "sweep.random",
        )


def sample_parameters(config: Config, search: SearchConfig, seed: int, trials: Sequence[Trial]) -> dict[str, Any]:
    """Return the parameters of the next trial, by dotted key.

    Parameters that give an invalid config are sampled again with another seed.

    Args:
        config: the config of the sweep.
        search: its section `sweep.search`.
        seed: the seed of the search.
        trials: all earlier trials, with their results so far.

    Raises:
        UserError: if Optuna is not installed, or no valid parameters are found.
    """
    check_optuna()
    for attempt in range(MAX_ATTEMPTS):
        digest = hashlib.sha256(f"{seed} {len(trials)} {attempt}".encode()).digest()
        parameters = _sample_once(search, int.from_bytes(digest[:4], "big"), trials)
        try:
            make_point_configs(config, [parameters])
        except ConfigError as error:
            last_error = error
        else:
            return parameters
    raise UserError(
        "search.no_valid_parameters",
        f"sweep.search.space: {MAX_ATTEMPTS} samples in a row gave an invalid config: use other values. The last error "
        f"is: {last_error}",
    )


def _sample_once(search: SearchConfig, seed: int, trials: Sequence[Trial]) -> dict[str, Any]:
    """Return the parameters of the next trial, which may give an invalid config. The arguments are as above."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler: Any = optuna.samplers.RandomSampler(seed=seed)
        if search.optuna.sampler == "tpe":
            # With `constant_liar`, trials without a value count as bad ones, so that trials that run at the same time
            # differ more.
            sampler = optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=search.optuna.startup_trials, constant_liar=True
            )
        study = optuna.create_study(sampler=sampler)
    distributions = _make_distributions(search)
    for trial in trials:
        study.add_trial(_make_trial(trial, distributions, rungs=None))
    values = study.ask(distributions).params
    parameters = {}
    for key, distribution in search.space.items():
        value = values[key]
        parameters[key] = round_value(distribution, value) if isinstance(distribution, Distribution) else value
    return parameters


def write_journal(sweep_dir: Path, search: SearchConfig, study: Study) -> None:
    """Write the study into Optuna's journal file, replacing an older file. Raises UserError without Optuna."""
    check_optuna()
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = _make_distributions(search)
    with replace_atomically(sweep_dir / JOURNAL_FILE) as path, warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        backend = JournalFileBackend(str(path), JournalFileOpenLock(str(path)))
        journal = optuna.create_study(storage=JournalStorage(backend), study_name=sweep_dir.name)
        for trial in study.trials:
            journal.add_trial(_make_trial(trial, distributions, study.rungs, is_finished=study.is_finished))


def _make_distributions(search: SearchConfig) -> dict[str, Any]:
    """Return Optuna's distribution of each key."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    distributions: dict[str, Any] = {}
    for key, values in search.space.items():
        if not isinstance(values, Distribution):
            distributions[key] = CategoricalDistribution(values)
        elif values.type == "int":
            distributions[key] = IntDistribution(int(values.low), int(values.high), log=values.scale == "log")
        else:
            distributions[key] = FloatDistribution(values.low, values.high, log=values.scale == "log")
    return distributions


def _make_trial(
    trial: Trial, distributions: Mapping[str, Any], rungs: Sequence[int] | None, *, is_finished: bool = False
) -> Any:
    """Return a trial in Optuna's form.

    Args:
        trial: the trial.
        distributions: Optuna's distribution of each key.
        rungs: the steps of the rungs for the journal. A paused trial is then RUNNING until the search is finished. None
            for the study from which a trial is sampled. Each trial with a value then is PRUNED, because Optuna's
            sampler ranks pruned trials by their last rung and their value there, and ignores values of running trials.
        is_finished: whether the search is finished.
    """
    from optuna.trial import TrialState, create_trial

    values = {rung: result.value for rung, result in sorted(trial.results.items()) if result.value is not None}
    steps = {rung if rungs is None else rungs[rung]: value for rung, value in values.items()}
    is_complete = False
    if rungs is not None and trial.result is not None:
        is_complete = trial.result.is_final or trial.rung == len(rungs) - 1
    value = None
    state = TrialState.RUNNING
    if trial.has_failed and rungs is None:
        # The sampler ignores failed trials, and a pruned trial without a value is the worst one.
        state = TrialState.PRUNED
        steps = {}
    elif trial.has_failed:
        state = TrialState.FAIL
    elif is_complete:
        state = TrialState.COMPLETE
        value = values[trial.rung]
    elif steps and (rungs is None or is_finished):
        state = TrialState.PRUNED
    return create_trial(
        state=state,
        value=value,
        params={key: trial.parameters[key] for key in distributions},
        distributions=dict(distributions),
        intermediate_values=steps,
    )

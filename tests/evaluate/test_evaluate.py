"""Tests of evaluating checkpoints: the results are correct, and bit-identical on any number of ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.checkpoint.catalog import checkpoint_name, list_checkpoint_steps
from pipeline.evaluate.evaluate_stage import select_steps
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from tests.support.errors import raises_error
from tests.support.ranks import run_ranks
from tests.support.tiny import make_run, run_stage_on_rank


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run whose train stage is done after 21 steps."""
    run = make_run(tmp_path_factory.mktemp("trained"), overrides=("train.steps=21",))
    assert set(run_ranks(2, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    return run


def evaluate(run: Run, ranks: int, step: str | None = None) -> dict[str, Any]:
    """Remove all results, evaluate on `ranks` ranks and return the result of the newest evaluated step.

    `step` is the option --step of the evaluate stage.
    """
    for old_result in run.evaluation_dir.iterdir():
        old_result.unlink()
    options = {"step": step} if step else {}
    assert set(run_ranks(ranks, run_stage_on_rank, run.path, "evaluate", options)) == {ExitCode.DONE}
    newest_result = sorted(run.evaluation_dir.iterdir())[-1]
    return dict(json.loads(newest_result.read_text()))


def compute_reference_on_rank(rank_info: RankInfo, path: Path) -> tuple[float, int, float]:
    """Evaluate the newest checkpoint of the run at `path`, one window of held-out text after another.

    Return the summed loss of all tokens, the number of tokens, and the unigram entropy of all tokens in bits.
    """
    import torch

    from pipeline.checkpoint.checkpointer import load_checkpoint
    from pipeline.data.manifest import load_manifest
    from pipeline.model.decoder import Decoder

    run = Run.open(path)
    config = run.config
    manifest = load_manifest(run.data_dir)
    model = Decoder(config.model, manifest.vocab_size, config.data.sequence_length).eval()
    weights = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    newest_step = list_checkpoint_steps(run.checkpoints_dir)[0]
    load_checkpoint(weights, run.checkpoints_dir / checkpoint_name(newest_step), None)
    total_loss = 0.0
    token_count = 0
    all_tokens = []
    for shard in manifest.held_out:
        tokens = np.fromfile(run.data_dir / shard.file, shard.dtype, shard.tokens, offset=shard.offset).astype(np.int64)
        stream = torch.from_numpy(np.concatenate([[manifest.eos_id], tokens]))
        all_tokens.append(tokens)
        length = config.data.sequence_length
        for start in range(0, len(tokens), length):
            window = stream[start : start + length + 1]
            with torch.no_grad():
                logits = model(window[None, :-1])[0]
            total_loss += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
            token_count += len(window) - 1
    frequencies = np.unique(np.concatenate(all_tokens), return_counts=True)[1] / token_count
    return total_loss, token_count, float(-(frequencies * np.log2(frequencies)).sum() * token_count)


def test_the_result_equals_the_reference_on_any_number_of_ranks(trained_run: Run) -> None:
    from pipeline.data.manifest import load_manifest

    results = [evaluate(trained_run, ranks) for ranks in (1, 2, 3, 4)]
    assert all(result == results[0] for result in results[1:]), "the results must be bit-identical"
    total_loss, token_count, unigram_bits = run_ranks(1, compute_reference_on_rank, trained_run.path)[0]
    result = results[0]
    assert result["tokens"] == token_count and result["step"] == 21
    assert result["loss"] == pytest.approx(total_loss / token_count, rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(total_loss / token_count), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(total_loss / math.log(2) / result["bytes"], rel=1e-6)
    assert result["unigram_bits_per_byte"] == pytest.approx(unigram_bits / result["bytes"], rel=1e-9)
    assert result["bytes"] == load_manifest(trained_run.data_dir).held_out_bytes


def evaluate_on_rank_with_logits_limit(rank_info: RankInfo, path: Path, window_count: int) -> int:
    """Evaluate with a limit for the logits of this many windows. Return the number of windows of the largest pass."""
    from pipeline.data.manifest import load_manifest
    from pipeline.evaluate import evaluator

    run = Run.open(path)
    largest_count = 0
    original_compute_sums = evaluator.TextHeldOut.compute_sums

    def record_size(self: Any, model: Any, start: int, stop: int) -> dict[str, float]:
        nonlocal largest_count
        largest_count = max(largest_count, stop - start)
        return original_compute_sums(self, model, start, stop)

    window_bytes = 4 * run.config.data.sequence_length * load_manifest(run.data_dir).vocab_size  # of fp32 logits
    evaluator.LOGITS_BYTES = window_count * window_bytes + 3  # three more bytes are too few for another window
    evaluator.TextHeldOut.compute_sums = record_size  # type: ignore[method-assign]
    assert run_stage_on_rank(rank_info, path, "evaluate") == ExitCode.DONE
    return largest_count


# a forward pass has at least one window, and at most `evaluate.batch` windows (8 by default)
@pytest.mark.parametrize(("limit_windows", "expected_windows"), [(0, 1), (3, 3), (99, 8)])
def test_a_forward_pass_has_no_more_windows_than_the_logits_limit_allows(
    trained_run: Run, limit_windows: int, expected_windows: int
) -> None:
    expected = evaluate(trained_run, 1)
    (trained_run.evaluation_dir / f"{checkpoint_name(21)}.json").unlink()
    assert run_ranks(1, evaluate_on_rank_with_logits_limit, trained_run.path, limit_windows) == [expected_windows]
    result = json.loads((trained_run.evaluation_dir / f"{checkpoint_name(21)}.json").read_text())
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_evaluation_with_a_sharded_model_has_the_same_result(trained_run: Run) -> None:
    """On three ranks, some ranks have no batch left while the others still need their shards of the weights."""
    expected = evaluate(trained_run, 1)
    changes_before = trained_run.changes_file.read_bytes() if trained_run.changes_file.exists() else None
    trained_run.apply_overrides(["parallel.zero=3"])
    try:
        assert evaluate(trained_run, 3) == expected, "the results must be bit-identical"
    finally:
        if changes_before is None:
            trained_run.changes_file.unlink()
        else:
            trained_run.changes_file.write_bytes(changes_before)


def test_the_stage_evaluates_the_checkpoints_of_the_option_step(trained_run: Run) -> None:
    steps = sorted(list_checkpoint_steps(trained_run.checkpoints_dir))
    evaluate(trained_run, 2, "every")
    results = [path.name for path in sorted(trained_run.evaluation_dir.iterdir())]
    assert results == [f"{checkpoint_name(step)}.json" for step in steps]
    assert evaluate(trained_run, 1, str(steps[0]))["step"] == steps[0]
    assert load_stage_module(trained_run, "evaluate").describe_missing_outputs(trained_run) is not None, (
        "the newest checkpoint has no result"
    )
    assert evaluate(trained_run, 1)["step"] == steps[-1]
    assert load_stage_module(trained_run, "evaluate").describe_missing_outputs(trained_run) is None
    for invalid in ("²", "-1", ""):
        with raises_error("cli.invalid_value", f"--step {invalid}"):
            select_steps(trained_run, invalid)
    with raises_error("checkpoint.no_such_step", "--step 22"):
        select_steps(trained_run, "22")


def test_a_result_of_another_checkpoint_or_a_truncated_result_does_not_count(trained_run: Run) -> None:
    evaluate(trained_run, 1)
    path = trained_run.evaluation_dir / f"{checkpoint_name(21)}.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "checkpoint": "0" * 64}))
    assert load_stage_module(trained_run, "evaluate").describe_missing_outputs(trained_run) is not None
    path.write_text("{incomplete")
    assert load_stage_module(trained_run, "evaluate").describe_missing_outputs(trained_run) is not None

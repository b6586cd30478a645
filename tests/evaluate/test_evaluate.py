"""Evaluation: correct results, with the same bits on any number of ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode, UserError
from pipeline.checkpoint.catalog import checkpoint_name, list_checkpoint_steps
from pipeline.evaluate.evaluate_stage import select_steps
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from tests.support.ranks import run_ranks
from tests.support.tiny import make_run, stage_rank


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = make_run(tmp_path_factory.mktemp("trained"), overrides=("train.steps=21",))
    assert set(run_ranks(2, stage_rank, run.path, "train")) == {ExitCode.DONE}
    return run


def evaluate(run: Run, ranks: int, step: str | None = None) -> dict[str, Any]:
    """Remove all results, evaluate on so many ranks and return the result of the newest step."""
    for old in run.evaluation_dir.iterdir():
        old.unlink()
    options = {"step": step} if step else {}
    assert set(run_ranks(ranks, stage_rank, run.path, "evaluate", options)) == {ExitCode.DONE}
    newest = sorted(run.evaluation_dir.iterdir())[-1]
    return dict(json.loads(newest.read_text()))


def reference_rank(rank_info: RankInfo, path: Path) -> tuple[float, int, float]:
    """Return loss sum, tokens and unigram bits from straightforward code: one window at a time, one process."""
    import torch

    from pipeline.checkpoint.checkpointer import load_checkpoint
    from pipeline.data.manifest import load_manifest
    from pipeline.model.decoder import Decoder

    run = Run.open(path)
    config = run.config
    manifest = load_manifest(run.data_dir)
    model = Decoder(config.model, manifest.vocab_size, config.data.sequence_length).eval()
    weights = {f"model.{n}": p.detach() for n, p in model.named_parameters()}
    load_checkpoint(weights, run.checkpoints_dir / checkpoint_name(list_checkpoint_steps(run.checkpoints_dir)[0]), None)
    total = 0.0
    count = 0
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
            total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
            count += len(window) - 1
    counts = np.unique(np.concatenate(all_tokens), return_counts=True)[1] / count
    return total, count, float(-(counts * np.log2(counts)).sum() * count)


def test_the_result_is_correct_and_the_same_on_any_number_of_ranks(trained: Run) -> None:
    results = [evaluate(trained, ranks) for ranks in (1, 2, 3, 4)]
    assert all(result == results[0] for result in results[1:]), "the results must be bit-identical"
    total, count, unigram_bits = run_ranks(1, reference_rank, trained.path)[0]
    result = results[0]
    assert result["tokens"] == count and result["step"] == 21
    assert result["loss"] == pytest.approx(total / count, rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(total / math.log(2) / result["bytes"], rel=1e-6)
    assert result["unigram_bits_per_byte"] == pytest.approx(unigram_bits / result["bytes"], rel=1e-9)
    from pipeline.data.manifest import load_manifest

    assert result["bytes"] == load_manifest(trained.data_dir).held_out_bytes


def run_rank_with_logits_limit(rank_info: RankInfo, path: Path, windows: int) -> int:
    """Evaluate with a limit of the logits of so many windows; return the windows of the largest forward pass."""
    from pipeline.data.manifest import load_manifest
    from pipeline.evaluate import evaluator

    run = Run.open(path)
    largest = 0
    original = evaluator.TextHeldOut.compute_sums

    def record_size(self: Any, model: Any, start: int, stop: int) -> dict[str, float]:
        nonlocal largest
        largest = max(largest, stop - start)
        return original(self, model, start, stop)

    evaluator.LOGITS_BYTES = windows * 4 * run.config.data.sequence_length * load_manifest(run.data_dir).vocab_size + 3
    evaluator.TextHeldOut.compute_sums = record_size  # type: ignore[method-assign]
    assert stage_rank(rank_info, path, "evaluate") == ExitCode.DONE
    return largest


@pytest.mark.parametrize(("windows", "largest"), [(0, 1), (3, 3), (99, 8)])
def test_the_logits_limit_bounds_the_windows_of_a_forward_pass(trained: Run, windows: int, largest: int) -> None:
    expected = evaluate(trained, 1)
    (trained.evaluation_dir / f"{checkpoint_name(21)}.json").unlink()
    assert run_ranks(1, run_rank_with_logits_limit, trained.path, windows) == [largest]
    result = json.loads((trained.evaluation_dir / f"{checkpoint_name(21)}.json").read_text())
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_a_model_that_training_shards_is_sharded_in_evaluation(trained: Run) -> None:
    """On three ranks, some ranks have no batch left while others still need their shards of the weights."""
    expected = evaluate(trained, 1)
    before = trained.changes_file.read_bytes() if trained.changes_file.exists() else None
    trained.apply_overrides(["parallel.zero=3"])
    try:
        assert evaluate(trained, 3) == expected, "the results must be bit-identical"
    finally:
        trained.changes_file.unlink() if before is None else trained.changes_file.write_bytes(before)


def test_a_stage_evaluates_the_selected_checkpoints(trained: Run) -> None:
    steps = sorted(list_checkpoint_steps(trained.checkpoints_dir))
    evaluate(trained, 2, "every")
    assert [p.name for p in sorted(trained.evaluation_dir.iterdir())] == [f"{checkpoint_name(s)}.json" for s in steps]
    assert evaluate(trained, 1, str(steps[0]))["step"] == steps[0]
    assert load_stage_module("evaluate").missing_outputs(trained) is not None, "the newest one is not evaluated"
    assert evaluate(trained, 1)["step"] == steps[-1]
    assert load_stage_module("evaluate").missing_outputs(trained) is None
    for wrong in ("²", "-1", "22", ""):
        with pytest.raises(UserError) as caught:
            select_steps(trained, wrong)
        assert caught.value.code in ("cli.invalid_value", "checkpoint.no_such_step") and "--step" in str(caught.value)


def test_a_result_of_another_checkpoint_does_not_count(trained: Run) -> None:
    evaluate(trained, 1)
    path = trained.evaluation_dir / f"{checkpoint_name(21)}.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "checkpoint": "0" * 64}))
    assert load_stage_module("evaluate").missing_outputs(trained) is not None
    path.write_text("{torn")
    assert load_stage_module("evaluate").missing_outputs(trained) is not None

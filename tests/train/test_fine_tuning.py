"""Tests of fine-tuning on answers to prompts: loss and evaluation, exact resumes, and attention within documents."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from pipeline.checkpoint.catalog import checkpoint_name, list_checkpoint_steps
from pipeline.config.read import load_config
from pipeline.data.manifest import MASK_DOCUMENT_START, MASK_LEARNED, load_manifest
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from tests.support.ranks import make_rank_info, run_ranks
from tests.support.tiny import PassiveStopFlag, compute_run_digest, make_run, run_stage_on_rank
from tests.train.test_exact import interrupt_training, read_steps

SMALL_MODEL_OVERRIDES = (
    "data.tokenizer.vocab_size=300", "data.sequence_length=32", "data.shard_tokens=4096", "data.held_out=0.2",
    "model.dim=16", "model.layers=2", "model.heads=4", "model.kv_heads=2", "train.epochs=null", "train.steps=12",
    "train.global_batch=8", "train.micro_batch=2", "checkpoint.every_steps=5", "optimizer.lr=0.01",
    "optimizer.freeze=[model.layers.0.mlp.*]",
)  # fmt: skip


def prepare_run(folder: Path, *overrides: str) -> Run:
    """Create a small run of configs/fine-tune.yaml on generated sums of two numbers, and prepare its data."""
    source = folder / "answers.jsonl"
    generator = random.Random(1)
    if not source.exists():
        numbers = [(generator.randrange(50), generator.randrange(50)) for _ in range(400)]
        rows = [
            {"prompt": f"What is {first} and {second}?\n", "response": f"{first} and {second} are {first + second}."}
            for first, second in numbers
        ]
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    all_overrides = (f"run.root={folder}", f"data.source={source}", *SMALL_MODEL_OVERRIDES, *overrides)
    run = Run.create(load_config(CODE_ROOT / "configs/fine-tune.yaml", all_overrides))
    for stage in ("prepare", "shard"):
        load_stage_module(run, stage).run_stage(run, make_rank_info(0, 1, 1), {}, PassiveStopFlag())
    return run


@pytest.fixture(scope="module")
def example_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train a small run of configs/fine-tune.yaml on two ranks and return it."""
    run = prepare_run(tmp_path_factory.mktemp("example"))
    assert set(run_ranks(2, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    return run


def evaluate_run(run: Run, world_size: int) -> dict[str, Any]:
    """Evaluate the newest checkpoint on `world_size` ranks and return the result."""
    for old_result in run.evaluation_dir.iterdir():
        old_result.unlink()
    assert set(run_ranks(world_size, run_stage_on_rank, run.path, "evaluate")) == {ExitCode.DONE}
    return dict(json.loads(next(run.evaluation_dir.iterdir()).read_text()))


def compute_reference_loss(_: RankInfo, path: Path) -> tuple[float, int]:
    """Evaluate the newest checkpoint of the run at `path`, one held-out document after another.

    Return the summed loss of the tokens in the answers, and the number of these tokens.
    """
    from pipeline.checkpoint.checkpointer import load_checkpoint
    from pipeline.model.decoder import Decoder

    run = Run.open(path)
    manifest = load_manifest(run.data_dir)
    model = Decoder(run.config.model, manifest.vocab_size, run.config.data.sequence_length).eval()
    weights = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    newest_step = list_checkpoint_steps(run.checkpoints_dir)[0]
    load_checkpoint(weights, run.checkpoints_dir / checkpoint_name(newest_step), None)
    total_loss = 0.0
    token_count = 0
    for shard in manifest.held_out:
        tokens, mask = (
            np.fromfile(run.data_dir / shard.file, array.dtype, shard.tokens, offset=array.offset).astype(np.int64)
            for array in (shard.arrays["tokens"], shard.arrays["mask"])
        )
        starts = np.flatnonzero(mask & MASK_DOCUMENT_START).tolist()
        for start, end in zip(starts, [*starts[1:], shard.tokens], strict=True):
            targets = torch.from_numpy(np.where(mask & MASK_LEARNED, tokens, -100)[start + 1 : end])
            document = torch.from_numpy(tokens[start : end - 1])[None]
            length = int(np.flatnonzero(mask[start:end] & MASK_LEARNED)[-1])  # without the padding at the end
            with torch.no_grad():
                logits = model(document[:, :length])[0]
            total_loss += torch.nn.functional.cross_entropy(logits, targets[:length], reduction="sum").item()
            token_count += int((targets[:length] != -100).sum())
    return total_loss, token_count


def test_the_loss_decreases_and_only_answers_are_evaluated(example_run: Run) -> None:
    losses = [line["loss"] for line in read_jsonl(example_run.metrics_file)]
    assert losses[-1] < 0.85 * losses[0]
    result = evaluate_run(example_run, 1)
    assert evaluate_run(example_run, 3) == result, "results must be bit-identical on any number of ranks"
    total_loss, token_count = run_ranks(1, compute_reference_loss, example_run.path)[0]
    assert result["tokens"] == token_count and result["loss"] == pytest.approx(total_loss / token_count, rel=1e-5)
    manifest = load_manifest(example_run.data_dir)
    assert result["bytes"] == manifest.held_out_bytes
    assert result["bits_per_byte"] == pytest.approx(total_loss / np.log(2) / manifest.held_out_bytes, rel=1e-5)
    assert result["unigram_bits_per_byte"] > 0
    assert token_count < 0.8 * manifest.held_out_tokens, "the tokens of the prompts must not be evaluated"


@pytest.mark.story
def test_a_stop_does_not_change_the_result_and_another_layout_has_close_losses(
    example_run: Run, tmp_path: Path
) -> None:
    (tmp_path / "answers.jsonl").write_bytes((example_run.path.parent / "answers.jsonl").read_bytes())
    stopped_run = prepare_run(tmp_path, "run.name=stopped_run", "train.evaluate_every=4")
    interrupt_training(stopped_run, 2, signal.SIGUSR1, 3, [1])
    assert set(run_ranks(2, run_stage_on_rank, stopped_run.path, "train")) == {ExitCode.DONE}
    assert compute_run_digest(stopped_run) == compute_run_digest(example_run)
    held_out_losses = [
        line["held_out_loss"] for line in read_jsonl(stopped_run.metrics_file) if "held_out_loss" in line
    ]
    assert len(held_out_losses) == 3 and min(held_out_losses) > 0
    tensor_parallel_run = prepare_run(
        tmp_path, "run.name=tensor_parallel_run", "parallel.tensor=2", "train.micro_batch=8"
    )
    assert set(run_ranks(2, run_stage_on_rank, tensor_parallel_run.path, "train")) == {ExitCode.DONE}
    for values, expected in zip(read_steps(tensor_parallel_run), read_steps(example_run), strict=True):
        step, loss, gradient_norm, _, samples_consumed = values
        assert (step, loss, gradient_norm) == pytest.approx(expected[:3], rel=1e-4)
        assert samples_consumed == expected[4]


@pytest.mark.story
def test_a_document_mask_changes_training_and_evaluation(tmp_path: Path) -> None:
    masked_run = make_run(tmp_path, overrides=("data.document_mask=true", "train.steps=7"))
    unmasked_run = make_run(tmp_path, "unmasked", ("train.steps=7",), masked_run.data_dir)
    for run in (masked_run, unmasked_run):
        assert set(run_ranks(2, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    masked_result = evaluate_run(masked_run, 2)
    unmasked_result = evaluate_run(unmasked_run, 2)
    # in each shard, a document starts at the first token and after each end-of-text token (0)
    document_count = 0
    for shard in load_manifest(masked_run.data_dir).held_out:
        tokens = np.fromfile(masked_run.data_dir / shard.file, shard.dtype, shard.tokens, offset=shard.offset)
        document_count += 1 + int((tokens[:-1] == 0).sum())
    predicted_only_unmasked = unmasked_result["tokens"] - masked_result["tokens"]
    assert predicted_only_unmasked == document_count, (
        "with the mask, the first token of a document must not be predicted"
    )
    assert masked_result["bytes"] == unmasked_result["bytes"] and masked_result["loss"] != unmasked_result["loss"]
    assert compute_run_digest(masked_run) != compute_run_digest(unmasked_run)

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

SMALL = (
    "data.tokenizer.vocab_size=300", "data.sequence_length=32", "data.shard_tokens=4096", "data.held_out=0.2",
    "model.dim=16", "model.layers=2", "model.heads=4", "model.kv_heads=2", "train.epochs=null", "train.steps=12",
    "train.global_batch=8", "train.micro_batch=2", "checkpoint.every_steps=5", "optimizer.lr=0.01",
    "optimizer.freeze=[model.layers.0.mlp.*]",
)  # fmt: skip


def prepare_run(folder: Path, *more: str) -> Run:
    """Create a small run of configs/fine-tune.yaml and prepare its data; `more` are further overrides."""
    source = folder / "answers.jsonl"
    draw = random.Random(1)
    if not source.exists():
        numbers = [(draw.randrange(50), draw.randrange(50)) for _ in range(400)]
        rows = [{"prompt": f"What is {a} and {b}?\n", "response": f"{a} and {b} are {a + b}."} for a, b in numbers]
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = (f"run.root={folder}", f"data.source={source}", *SMALL, *more)
    run = Run.create(load_config(CODE_ROOT / "configs/fine-tune.yaml", overrides))
    for stage in ("prepare", "shard"):
        load_stage_module(stage).run_stage(run, make_rank_info(0, 1, 1), {}, PassiveStopFlag())
    return run


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train the example on two ranks and return its run."""
    run = prepare_run(tmp_path_factory.mktemp("example"))
    assert set(run_ranks(2, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    return run


def evaluate_run(run: Run, size: int) -> dict[str, Any]:
    """Evaluate the newest checkpoint on `size` ranks and return the result."""
    for old in run.evaluation_dir.iterdir():
        old.unlink()
    assert set(run_ranks(size, run_stage_on_rank, run.path, "evaluate")) == {ExitCode.DONE}
    return dict(json.loads(next(run.evaluation_dir.iterdir()).read_text()))


def reference_loss_rank(rank_info: RankInfo, path: Path) -> tuple[float, int]:
    """Return the summed loss of the held-out answers and their number of tokens, one document after another."""
    from pipeline.checkpoint.checkpointer import load_checkpoint
    from pipeline.model.decoder import Decoder

    run = Run.open(path)
    manifest = load_manifest(run.data_dir)
    model = Decoder(run.config.model, manifest.vocab_size, run.config.data.sequence_length).eval()
    weights = {f"model.{n}": p.detach() for n, p in model.named_parameters()}
    load_checkpoint(weights, run.checkpoints_dir / checkpoint_name(list_checkpoint_steps(run.checkpoints_dir)[0]), None)
    total, count = 0.0, 0
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
            total += torch.nn.functional.cross_entropy(logits, targets[:length], reduction="sum").item()
            count += int((targets[:length] != -100).sum())
    return total, count


def test_the_example_learns_answers_and_evaluates_only_answers(example: Run) -> None:
    losses = [line["loss"] for line in read_jsonl(example.metrics_file)]
    assert losses[-1] < 0.85 * losses[0]
    result = evaluate_run(example, 1)
    assert evaluate_run(example, 3) == result, "results are bit-identical on any number of ranks"
    total, count = run_ranks(1, reference_loss_rank, example.path)[0]
    assert result["tokens"] == count and result["loss"] == pytest.approx(total / count, rel=1e-5)
    manifest = load_manifest(example.data_dir)
    assert result["bytes"] == manifest.held_out_bytes
    assert result["bits_per_byte"] == pytest.approx(total / np.log(2) / manifest.held_out_bytes, rel=1e-5)
    assert result["unigram_bits_per_byte"] > 0 and count < 0.8 * manifest.held_out_tokens


def test_a_stop_keeps_the_result_and_another_layout_keeps_the_sample_order(example: Run, tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_bytes((example.path.parent / "answers.jsonl").read_bytes())
    stopped = prepare_run(tmp_path, "run.name=stopped", "train.evaluate_every=4")
    interrupt_training(stopped, 2, signal.SIGUSR1, 3, [1])
    assert set(run_ranks(2, run_stage_on_rank, stopped.path, "train")) == {ExitCode.DONE}
    assert compute_run_digest(stopped) == compute_run_digest(example)
    held_out_losses = [line["held_out_loss"] for line in read_jsonl(stopped.metrics_file) if "held_out_loss" in line]
    assert len(held_out_losses) == 3 and min(held_out_losses) > 0
    moved = prepare_run(tmp_path, "run.name=moved", "parallel.tensor=2", "train.micro_batch=8")
    assert set(run_ranks(2, run_stage_on_rank, moved.path, "train")) == {ExitCode.DONE}
    for step, expected in zip(read_steps(moved), read_steps(example), strict=True):
        assert step[:3] == pytest.approx(expected[:3], rel=1e-4) and step[4] == expected[4]


@pytest.mark.story
def test_a_document_mask_changes_training_and_evaluation(tmp_path: Path) -> None:
    masked = make_run(tmp_path, overrides=("data.document_mask=true", "train.steps=7"))
    unmasked = make_run(tmp_path, "unmasked", ("train.steps=7",), masked.data_dir)
    results = []
    for run in (masked, unmasked):
        assert set(run_ranks(2, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
        results.append(evaluate_run(run, 2))
    documents = sum(
        int((np.fromfile(masked.data_dir / s.file, s.dtype, s.tokens, offset=s.offset)[:-1] == 0).sum()) + 1
        for s in load_manifest(masked.data_dir).held_out
    )
    assert results[0]["tokens"] == results[1]["tokens"] - documents, "the first token of a document is not predicted"
    assert results[0]["bytes"] == results[1]["bytes"] and results[0]["loss"] != results[1]["loss"]
    assert compute_run_digest(masked) != compute_run_digest(unmasked)

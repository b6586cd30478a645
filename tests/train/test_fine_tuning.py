"""A run on answers: what training and evaluation count, exact stops, and text whose documents are apart."""

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
from tests.support.tiny import HarmlessFlag, compute_run_digest, make_run, stage_rank
from tests.train.test_exact import interrupt_training, read_steps

SMALL = (
    "data.tokenizer.vocab_size=300", "data.sequence_length=32", "data.shard_tokens=4096", "data.held_out=0.2",
    "model.dim=16", "model.layers=2", "model.heads=4", "model.kv_heads=2", "train.epochs=null", "train.steps=12",
    "train.global_batch=8", "train.micro_batch=2", "checkpoint.every_steps=5", "optimizer.lr=0.01",
    "optimizer.freeze=[model.layers.0.mlp.*]",
)  # fmt: skip


def made(folder: Path, *more: str) -> Run:
    """The example's run, small, its data prepared."""
    source, draw = folder / "answers.jsonl", random.Random(1)
    if not source.exists():
        numbers = [(draw.randrange(50), draw.randrange(50)) for _ in range(400)]
        rows = [{"prompt": f"What is {a} and {b}?\n", "response": f"{a} and {b} are {a + b}."} for a, b in numbers]
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = (f"run.root={folder}", f"data.source={source}", *SMALL, *more)
    run = Run.create(load_config(CODE_ROOT / "configs/fine-tune.yaml", given))
    for stage in ("prepare", "shard"):
        load_stage_module(stage).run_stage(run, make_rank_info(0, 1, 1), {}, HarmlessFlag())
    return run


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = made(tmp_path_factory.mktemp("example"))
    assert set(run_ranks(2, stage_rank, run.path, "train")) == {ExitCode.DONE}
    return run


def result_of(run: Run, size: int) -> dict[str, Any]:
    for old in run.evaluation_dir.iterdir():
        old.unlink()
    assert set(run_ranks(size, stage_rank, run.path, "evaluate")) == {ExitCode.DONE}
    return dict(json.loads(next(run.evaluation_dir.iterdir()).read_text()))


def alone_rank(where: RankInfo, path: Path) -> tuple[float, int]:
    """Summed loss of the held-out answers and their tokens, one document after another, by the plainest code."""
    from pipeline.checkpoint.checkpointer import load_checkpoint as load_checkpoint
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
            length = int(np.flatnonzero(mask[start:end] & MASK_LEARNED)[-1])  # what fills up is left out
            with torch.no_grad():
                logits = model(document[:, :length])[0]
            total += torch.nn.functional.cross_entropy(logits, targets[:length], reduction="sum").item()
            count += int((targets[:length] != -100).sum())
    return total, count


def test_the_example_learns_answers_and_evaluates_them_alone(example: Run) -> None:
    losses = [line["loss"] for line in read_jsonl(example.metrics_file)]
    assert losses[-1] < 0.85 * losses[0]
    one, three = result_of(example, 1), result_of(example, 3)
    assert one == three, "equal to the last bit"
    total, count = run_ranks(1, alone_rank, example.path)[0]
    assert one["tokens"] == count and one["loss"] == pytest.approx(total / count, rel=1e-5)
    manifest = load_manifest(example.data_dir)
    assert one["bytes"] == manifest.held_out_bytes
    assert one["bits_per_byte"] == pytest.approx(total / np.log(2) / manifest.held_out_bytes, rel=1e-5)
    assert one["unigram_bits_per_byte"] > 0 and count < 0.8 * manifest.held_out_tokens


def test_a_stop_changes_no_bit_and_another_layout_no_order(example: Run, tmp_path: Path) -> None:
    for name in ("answers.jsonl",):
        (tmp_path / name).write_bytes((example.path.parent / name).read_bytes())
    stopped = made(tmp_path, "run.name=stopped", "train.evaluate_every=4")
    interrupt_training(stopped, 2, signal.SIGUSR1, 3, [1])
    assert set(run_ranks(2, stage_rank, stopped.path, "train")) == {ExitCode.DONE}
    assert compute_run_digest(stopped) == compute_run_digest(example)
    assert [line["held_out_loss"] > 0 for line in read_jsonl(stopped.metrics_file) if "held_out_loss" in line] == [
        True
    ] * 3
    moved = made(tmp_path, "run.name=moved", "parallel.tensor=2", "train.micro_batch=8")
    assert set(run_ranks(2, stage_rank, moved.path, "train")) == {ExitCode.DONE}
    for ours, theirs in zip(read_steps(moved), read_steps(example), strict=True):
        assert ours[:3] == pytest.approx(theirs[:3], rel=1e-4) and ours[4] == theirs[4]


@pytest.mark.story
def test_text_whose_documents_are_apart_trains_and_evaluates(tmp_path: Path) -> None:
    apart = make_run(tmp_path, overrides=("data.document_mask=true", "train.steps=7"))
    together = make_run(tmp_path, "together", ("train.steps=7",), apart.data_dir)
    results = []
    for run in (apart, together):
        assert set(run_ranks(2, stage_rank, run.path, "train")) == {ExitCode.DONE}
        results.append(result_of(run, 2))
    ends = sum(
        int((np.fromfile(apart.data_dir / s.file, s.dtype, s.tokens, offset=s.offset)[:-1] == 0).sum()) + 1
        for s in load_manifest(apart.data_dir).held_out
    )
    assert results[0]["tokens"] == results[1]["tokens"] - ends, "first tokens are not predicted"
    assert results[0]["bytes"] == results[1]["bytes"] and results[0]["loss"] != results[1]["loss"]
    assert compute_run_digest(apart) != compute_run_digest(together)

"""Tests of a run on a mixture of text and existing tokens: data, training, resume and evaluation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_prep.tokenizer import load_encoder, train_bpe
from pipeline.base.errors import ExitCode, UserError
from pipeline.base.files import read_jsonl
from pipeline.config.read import load_config
from pipeline.data.manifest import load_manifest
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from tests.data_prep.test_token_files import write_megatron
from tests.support.events import read_event_lines
from tests.support.ranks import make_rank_info, run_ranks
from tests.support.tiny import PassiveStopFlag, compute_run_digest, run_stage_on_rank, write_config

WEIGHTS = [{"from_step": 1, "weights": {"web": 3, "code": 1}}, {"from_step": 9, "weights": {"web": 1, "code": 1}}]


def make_run(folder: Path, name: str) -> Run:
    """Create a run and prepare its data. The source `web` is text, `code` is a file of tokens in Megatron's format."""
    config = write_config(folder, name, steps=16)
    tokenizer = folder / "tokenizer.json"
    corpus = folder / "corpus.jsonl"
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    tokenizer.write_text(train_bpe(texts, 300, "<|endoftext|>"))
    documents = load_encoder(tokenizer, "<|endoftext|>").encode([text[::-1] for text in texts[:80]])
    write_megatron(folder, [tokens.tolist() for tokens in documents])
    mixture = {
        "sources": {"web": {"source": "corpus.jsonl"}, "code": {"source": "m.bin", "records": "tokens"}},
        "weights": WEIGHTS,
    }
    text = config.read_text().replace(f"  source: {corpus}\n", f"  mixture: {json.dumps(mixture)}\n")
    text = text.replace("dropout: 0.1", "dropout: 0")  # dropout masks depend on the rank
    config.write_text(
        text.replace("{vocab_size: 300, train_bytes: 50000}", json.dumps({"kind": "file", "path": str(tokenizer)}))
    )
    run = Run.create(load_config(config))
    load_stage_module("prepare").run_stage(run, make_rank_info(0, 1, 1), {}, PassiveStopFlag())
    for task in (2, 0, 1):
        load_stage_module("shard").run_stage(run, make_rank_info(task, 3, 3), {}, PassiveStopFlag())
    assert load_stage_module("shard").describe_missing_outputs(run) is None
    return run


def train(run: Run, size: int) -> list[int]:
    return run_ranks(size, run_stage_on_rank, run.path, "train")


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train a run on two ranks and return it."""
    run = make_run(tmp_path_factory.mktemp("mixture"), "mixed")
    assert set(train(run, 2)) == {ExitCode.DONE}
    return run


def test_each_source_has_shards_and_one_manifest_lists_all(trained_run: Run) -> None:
    manifest = load_manifest(trained_run.data_dir)
    web, code = (load_manifest(trained_run.data_dir / name) for name in ("web", "code"))
    assert [(part.name, part.train, part.held_out) for part in manifest.parts] == [
        ("web", len(web.train), len(web.held_out)), ("code", len(code.train), len(code.held_out)),
    ]  # fmt: skip
    assert manifest.train_tokens == web.train_tokens + code.train_tokens
    assert manifest.documents == web.documents + code.documents == 380
    assert {Path(entry.file).parts[0] for entry in web.train} == {"shards"}
    assert manifest.train[-1].file.endswith("m.bin") and manifest.train[0].file.startswith("web/shards/")
    assert load_stage_module("prepare").describe_missing_outputs(trained_run) is None
    assert load_stage_module("shard").progress(trained_run).completed


def test_a_resume_from_an_older_checkpoint_gives_the_same_result(trained_run: Run) -> None:
    digest = compute_run_digest(trained_run)
    metrics = list(read_jsonl(trained_run.metrics_file))
    for step in (14, 16):
        shutil.rmtree(trained_run.checkpoints_dir / f"step-{step:08}")
    assert set(train(trained_run, 2)) == {ExitCode.DONE}
    assert compute_run_digest(trained_run) == digest
    resumed_metrics = list(read_jsonl(trained_run.metrics_file))
    assert [line["loss"] for line in resumed_metrics] == [line["loss"] for line in metrics]
    events = read_event_lines(trained_run, "train", "mixture")
    assert len(events) == 2 and events[0]["weights"] == WEIGHTS and events[0]["epochs"] == {"web": 0.0, "code": 0.0}
    manifest = load_manifest(trained_run.data_dir)
    code = manifest.train[-manifest.parts[1].train :]
    samples = sum((entry.tokens - 1) // 32 for entry in code)
    assert events[1]["epochs_at_the_end"]["code"] == pytest.approx((8 * 8 / 4 + 8 * 8 / 2) / samples)


def test_another_layout_reads_the_same_samples(trained_run: Run, tmp_path: Path) -> None:
    other = make_run(tmp_path, "mixed")
    assert set(train(other, 1)) == {ExitCode.DONE}
    losses, other_losses = ([line["loss"] for line in read_jsonl(run.metrics_file)] for run in (trained_run, other))
    assert other_losses == pytest.approx(losses, rel=1e-5)


def test_held_out_loss_is_also_reported_for_each_source(trained_run: Run) -> None:
    assert run_ranks(1, run_stage_on_rank, trained_run.path, "evaluate") == [ExitCode.DONE]
    result: dict[str, Any] = json.loads((trained_run.evaluation_dir / "step-00000016.json").read_text())
    web, code = (load_manifest(trained_run.data_dir / name).held_out_tokens for name in ("web", "code"))
    mean = (web * result["web.loss"] + code * result["code.loss"]) / (web + code)
    assert result["loss"] == pytest.approx(mean, rel=1e-6) and result["web.loss"] != result["code.loss"]
    assert result["tokens"] == web + code


def test_mixture_weights_may_change_only_for_future_steps(trained_run: Run, tmp_path: Path) -> None:
    run = tmp_path / "mixed"
    shutil.copytree(trained_run.path, run, symlinks=True)
    for step in (14, 16):
        shutil.rmtree(run / f"checkpoints/step-{step:08}")
    (run / "decisions.jsonl").touch()
    past = [{**WEIGHTS[0], "weights": {"web": 1, "code": 5}}, WEIGHTS[1]]
    with pytest.raises(UserError, match=r"data\.mixture\.weights.*step-00000007"):
        Run.open(run).apply_overrides([f"data.mixture.weights={json.dumps(past)}"])
    future = [WEIGHTS[0], {**WEIGHTS[1], "weights": {"web": 0, "code": 1}}]
    Run.open(run).apply_overrides([f"data.mixture.weights={json.dumps(future)}"])
    before = list(read_jsonl(run / "metrics.jsonl"))
    assert set(train(Run.open(run), 2)) == {ExitCode.DONE}
    after = list(read_jsonl(run / "metrics.jsonl"))
    is_equal = [old["loss"] == new["loss"] for old, new in zip(before, after, strict=True)]
    assert all(is_equal[:8]) and not any(is_equal[8:])
    assert read_event_lines(Run.open(run), "train", "mixture")[-1]["weights"] == future


def test_a_changed_or_missing_token_file_is_an_error_and_is_not_moved(trained_run: Run, tmp_path: Path) -> None:
    run = make_run(tmp_path, "mixed")
    content = bytearray((tmp_path / "m.bin").read_bytes())
    content[20] ^= 1
    (tmp_path / "m.bin").write_bytes(content)
    with pytest.raises(AssertionError, match=r"m\.bin is damaged"):
        train(run, 1)
    (tmp_path / "m.bin").unlink()
    with pytest.raises(AssertionError, match=r"m\.bin is missing"):
        train(run, 1)
    assert "m.bin is missing" in (load_stage_module("shard").describe_missing_outputs(run) or "")
    content[20] ^= 1
    (tmp_path / "m.bin").write_bytes(content)
    assert train(run, 1) == [ExitCode.DONE] and sorted(path.name for path in tmp_path.glob("m.*")) == ["m.bin", "m.idx"]

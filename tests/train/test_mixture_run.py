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
"""A run has 16 steps of 8 samples. In steps 1 to 8, a quarter of the samples is from `code`; in steps 9 to 16, half."""


def prepare_mixture_run(folder: Path, name: str) -> Run:
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
    load_stage_module(run, "prepare").run_stage(run, make_rank_info(0, 1, 1), {}, PassiveStopFlag())
    for task in (2, 0, 1):  # the order of the array tasks does not matter
        load_stage_module(run, "shard").run_stage(run, make_rank_info(task, 3, 3), {}, PassiveStopFlag())
    assert load_stage_module(run, "shard").describe_missing_outputs(run) is None
    return run


def train(run: Run, world_size: int) -> list[int]:
    """Run the train stage on `world_size` ranks and return their exit codes."""
    return run_ranks(world_size, run_stage_on_rank, run.path, "train")


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train a run on two ranks and return it."""
    run = prepare_mixture_run(tmp_path_factory.mktemp("mixture"), "mixed")
    assert set(train(run, 2)) == {ExitCode.DONE}
    return run


def test_each_source_has_shards_and_one_manifest_lists_all(trained_run: Run) -> None:
    manifest = load_manifest(trained_run.data_dir)
    web, code = (load_manifest(trained_run.data_dir / name) for name in ("web", "code"))
    assert [(part.name, part.train, part.held_out) for part in manifest.parts] == [
        ("web", len(web.train), len(web.held_out)), ("code", len(code.train), len(code.held_out)),
    ]  # fmt: skip
    assert manifest.train_tokens == web.train_tokens + code.train_tokens
    assert manifest.documents == web.documents + code.documents == 300 + 80
    assert {Path(entry.file).parts[0] for entry in web.train} == {"shards"}
    assert manifest.train[-1].file.endswith("m.bin") and manifest.train[0].file.startswith("web/shards/")
    assert load_stage_module(trained_run, "prepare").describe_missing_outputs(trained_run) is None
    assert load_stage_module(trained_run, "shard").progress(trained_run).completed


def test_a_resume_from_an_older_checkpoint_gives_the_same_result(trained_run: Run) -> None:
    digest = compute_run_digest(trained_run)
    metrics = list(read_jsonl(trained_run.metrics_file))
    for step in (14, 16):  # the run continues from the checkpoint of step 7
        shutil.rmtree(trained_run.checkpoints_dir / f"step-{step:08}")
    assert set(train(trained_run, 2)) == {ExitCode.DONE}
    assert compute_run_digest(trained_run) == digest
    resumed_metrics = list(read_jsonl(trained_run.metrics_file))
    assert [line["loss"] for line in resumed_metrics] == [line["loss"] for line in metrics]
    events = read_event_lines(trained_run, "train", "mixture")
    assert len(events) == 2 and events[0]["weights"] == WEIGHTS and events[0]["epochs"] == {"web": 0.0, "code": 0.0}
    manifest = load_manifest(trained_run.data_dir)
    code_shards = manifest.train[-manifest.parts[1].train :]
    code_samples = sum((shard.tokens - 1) // 32 for shard in code_shards)  # a sample has 32 tokens
    used_samples = 8 * 8 / 4 + 8 * 8 / 2  # from `code`, in steps 1 to 8 and in steps 9 to 16
    assert events[1]["epochs_at_the_end"]["code"] == pytest.approx(used_samples / code_samples)


def test_another_layout_reads_the_same_samples(trained_run: Run, tmp_path: Path) -> None:
    single_rank_run = prepare_mixture_run(tmp_path, "mixed")
    assert set(train(single_rank_run, 1)) == {ExitCode.DONE}
    losses = [line["loss"] for line in read_jsonl(single_rank_run.metrics_file)]
    losses_on_two_ranks = [line["loss"] for line in read_jsonl(trained_run.metrics_file)]
    assert losses == pytest.approx(losses_on_two_ranks, rel=1e-5)


def test_held_out_loss_is_also_reported_for_each_source(trained_run: Run) -> None:
    assert run_ranks(1, run_stage_on_rank, trained_run.path, "evaluate") == [ExitCode.DONE]
    result: dict[str, Any] = json.loads((trained_run.evaluation_dir / "step-00000016.json").read_text())
    web_tokens, code_tokens = (load_manifest(trained_run.data_dir / name).held_out_tokens for name in ("web", "code"))
    tokens = web_tokens + code_tokens
    mean = (web_tokens * result["web.loss"] + code_tokens * result["code.loss"]) / tokens
    assert result["loss"] == pytest.approx(mean, rel=1e-6) and result["web.loss"] != result["code.loss"]
    assert result["tokens"] == tokens


def test_mixture_weights_may_change_only_for_future_steps(trained_run: Run, tmp_path: Path) -> None:
    run_path = tmp_path / "mixed"
    shutil.copytree(trained_run.path, run_path, symlinks=True)
    for step in (14, 16):  # the run continues from the checkpoint of step 7
        shutil.rmtree(run_path / f"checkpoints/step-{step:08}")
    (run_path / "decisions.jsonl").touch()  # also an output of training, but the error must name the checkpoint
    changed_past = [{**WEIGHTS[0], "weights": {"web": 1, "code": 5}}, WEIGHTS[1]]
    with pytest.raises(UserError, match=r"data\.mixture\.weights.*step-00000007"):
        Run.open(run_path).apply_overrides([f"data.mixture.weights={json.dumps(changed_past)}"])
    changed_future = [WEIGHTS[0], {**WEIGHTS[1], "weights": {"web": 0, "code": 1}}]
    Run.open(run_path).apply_overrides([f"data.mixture.weights={json.dumps(changed_future)}"])
    old_metrics = list(read_jsonl(run_path / "metrics.jsonl"))
    assert set(train(Run.open(run_path), 2)) == {ExitCode.DONE}
    new_metrics = list(read_jsonl(run_path / "metrics.jsonl"))
    losses_are_equal = [old["loss"] == new["loss"] for old, new in zip(old_metrics, new_metrics, strict=True)]
    # the second weights apply from step 9, so the losses of steps 1 to 8 are equal
    assert all(losses_are_equal[:8]) and not any(losses_are_equal[8:])
    assert read_event_lines(Run.open(run_path), "train", "mixture")[-1]["weights"] == changed_future


def test_a_changed_or_missing_token_file_is_an_error_and_is_not_moved(trained_run: Run, tmp_path: Path) -> None:
    run = prepare_mixture_run(tmp_path, "mixed")
    content = bytearray((tmp_path / "m.bin").read_bytes())
    content[20] ^= 1  # flip a bit
    (tmp_path / "m.bin").write_bytes(content)
    with pytest.raises(AssertionError, match=r"m\.bin is damaged"):
        train(run, 1)
    (tmp_path / "m.bin").unlink()
    with pytest.raises(AssertionError, match=r"m\.bin is missing"):
        train(run, 1)
    assert "m.bin is missing" in (load_stage_module(run, "shard").describe_missing_outputs(run) or "")
    content[20] ^= 1  # flip it back
    (tmp_path / "m.bin").write_bytes(content)
    assert train(run, 1) == [ExitCode.DONE] and sorted(path.name for path in tmp_path.glob("m.*")) == ["m.bin", "m.idx"]

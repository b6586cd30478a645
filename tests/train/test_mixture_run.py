"""A run on a mixture, of documents and of tokens that existed: prepared, trained, gone on with, evaluated."""

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
from tests.support.tiny import HarmlessFlag, compute_run_digest, stage_rank, write_config

WEIGHTS = [{"from_step": 1, "weights": {"web": 3, "code": 1}}, {"from_step": 9, "weights": {"web": 1, "code": 1}}]


def make_run(folder: Path, name: str) -> Run:
    """Prepared and sharded; `web` is text, `code` Megatron's tokens of other text."""
    config = write_config(folder, name, steps=16)
    tokenizer, corpus = folder / "tokenizer.json", folder / "corpus.jsonl"
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    tokenizer.write_text(train_bpe(texts, 300, "<|endoftext|>"))
    documents = load_encoder(tokenizer, "<|endoftext|>").encode([text[::-1] for text in texts[:80]])
    write_megatron(folder, [one.tolist() for one in documents])
    mixture = {
        "sources": {"web": {"source": "corpus.jsonl"}, "code": {"source": "m.bin", "records": "tokens"}},
        "weights": WEIGHTS,
    }
    text = config.read_text().replace(f"  source: {corpus}\n", f"  mixture: {json.dumps(mixture)}\n")
    text = text.replace("dropout: 0.1", "dropout: 0")  # drawn by rank
    config.write_text(
        text.replace("{vocab_size: 300, train_bytes: 50000}", json.dumps({"kind": "file", "path": str(tokenizer)}))
    )
    run = Run.create(load_config(config))
    load_stage_module("prepare").run_stage(run, make_rank_info(0, 1, 1), {}, HarmlessFlag())
    for task in (2, 0, 1):
        load_stage_module("shard").run_stage(run, make_rank_info(task, 3, 3), {}, HarmlessFlag())
    assert load_stage_module("shard").missing_outputs(run) is None
    return run


def train(run: Run, size: int) -> list[int]:
    return run_ranks(size, stage_rank, run.path, "train")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = make_run(tmp_path_factory.mktemp("mixture"), "mixed")
    assert set(train(run, 2)) == {ExitCode.DONE}
    return run


def test_sources_keep_their_own_shards_and_one_manifest_has_them_all(trained: Run) -> None:
    manifest = load_manifest(trained.data_dir)
    web, code = (load_manifest(trained.data_dir / name) for name in ("web", "code"))
    assert [(part.name, part.train, part.held_out) for part in manifest.parts] == [
        ("web", len(web.train), len(web.held_out)), ("code", len(code.train), len(code.held_out)),
    ]  # fmt: skip
    assert manifest.train_tokens == web.train_tokens + code.train_tokens
    assert manifest.documents == web.documents + code.documents == 380
    assert {Path(entry.file).parts[0] for entry in web.train} == {"shards"}
    assert manifest.train[-1].file.endswith("m.bin") and manifest.train[0].file.startswith("web/shards/")
    assert (
        load_stage_module("prepare").missing_outputs(trained) is None
        and load_stage_module("shard").progress(trained).completed
    )


def test_is_the_same_after_a_return(trained: Run) -> None:
    whole, metrics = compute_run_digest(trained), list(read_jsonl(trained.metrics_file))
    for step in (14, 16):
        shutil.rmtree(trained.checkpoints_dir / f"step-{step:08}")
    assert set(train(trained, 2)) == {ExitCode.DONE}
    assert compute_run_digest(trained) == whole
    again = list(read_jsonl(trained.metrics_file))
    assert [line["loss"] for line in again] == [line["loss"] for line in metrics]
    told = read_event_lines(trained, "train", "mixture")
    assert len(told) == 2 and told[0]["weights"] == WEIGHTS and told[0]["epochs"] == {"web": 0.0, "code": 0.0}
    manifest = load_manifest(trained.data_dir)
    code = manifest.train[-manifest.parts[1].train :]
    samples = sum((entry.tokens - 1) // 32 for entry in code)
    assert told[1]["epochs_at_the_end"]["code"] == pytest.approx((8 * 8 / 4 + 8 * 8 / 2) / samples)


def test_another_layout_reads_the_same_samples(trained: Run, tmp_path: Path) -> None:
    other = make_run(tmp_path, "mixed")
    assert set(train(other, 1)) == {ExitCode.DONE}
    ours, theirs = ([line["loss"] for line in read_jsonl(run.metrics_file)] for run in (trained, other))
    assert theirs == pytest.approx(ours, rel=1e-5)


def test_held_out_loss_is_told_by_source_too(trained: Run) -> None:
    assert run_ranks(1, stage_rank, trained.path, "evaluate") == [ExitCode.DONE]
    result: dict[str, Any] = json.loads((trained.evaluation_dir / "step-00000016.json").read_text())
    web, code = (load_manifest(trained.data_dir / name).held_out_tokens for name in ("web", "code"))
    mean = (web * result["web.loss"] + code * result["code.loss"]) / (web + code)
    assert result["loss"] == pytest.approx(mean, rel=1e-6) and result["web.loss"] != result["code.loss"]
    assert result["tokens"] == web + code


def test_weights_of_steps_to_come_may_change_and_no_others(trained: Run, tmp_path: Path) -> None:
    run = tmp_path / "mixed"
    shutil.copytree(trained.path, run, symlinks=True)
    for step in (14, 16):
        shutil.rmtree(run / f"checkpoints/step-{step:08}")
    (run / "decisions.jsonl").touch()
    past = [{**WEIGHTS[0], "weights": {"web": 1, "code": 5}}, WEIGHTS[1]]
    with pytest.raises(UserError, match=r"data\.mixture\.weights.*resume cannot change it.*step-00000007"):
        Run.open(run).apply_overrides([f"data.mixture.weights={json.dumps(past)}"])
    coming = [WEIGHTS[0], {**WEIGHTS[1], "weights": {"web": 0, "code": 1}}]
    Run.open(run).apply_overrides([f"data.mixture.weights={json.dumps(coming)}"])
    before = list(read_jsonl(run / "metrics.jsonl"))
    assert set(train(Run.open(run), 2)) == {ExitCode.DONE}
    after = list(read_jsonl(run / "metrics.jsonl"))
    same = [one["loss"] == other["loss"] for one, other in zip(before, after, strict=True)]
    assert all(same[:8]) and not any(same[8:])
    assert read_event_lines(Run.open(run), "train", "mixture")[-1]["weights"] == coming


def test_a_file_of_the_users_own_that_changed_is_named_and_left_where_it_is(trained: Run, tmp_path: Path) -> None:
    run = make_run(tmp_path, "mixed")
    content = bytearray((tmp_path / "m.bin").read_bytes())
    content[20] ^= 1
    (tmp_path / "m.bin").write_bytes(content)
    with pytest.raises(AssertionError, match=r"m\.bin is damaged.*restore the file"):
        train(run, 1)
    (tmp_path / "m.bin").unlink()
    with pytest.raises(AssertionError, match=r"m\.bin is missing: restore the file"):
        train(run, 1)
    assert "m.bin is missing" in (load_stage_module("shard").missing_outputs(run) or "")
    content[20] ^= 1
    (tmp_path / "m.bin").write_bytes(content)
    assert train(run, 1) == [ExitCode.DONE] and sorted(path.name for path in tmp_path.glob("m.*")) == ["m.bin", "m.idx"]

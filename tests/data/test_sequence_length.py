"""Another `data.sequence_length` for a run that has trained is refused in words; before that it takes effect."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from pipeline.base.errors import CheckpointError, UserError
from pipeline.checkpoint.identity import check_identity, compute_identity
from pipeline.config.read import load_config
from pipeline.data.manifest import load_manifest
from pipeline.data.samples import TokenDataset
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from tests.support.ranks import make_rank_info
from tests.support.tiny import HarmlessFlag, make_run, write_config


def filled(run: Run) -> Run:
    for stage in ("prepare", "shard"):
        load_stage_module(stage).run_stage(run, make_rank_info(0, 1, 1), {}, HarmlessFlag())
    return run


def prompts_run(folder: Path) -> Run:
    """Its shards are laid into windows of that length."""
    path = write_config(folder)
    lines = ({"prompt": f"the model {number}", "response": "then saves each token " * 3} for number in range(300))
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return filled(Run.create(load_config(path, ("data.records=prompts", "data.shard_tokens=4096"))))


def mixture_run(folder: Path) -> Run:
    """Not prepared."""
    path = write_config(folder)
    sources = {name: {"source": str(folder / "corpus.jsonl")} for name in "ab"}
    mixture = json.dumps({"sources": sources, "weights": [{"from_step": 1, "weights": {"a": 1, "b": 2}}]})
    text = re.sub("  source: .*", f"  mixture: {mixture}", path.read_text()).replace("  held_out: 0.1\n", "")
    (folder / "tokenizer.json").touch()
    path.write_text(re.sub("  tokenizer: .*", f"  tokenizer: {{kind: file, path: {folder}/tokenizer.json}}", text))
    return Run.create(load_config(path))


@pytest.mark.parametrize("make", [make_run, prompts_run, mixture_run])
def test_a_run_that_has_trained_keeps_its_length(make: object, tmp_path: Path) -> None:
    run: Run = make(tmp_path)  # type: ignore[operator]
    run.apply_overrides(["data.sequence_length=48"])
    assert Run.open(run.path).config.data.sequence_length == 48  # nothing is there that it makes wrong
    (run.checkpoints_dir / "step-00000003").mkdir()
    with pytest.raises(UserError) as caught:
        run.apply_overrides(["data.sequence_length=16"])
    words = str(caught.value)
    assert words.startswith("data.sequence_length: 48 → 16: resume cannot change it without changing the result")
    assert "checkpoints/step-00000003" in words and "start a new run: its config under another run.name" in words
    assert Run.open(run.path).config.data.sequence_length == 48


def test_before_that_samples_are_cut_anew(tmp_path: Path) -> None:
    """Of the same shards; of prompts, which lie in windows, they are written again."""
    run = make_run(tmp_path)
    before = load_manifest(run.data_dir)
    run.apply_overrides(["data.sequence_length=48"])
    assert load_stage_module("shard").missing_outputs(run) is None and load_manifest(run.data_dir) == before
    assert TokenDataset(before.train, 48, run.data_dir).read(np.array([0]))["tokens"].shape == (1, 49)
    (tmp_path / "prompts").mkdir()
    run = prompts_run(tmp_path / "prompts")
    before = load_manifest(run.data_dir)
    run.apply_overrides(["data.sequence_length=48"])
    assert load_stage_module("shard").missing_outputs(run) is not None
    assert (
        load_manifest(filled(run).data_dir).train != before.train
        and load_stage_module("shard").missing_outputs(run) is None
    )


def test_a_config_that_was_changed_by_hand_is_told_by_key_and_values(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    manifest = load_manifest(run.data_dir)
    saved = {"step": 3, **compute_identity(run.config, manifest)}
    check_identity(json.loads(json.dumps(saved)), compute_identity(run.config, manifest))
    text = run.config_file.read_text()
    run.config_file.write_text(text.replace("sequence_length: 32", "sequence_length: 48").replace("seed: 3", "seed: 4"))
    now = compute_identity(Run.open(run.path).config, manifest)
    with pytest.raises(CheckpointError, match=r"data\.sequence_length 32 → 48, seed 3 → 4"):
        check_identity(saved, now)
    del saved["config"]  # one that older code saved
    with pytest.raises(CheckpointError, match=r"another config_hash than this run now"):
        check_identity(saved, now)

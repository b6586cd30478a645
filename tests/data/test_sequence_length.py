"""Tests that `data.sequence_length` may be changed only if the run has no checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
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
from tests.support.tiny import PassiveStopFlag, make_run, write_config


def run_data_stages(run: Run) -> Run:
    """Run the prepare and shard stages, and return the run."""
    for stage in ("prepare", "shard"):
        load_stage_module(run, stage).run_stage(run, make_rank_info(0, 1, 1), {}, PassiveStopFlag())
    return run


def make_prompts_run(folder: Path) -> Run:
    """Create a run on prompts and run its data stages. Its shards consist of windows of `data.sequence_length`."""
    path = write_config(folder)
    lines = ({"prompt": f"the model {number}", "response": "then saves each token " * 3} for number in range(300))
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_data_stages(Run.create(load_config(path, ("data.records=prompts", "data.shard_tokens=4096"))))


def make_mixture_run(folder: Path) -> Run:
    """Create a run on a mixture, without running its stages."""
    path = write_config(folder)
    sources = {name: {"source": str(folder / "corpus.jsonl")} for name in "ab"}
    mixture = json.dumps({"sources": sources, "weights": [{"from_step": 1, "weights": {"a": 1, "b": 2}}]})
    text = re.sub("  source: .*", f"  mixture: {mixture}", path.read_text()).replace("  held_out: 0.1\n", "")
    (folder / "tokenizer.json").touch()
    path.write_text(re.sub("  tokenizer: .*", f"  tokenizer: {{kind: file, path: {folder}/tokenizer.json}}", text))
    return Run.create(load_config(path))


@pytest.mark.parametrize("create_run", [make_run, make_prompts_run, make_mixture_run])
def test_a_change_is_an_error_if_the_run_has_a_checkpoint(create_run: Callable[[Path], Run], tmp_path: Path) -> None:
    run = create_run(tmp_path)
    run.apply_overrides(["data.sequence_length=48"])
    assert Run.open(run.path).config.data.sequence_length == 48, "without a checkpoint, the change must apply"
    (run.checkpoints_dir / "step-00000003").mkdir()
    with pytest.raises(UserError, match=r"^data\.sequence_length: 48 → 16: ") as caught:
        run.apply_overrides(["data.sequence_length=16"])
    assert "checkpoints/step-00000003" in str(caught.value) and "run.name" in str(caught.value)
    assert Run.open(run.path).config.data.sequence_length == 48


def test_a_change_before_training_keeps_the_shards_of_text(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    manifest = load_manifest(run.data_dir)
    run.apply_overrides(["data.sequence_length=48"])
    assert (
        load_stage_module(run, "shard").describe_missing_outputs(run) is None
        and load_manifest(run.data_dir) == manifest
    )
    assert TokenDataset(manifest.train, 48, run.data_dir).read(np.array([0]))["tokens"].shape == (1, 49)


def test_a_change_before_training_requires_new_shards_of_prompts(tmp_path: Path) -> None:
    run = make_prompts_run(tmp_path)
    manifest = load_manifest(run.data_dir)
    run.apply_overrides(["data.sequence_length=48"])
    assert load_stage_module(run, "shard").describe_missing_outputs(run) is not None
    assert load_manifest(run_data_stages(run).data_dir).train != manifest.train
    assert load_stage_module(run, "shard").describe_missing_outputs(run) is None


def test_an_edited_config_is_an_error_that_names_the_changed_keys_and_values(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    manifest = load_manifest(run.data_dir)
    saved_identity = {"step": 3, **compute_identity(run.config, manifest)}
    check_identity(json.loads(json.dumps(saved_identity)), compute_identity(run.config, manifest))
    text = run.config_file.read_text()
    run.config_file.write_text(text.replace("sequence_length: 32", "sequence_length: 48").replace("seed: 3", "seed: 4"))
    new_identity = compute_identity(Run.open(run.path).config, manifest)
    with pytest.raises(CheckpointError, match=r"data\.sequence_length 32 → 48, seed 3 → 4"):
        check_identity(saved_identity, new_identity)
    del saved_identity["config"]  # Checkpoints of older versions do not have this key.
    with pytest.raises(CheckpointError, match="config_hash"):
        check_identity(saved_identity, new_identity)

"""Tests of a whole run on text that is packed by best fit: training, evaluation during training, and evaluate stage."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from pipeline.data.manifest import load_manifest
from tests.support.ranks import run_ranks
from tests.support.tiny import make_run, run_stage_on_rank

OVERRIDES = (
    "data.packing=best_fit", "data.sequence_length=128", "train.steps=12", "train.evaluate_every=6", "model.dropout=0",
)  # fmt: skip


@pytest.mark.parametrize("document_mask", ["false", "true"])
def test_packed_text_is_trained_and_its_evaluation_does_not_depend_on_packing(
    tmp_path: Path, document_mask: str
) -> None:
    mask_override = f"data.document_mask={document_mask}"
    run = make_run(tmp_path, overrides=(*OVERRIDES, mask_override))
    cut_run = make_run(tmp_path, "cut", (*OVERRIDES[1:], mask_override))
    manifest, cut_manifest = (load_manifest(folder) for folder in (run.data_dir, cut_run.data_dir))
    assert all(entry.mask_offset is not None for entry in manifest.train)
    assert [entry.sha256 for entry in manifest.held_out] == [entry.sha256 for entry in cut_manifest.held_out]
    assert manifest.train[0].sha256 != cut_manifest.train[0].sha256
    results = []
    for trained_run in (run, cut_run):
        for stage in ("train", "evaluate"):
            assert set(run_ranks(2, run_stage_on_rank, trained_run.path, stage)) == {ExitCode.DONE}
        lines = list(read_jsonl(trained_run.metrics_file))
        assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
        held_out_losses = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
        results.append(json.loads(next(trained_run.evaluation_dir.iterdir()).read_text()))
        assert len(held_out_losses) == 2 and held_out_losses[-1] == pytest.approx(results[-1]["loss"], rel=1e-5)
    result, cut_result = results
    for key in ("tokens", "bytes", "unigram_bits_per_byte"):
        assert result[key] == cut_result[key]
    assert result["loss"] != cut_result["loss"]
    if document_mask == "false":
        assert result["tokens"] == manifest.held_out_tokens and result["bytes"] == manifest.held_out_bytes
        bits = result["loss"] * manifest.held_out_tokens / np.log(2)
        assert result["bits_per_byte"] == pytest.approx(bits / manifest.held_out_bytes)

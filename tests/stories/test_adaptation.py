"""Runs that adapt an open model are preempted on Slurm, and end with the same bits as an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.base.errors import ExitCode
from pipeline.run.directory import Run
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.model.test_transformers_backend import save_model_with_tokenizer
from tests.publish.test_open_weights import make_run_from_model
from tests.publish.test_open_weights import save_model_with_tokenizer as save_decoder_with_tokenizer
from tests.support.cluster_runs import (
    count_steps,
    has_evaluation,
    list_event_names,
    preempt_all_nodes,
    run_submit,
    wait_for,
    wait_for_empty_queue,
)
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, run_stage_on_rank, slow_down_steps

cluster = cluster_fixture()
pytestmark = [pytest.mark.story, pytest.mark.timeout(600)]

NODES = ("stages.train.nodes=2", "stages.train.tasks_per_node=1")
QLORA = ("adapter={rank: 4, targets: ['*.q_proj', '*.mlp.*'], base: nf4}", "train.precision=bf16")
AVERAGED_GEMMA = ("parallel.zero=3", "train.ema={decay: 0.9}", "checkpoint.keep={last: 1, every_steps: 7}")


@pytest.mark.parametrize(("family", "overrides"), [("qwen3", QLORA), ("gemma3_text", AVERAGED_GEMMA)])
def test_a_preempted_run_equals_an_undisturbed_one(
    cluster: Cluster, tmp_path: Path, family: str, overrides: tuple[str, ...]
) -> None:
    source = tmp_path / "model"
    if family == "qwen3":
        save_decoder_with_tokenizer(source)
    else:
        save_model_with_tokenizer(source, family)
    undisturbed = make_run_from_model(tmp_path, "undisturbed", source, 16, *overrides)
    assert run_ranks(2, run_stage_on_rank, undisturbed.path, "train") == [ExitCode.DONE] * 2
    run = slow_down_steps(make_run_from_model(tmp_path, "run", source, 16, *overrides, *NODES))
    submitted = run_submit(cluster, tmp_path, "run.yaml", *overrides, *NODES)
    assert submitted.returncode == 0, submitted.stderr
    wait_for("step 4", lambda: run.metrics_file.exists() and count_steps(run.path) >= 4)
    preempt_all_nodes(cluster)
    wait_for("an evaluation", lambda: has_evaluation(run.path))
    wait_for_empty_queue(cluster)
    assert "preempted" in list_event_names(run.path, "train")
    assert compute_run_digest(Run.open(run.path)) == compute_run_digest(undisturbed)

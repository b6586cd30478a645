"""Requests that no node can satisfy are refused before anything is submitted, if sinfo tells; without a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.base.errors import UserError
from pipeline.config.read import load_config
from pipeline.config.sections import Config
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from slurm.query import capacity
from slurm.query.capacity import check_capacity, find_unsatisfiable_request, has_features, parse_nodes
from tests.support.tiny import write_config

SINFO = """\
low*|4|4|65536|(null)|gpu:h100:2(S:0)
high|4|4|65536|(null)|gpu:h100:2(S:0)
mixed|8|64|257000|intel,nvlink|gpu:a100:4(S:0-1),nvme:1
mixed|2|128|1031000|amd|gpu:a100:8,gpu:t4:1
cpu|16|32|128000|(null)|(null)
odd|3|32+|n/a|a|gpu:a100:no_consume:x
empty|0|0|0||(null)
"""


@pytest.fixture(autouse=True)
def no_partition_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SBATCH_PARTITION", raising=False)


def config(folder: Path, *overrides: str) -> Config:
    return load_config(write_config(folder), overrides, layout=False)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["site.partition=low", "site.cpus_per_task=4"], ["8 CPUs", "stages.train.tasks_per_node", "most is 4"]),
        (["site.partition=low", "site.cpus_per_task=2"], []),
        (["site.partition=low", "stages.train.cpus_per_task=3"], ["stages.train.cpus_per_task: 3", "6 CPUs"]),
        (["site.partition=low", "stages.train.tasks_per_node=5", "train.global_batch=10"], ["5 CPUs"]),
        (["site.partition=low", "site.cpus_per_task=4", "site.sbatch={overcommit: true}"], []),
        (["site.partition=low", "site.mem_gb=65"], ["66,560 MB", "site.mem_gb: 65", "most is 65,536"]),
        (["site.partition=low", "site.mem_gb=64"], []),
        (["site.partition=low", "stages.train.mem_gb=65"], ["stages.train.mem_gb: 65"]),
        (["site.partition=low", "stages.train.gpus_per_node=3"], ["3 GPUs (stages.train.gpus_per_node: 3)"]),
        (["site.partition=low", "stages.train.gpus_per_node=2"], []),
        (["site.partition=low", "stages.train.gpus_per_node=2", "site.gpu_type=H100"], []),
        (["site.partition=low", "stages.train.gpus_per_node=2", "site.gpu_type=a100"], ["site.gpu_type: a100"]),
        (["site.partition=cpu", "stages.train.gpus_per_node=3"], ["3 GPUs", "most is 0"]),
        (["site.partition=cpu", "stages.train.gpus_per_node=3", "site.gpus_as=none"], []),
        (["site.partition=low", "site.constraint=nvlink"], ["the features nvlink (site.constraint)"]),
        (["site.partition=low", "stages.train.nodes=5"], ["stages.train.nodes is 5", "only 4 nodes"]),
        (["site.partition=low", "stages.train.nodes=4"], []),
        (["site.partition=low", "stages.train.nodes={min: 4, max: 8}"], []),
        (["site.partition=low", "stages.train.nodes={min: 5, max: 8}"], ["only 4 nodes"]),
        # a heterogeneous partition: one kind of nodes is enough
        (["site.partition=mixed", "site.cpus_per_task=64"], []),
        (["site.partition=mixed", "site.cpus_per_task=65"], ["130 CPUs", "most is 128"]),
        (["site.partition=mixed", "site.cpus_per_task=64", "stages.train.nodes=2"], []),
        (["site.partition=mixed", "site.cpus_per_task=64", "stages.train.nodes=3"], ["only 2 nodes"]),
        (["site.partition=mixed", "stages.train.nodes=10"], []),
        (["site.partition=mixed", "site.cpus_per_task=64", "site.constraint=intel"], ["128 CPUs", "features intel"]),
        (["site.partition=mixed", "stages.train.gpus_per_node=1", "site.gpu_type=t4", "parallel.backend=gloo"], []),
        # several partitions, one that the shell names, none, and one that is not shown
        (["site.partition='low,mixed'", "site.cpus_per_task=64"], []),
        (["site.partition='low,high'", "site.cpus_per_task=64"], ["partition low,high", "128 CPUs"]),
        (["site.cpus_per_task=64"], []),
        (["site.cpus_per_task=65"], ["no node of the cluster has 130 CPUs"]),
        (["site.partition=hidden", "site.cpus_per_task=65"], []),
        (["site.partition='low,hidden'", "site.cpus_per_task=65"], []),
        # what cannot be read
        (["site.partition=odd", "site.cpus_per_task=640", "site.mem_gb=9999", "stages.train.gpus_per_node=9"], []),
        (["site.partition=empty", "site.cpus_per_task=640"], []),
    ],
)  # fmt: skip
def test_what_no_node_can_satisfy_is_named_with_its_key(tmp_path: Path, overrides: list[str], words: list[str]) -> None:
    nodes = [group for group in parse_nodes(SINFO) if group.partition != "odd" or "odd" in overrides[0]]
    reason = find_unsatisfiable_request(config(tmp_path, *overrides), "train", nodes)
    assert (reason is None) == (not words), reason
    assert all(word in str(reason) for word in words), reason


def test_jobs_of_one_process_are_checked_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = config(tmp_path, "site.partition=low", "site.data_jobs={cpus_per_task: 8}")
    reason = find_unsatisfiable_request(wanted, "shard", parse_nodes(SINFO))
    assert "8 CPUs (site.data_jobs.cpus_per_task: 8); the most is 4" in str(reason)
    assert find_unsatisfiable_request(wanted, "train", parse_nodes(SINFO)) is None
    monkeypatch.setenv("SBATCH_PARTITION", "low")
    assert "partition low" in str(
        find_unsatisfiable_request(config(tmp_path, "site.cpus_per_task=8"), "shard", parse_nodes(SINFO))
    )


@pytest.mark.parametrize(
    ("constraint", "fits"),
    [
        ("a", True), ("c", False), ("a&b", True), ("a&c", False), ("a,c", False), ("c|a", True), ("c|d", False),
        ("[a|c]", True), ("[c|d]", False), ("(c|a)&b", True), ("(c|a)&d", False), ("c|a&b", True),
        ("[c*2&a*1]", True), ("c*2", False), ("", True), ("(a", True), ("&", True),
    ],
)  # fmt: skip
def test_constraints_are_read_as_sbatch_reads_them(constraint: str, fits: bool) -> None:
    assert has_features(constraint, frozenset({"a", "b"})) == fits


@pytest.mark.parametrize(
    "listed", [None, "", "slurm_load_partitions: error\n", "low|x|4|1|(null)|(null)\n", "|||||||\n"]
)
def test_nothing_is_refused_if_sinfo_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str | None
) -> None:
    asked: list[float] = []

    def call(*words: str, timeout_s: float) -> str | None:
        assert words[0] == "sinfo"
        asked.append(timeout_s)
        return listed

    monkeypatch.setattr(capacity, "run_slurm_command", call)
    check_capacity(Run.create(config(tmp_path, "site.cpus_per_task=999")))
    assert len(asked) == 1 and asked[0] <= 10, "one call, and nobody waits long"


def test_a_stage_that_is_done_and_nodes_of_a_cloud_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "run_slurm_command", lambda *words, timeout_s: SINFO)
    monkeypatch.setattr(capacity, "read_slurm_config", lambda timeout_s: {"ResumeProgram": "(null)"})
    run = Run.create(config(tmp_path, "site.partition=low", "site.data_jobs={cpus_per_task: 8}"))
    with pytest.raises(UserError, match=r"prepare: no node of partition low has 8 CPUs"):
        check_capacity(run)
    for stage in ("prepare", "shard"):
        monkeypatch.setattr(load_stage_module(stage), "missing_outputs", lambda run: None)
    check_capacity(run)
    run = Run.create(config(tmp_path, "run.name=other", "site.partition=low", "site.cpus_per_task=8"))
    with pytest.raises(UserError, match="train: no node"):
        check_capacity(run)
    monkeypatch.setattr(capacity, "read_slurm_config", lambda timeout_s: {"ResumeProgram": "/usr/sbin/resume"})
    check_capacity(run)

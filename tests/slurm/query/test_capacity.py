"""Test that a submission with a request that no node can satisfy is an error. Uses recorded output of sinfo."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.read import load_config
from pipeline.config.sections import Config
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from slurm.query import capacity
from slurm.query.capacity import check_capacity, find_unsatisfiable_request, has_features, parse_nodes
from tests.support.errors import raises_error
from tests.support.tiny import write_config

SINFO_OUTPUT = """\
low*|4|4|65536|(null)|gpu:h100:2(S:0)
high|4|4|65536|(null)|gpu:h100:2(S:0)
mixed|8|64|257000|intel,nvlink|gpu:a100:4(S:0-1),nvme:1
mixed|2|128|1031000|amd|gpu:a100:8,gpu:t4:1
cpu|16|32|128000|(null)|(null)
unclear|3|32+|n/a|a|gpu:a100:no_consume:x
empty|0|0|0||(null)
"""


@pytest.fixture(autouse=True)
def unset_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset SBATCH_PARTITION, which the shell of the developer may set."""
    monkeypatch.delenv("SBATCH_PARTITION", raising=False)


def make_config(folder: Path, *overrides: str) -> Config:
    """Load the tiny config with overrides, without a check of the layout."""
    return load_config(write_config(folder), overrides, checks_sizes=False)


@pytest.mark.parametrize(
    ("overrides", "facts"),
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
        # a heterogeneous partition: it is enough if one kind of node has the resources
        (["site.partition=mixed", "site.cpus_per_task=64"], []),
        (["site.partition=mixed", "site.cpus_per_task=65"], ["130 CPUs", "most is 128"]),
        (["site.partition=mixed", "site.cpus_per_task=64", "stages.train.nodes=2"], []),
        (["site.partition=mixed", "site.cpus_per_task=64", "stages.train.nodes=3"], ["only 2 nodes"]),
        (["site.partition=mixed", "stages.train.nodes=10"], []),
        (["site.partition=mixed", "site.cpus_per_task=64", "site.constraint=intel"], ["128 CPUs", "features intel"]),
        (["site.partition=mixed", "stages.train.gpus_per_node=1", "site.gpu_type=t4", "parallel.backend=gloo"], []),
        # several partitions, no partition, and a partition that sinfo does not show
        (["site.partition='low,mixed'", "site.cpus_per_task=64"], []),
        (["site.partition='low,high'", "site.cpus_per_task=64"], ["partition low,high", "128 CPUs"]),
        (["site.cpus_per_task=64"], []),
        (["site.cpus_per_task=65"], ["no node of the cluster has 130 CPUs"]),
        (["site.partition=hidden", "site.cpus_per_task=65"], []),
        (["site.partition='low,hidden'", "site.cpus_per_task=65"], []),
        # output that cannot be parsed, and a partition without nodes
        (["site.partition=unclear", "site.cpus_per_task=640", "site.mem_gb=9999", "stages.train.gpus_per_node=9"], []),
        (["site.partition=empty", "site.cpus_per_task=640"], []),
    ],
)  # fmt: skip
def test_the_reason_names_the_unsatisfiable_request_and_its_key(
    tmp_path: Path, overrides: list[str], facts: list[str]
) -> None:
    """`facts` is empty if a node can satisfy all requests. By default, the tiny train stage has 2 tasks per node."""
    groups = parse_nodes(SINFO_OUTPUT)
    # the resources of the nodes in `unclear` are unknown, so these nodes could satisfy each request without a partition
    nodes = [group for group in groups if group.partition != "unclear" or "unclear" in overrides[0]]
    reason = find_unsatisfiable_request(make_config(tmp_path, *overrides), "train", nodes)
    assert (reason is None) == (not facts), reason
    assert all(fact in str(reason) for fact in facts), reason


def test_the_requests_of_data_jobs_are_also_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also, SBATCH_PARTITION selects the partition if the config does not."""
    config = make_config(tmp_path, "site.partition=low", "site.data_jobs={cpus_per_task: 8}")
    reason = find_unsatisfiable_request(config, "shard", parse_nodes(SINFO_OUTPUT))
    assert "8 CPUs (site.data_jobs.cpus_per_task: 8); the most is 4" in str(reason)
    assert find_unsatisfiable_request(config, "train", parse_nodes(SINFO_OUTPUT)) is None
    monkeypatch.setenv("SBATCH_PARTITION", "low")
    config = make_config(tmp_path, "site.cpus_per_task=8")
    assert "partition low" in str(find_unsatisfiable_request(config, "shard", parse_nodes(SINFO_OUTPUT)))


@pytest.mark.parametrize(
    ("constraint", "is_met"),
    [
        ("a", True), ("c", False), ("a&b", True), ("a&c", False), ("a,c", False), ("c|a", True), ("c|d", False),
        ("[a|c]", True), ("[c|d]", False), ("(c|a)&b", True), ("(c|a)&d", False), ("c|a&b", True),
        ("[c*2&a*1]", True), ("c*2", False), ("", True), ("(a", True), ("&", True),
    ],
)  # fmt: skip
def test_constraints_are_interpreted_as_by_sbatch(constraint: str, is_met: bool) -> None:
    """The node has the features a and b. A constraint with invalid syntax counts as met; sbatch will reject it."""
    assert has_features(constraint, frozenset({"a", "b"})) == is_met


@pytest.mark.parametrize(
    "output", [None, "", "slurm_load_partitions: error\n", "low|x|4|1|(null)|(null)\n", "|||||||\n"]
)
def test_no_request_is_an_error_if_sinfo_shows_no_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str | None
) -> None:
    """sinfo may fail or print lines that cannot be parsed. The query must not take longer than 10 s."""
    timeouts_s: list[float] = []

    def run_command(*command: str, timeout_s: float) -> str | None:
        assert command[0] == "sinfo"
        timeouts_s.append(timeout_s)
        return output

    monkeypatch.setattr(capacity, "run_slurm_command", run_command)
    check_capacity(Run.create(make_config(tmp_path, "site.cpus_per_task=999")))
    assert len(timeouts_s) == 1 and timeouts_s[0] <= 10


def test_stages_that_are_done_and_clusters_with_cloud_nodes_are_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sinfo does not show cloud nodes that are powered off."""
    monkeypatch.setattr(capacity, "run_slurm_command", lambda *command, timeout_s: SINFO_OUTPUT)
    monkeypatch.setattr(capacity, "read_slurm_config", lambda timeout_s: {"ResumeProgram": "(null)"})
    run = Run.create(make_config(tmp_path, "site.partition=low", "site.data_jobs={cpus_per_task: 8}"))
    with raises_error("slurm.unsatisfiable_request", "prepare", "partition low", "8 CPUs"):
        check_capacity(run)
    for stage in ("prepare", "shard"):
        monkeypatch.setattr(load_stage_module(run, stage), "describe_missing_outputs", lambda run: None)
    check_capacity(run)
    run = Run.create(make_config(tmp_path, "run.name=other", "site.partition=low", "site.cpus_per_task=8"))
    with raises_error("slurm.unsatisfiable_request", "train"):
        check_capacity(run)
    monkeypatch.setattr(capacity, "read_slurm_config", lambda timeout_s: {"ResumeProgram": "/usr/sbin/resume"})
    check_capacity(run)

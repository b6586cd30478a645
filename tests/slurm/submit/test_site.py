"""Site profiles without a cluster: what is refused, what reaches the script, what a dry run hides, who sits where."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.errors import UserError
from pipeline.base.place import granted_tasks
from pipeline.config.read import ConfigError, load_config
from pipeline.config.sections import Config, SiteConfig
from pipeline.config.site import OWN_OPTIONS
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from slurm.query import topology
from slurm.query.topology import nodes_of_ranks, problem
from slurm.show.console import Plain
from slurm.show.doctor import Facts, Finding, file_system, judge, parse_qos
from slurm.submit.dry_run import mask, print_plan
from slurm.submit.sbatch import parameters, script
from tests.support.tiny import write_config

PROFILES = CODE_ROOT / "configs" / "sites"


def config(folder: Path, *overrides: str, profile: str | None = None) -> Config:
    path = write_config(folder)
    if profile:
        path.write_text(path.read_text() + f"site: {{extends: {PROFILES / profile}}}\n")
    return load_config(path, overrides)


def options(text: str) -> dict[str, str]:
    """The options of an sbatch script, as a shell reads them."""
    lines = [shlex.split(line.removeprefix("#SBATCH "))[0] for line in text.splitlines() if line.startswith("#SBATCH")]
    return {key.removeprefix("--"): value for key, _, value in (line.partition("=") for line in lines)}


def exported(text: str, *, before: str = "# command") -> dict[str, str]:
    """What the set-up lines of a script put into the environment, asked of bash."""
    setup = text[text.index("# setup") : text.index(before)].replace("module ", ": ")
    shell = subprocess.run(["bash", "-c", f"{setup}\nenv -0"], capture_output=True, text=True, timeout=10, check=True)
    return dict(item.split("=", 1) for item in shell.stdout.split("\0") if "=" in item)


def site_script(folder: Path, site: dict[str, Any], stage: str = "train", *overrides: str) -> str:
    loaded = config(folder, *overrides)
    loaded = loaded.model_copy(update={"site": SiteConfig.model_validate(site)})
    return script(Run(folder / "runs/tiny"), loaded, stage)


# -- profiles ------------------------------------------------------------------------------------------------


def test_the_gpu_example_is_what_its_jobs_ask_for(tmp_path: Path) -> None:
    wide = ("train.global_batch=32", "stages.train.nodes=8", "stages.train.tasks_per_node=4")
    cfg = config(tmp_path, "site.account=x", *wide, profile="gpu-cluster.yaml")
    text = script(Run(tmp_path / "runs/tiny"), cfg, "train")
    wanted = {
        "gres": "gpu:h100:4", "cpus-per-task": "16", "mem": "491520M", "constraint": "ib&scratch", "account": "x",
        "distribution": "block:block", "switches": "1@00:05:00", "exclusive": "", "mail-type": "FAIL,TIME_LIMIT",
        "signal": "USR2@300", "nodes": "8", "ntasks-per-node": "4", "partition": "gpu", "requeue": "",
    }  # fmt: skip
    assert wanted.items() <= options(text).items()
    variables = exported(text)
    assert variables["NCCL_SOCKET_IFNAME"] == variables["GLOO_SOCKET_IFNAME"] == "ib0"
    assert variables["TMPDIR"] == "/local" and variables["NCCL_IB_HCA"] == "mlx5"
    shard = options(script(Run(tmp_path / "runs/tiny"), cfg, "shard"))
    assert shard["partition"] == "cpu" and shard["mem"] == "65536M" and shard["mail-type"] == "FAIL,TIME_LIMIT"
    assert not {"gres", "exclusive", "constraint"} & shard.keys()


def test_the_cpu_example_is_what_its_jobs_ask_for(tmp_path: Path) -> None:
    cfg = config(tmp_path, profile="cpu-cluster.yaml")
    found = options(script(Run(tmp_path / "runs/tiny"), cfg, "train"))
    assert found["hint"] == "nomultithread" and found["licenses"] == "lustre" and "gres" not in found
    assert cfg.site.stripe.count == 2


def test_a_persons_lines_come_after_the_sites_and_win(tmp_path: Path) -> None:
    text = site_script(tmp_path, {"network_interface": "ib0", "setup": ["export NCCL_SOCKET_IFNAME=eth7"]})
    assert exported(text)["NCCL_SOCKET_IFNAME"] == "eth7" and exported(text)["GLOO_SOCKET_IFNAME"] == "ib0"


def test_options_that_are_taken_back_are_not_there(tmp_path: Path) -> None:
    found = options(site_script(tmp_path, {"sbatch": {"exclusive": True, "hold": False, "nice": 100}}))
    assert found["exclusive"] == "" and found["nice"] == "100" and "hold" not in found


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("site.sbatch.time=10", "stages.STAGE.time"),
        ("site.sbatch.gpus=1", "site.gpus_per_node"),
        ("site.sbatch.part=x", "site.partition"),
        ("site.sbatch.requeue=true", "site.requeue"),
        ("site.sbatch.output=/x", "Sluice sets --output itself"),
        ("site.sbatch.--nice=1", "without dashes"),
        ("site.sbatch.mail_type=END", "as sbatch does"),
        ("site.sbatch.nice=[1]", "nice: [1] should be text or a whole number or true or false"),
        ("site.distribution=arbitrary", "block, cyclic or plane=4"),
        ("site.switches=two", "COUNT@TIME"),
        ("site.network_interface=ib0; rm", "such as ib0"),
        ("site.scratch=tmp/$USER", "absolute path"),
        ("site.stripe.count=-2", "at least -1"),
        ("site.stripe.pool=a b", "lfs pool_list"),
    ],
)
def test_what_a_profile_may_not_say(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(tmp_path, override)
    key = override.partition("=")[0].rsplit(".", 1)[1] if "sbatch" not in override else "site.sbatch"
    assert words in str(raised.value) and key in str(raised.value) and "command line" in str(raised.value)


def test_every_option_that_a_script_sets_is_refused_in_the_mapping(tmp_path: Path) -> None:
    """What Sluice or submitit write must not be overwritten by a profile."""
    full = {"partition": "p", "account": "a", "qos": "q", "constraint": "c", "gpus_per_node": 1, "cpus_per_task": 2}
    full |= {"mem_gb": 1.0, "distribution": "block", "switches": "1"}
    text = site_script(tmp_path, full) + site_script(tmp_path, {**full, "gpus_as": "gres"})
    assert options(text).keys() - {"wckey"} <= OWN_OPTIONS.keys()


@pytest.mark.parametrize(
    ("key", "value"), [("partition", "a\nb"), ("qos", "a\\b"), ("account", "a\rb"), ("constraint", "\0")]
)
def test_what_sbatch_would_misread_is_refused_before_it_is_asked(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(UserError, match=key):
        site_script(tmp_path, {key: value})


# -- dry run -------------------------------------------------------------------------------------------------


def test_a_dry_run_shows_all_and_hides_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm, no git
    secrets = [
        "export WANDB_API_KEY=hunter2", "HF_TOKEN='hunter2 hunter2' cmd", "login -u me --password hunter2",
        'curl -H "Authorization: Bearer hunter2" x', "git clone https://me:hunter2@example.com", "export\tPASS=hunter2",
        "docker login --username me hunter2", 'export SECRET="one\nhunter2"', "aws_secret_access_key : hunter2",
    ]  # fmt: skip
    private = {"nice": 5, "admin-comment": "token=hunter2"}
    site = {"setup": [*secrets, "module load cuda/12.4"], "sbatch": private, "data_jobs": {"sbatch": private}}
    cfg = config(tmp_path, "stages.train.nodes=2", "stages.train.time=00:20:00")
    out = io.StringIO()
    print_plan(cfg.model_copy(update={"site": SiteConfig.model_validate(site)}), True, Plain(file=out, width=80))
    text = out.getvalue()
    assert "hunter2" not in text
    assert text.count("module load cuda/12.4") == 6 and "export WANDB_API_KEY=*****" in text
    assert text.count("#!/bin/bash") == 5 and "--array=0-1%2" in text
    assert re.search(r"^train +2 × 2 = 4 processes, 00:20:00, after shard$", text, re.M)
    assert "sequence_length: 32" in text and "#SBATCH --nice=5" in text
    assert not (tmp_path / "runs").exists()


def planned(config: Config) -> dict[str, str]:
    """What a dry run prints for Slurm: the scripts by their headings."""
    out = io.StringIO()
    print_plan(config, True, Plain(file=out, width=80))
    _, *rest = re.split(r"^# ---- on Slurm: (.*)\n", out.getvalue(), flags=re.M)
    return dict(zip(rest[::2], rest[1::2], strict=True))


def test_a_dry_run_shows_arrays_as_wide_as_they_are_submitted(tmp_path: Path) -> None:
    found = planned(config(tmp_path, "stages.shard.tasks=300"))
    assert options(found["shard"])["array"] == "0-299%300" and "array" not in options(found["train"])
    sweep = "sweep={grid: {optimizer.lr: [0.1, 0.2], run.seed: [1, 2, 3]}, at_most: 4}"
    found = planned(config(tmp_path, sweep, "site.requeue=false"))
    assert {name.partition(",")[0]: options(text).get("array") for name, text in found.items()} == {
        "prepare": None, "shard": None, "train": "0-5%4", "evaluate": "0-5%4",
    }  # fmt: skip
    assert not [name for name in found if "successor" in name]
    with pytest.raises(ConfigError, match=r"point 000 \(optimizer\.lrr=1\)"):
        planned(config(tmp_path, "sweep={grid: {optimizer.lrr: [1]}}"))


def test_a_dry_run_shows_the_successor(tmp_path: Path) -> None:
    found = planned(config(tmp_path, "site.requeue=false"))
    assert found["train, its successor: takes over if it does not end well"].rstrip() == found["train"].rstrip()
    assert "no-requeue" in options(found["train"]) and len(planned(config(tmp_path))) == len(found) - 1


@given(st.text(), st.sampled_from(["API_TOKEN", "db-password", "SSH_KEY", "secret"]), st.sampled_from(["=", ": ", " "]))
@settings(deadline=None, max_examples=100)
def test_no_value_of_a_secret_is_shown(text: str, name: str, between: str) -> None:
    shown = mask(f"export {name}{between}<{text}>")
    assert shown == f"export {name}{between}*****"


@pytest.mark.parametrize("line", ["module load cuda/12.4", "export OMP_NUM_THREADS=4", "source /sw/env.sh", ""])
def test_what_is_no_secret_is_shown(line: str) -> None:
    assert mask(line) == line


# -- placement -----------------------------------------------------------------------------------------------


def test_ranks_are_dealt_out_as_srun_does() -> None:
    assert nodes_of_ranks([2, 2, 2, 1], "block") == [0, 0, 1, 1, 2, 2, 3]
    assert nodes_of_ranks([2, 2, 2, 1], "cyclic:block") == [0, 1, 2, 3, 0, 1, 2]
    assert nodes_of_ranks([3, 3], "plane=2") == [0, 0, 1, 1, 0, 1]


@given(st.lists(st.integers(1, 8), min_size=1, max_size=8), st.sampled_from(["block", "cyclic", "plane=2", "plane=3"]))
def test_every_rank_has_a_node_and_no_node_too_many(tasks: list[int], distribution: str) -> None:
    nodes = nodes_of_ranks(tasks, distribution)
    assert [nodes.count(node) for node in range(len(tasks))] == tasks


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 6),
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.sampled_from([None, "block", "cyclic", "plane=2", "*:cyclic", "CYCLIC,NoPack"]),
)
def test_what_passes_has_each_tensor_group_on_one_node(
    nodes: int, per_node: int, tensor: int, tasks: list[int], distribution: str | None
) -> None:
    reason = problem("train", nodes, per_node, tensor, tasks, distribution)
    fits = len(tasks) >= nodes and all(room >= per_node for room in tasks[:nodes])
    place = nodes_of_ranks([per_node] * nodes, distribution or "block")
    groups = [place[first : first + tensor] for first in range(0, len(place), tensor)]
    even = not (distribution or "").startswith("plane") or per_node % 2 == 0
    together = even and all(len(group) == tensor and len(set(group)) == 1 for group in groups)
    if reason is None:
        assert fits and together
    else:
        assert not fits or not together or per_node % tensor


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2, 4, 3, [4, 4], None), "parallel.tensor (3) does not divide the ranks per node (4)"),
        ((4, 2, 1, [1, 1], None), "4 nodes × 2 ranks, and Slurm granted 2 nodes for 1, 1 tasks: ask with --nodes=4"),
        ((2, 2, 1, [4, 3], "plane=3"), "planes that do not divide the ranks per node (2)"),
        ((2, 2, 2, [2, 2], "cyclic"), "ranks 0 to 1 on several nodes"),
        ((2, 2, 2, [2, 2], "cyclic"), "--distribution=block (site.distribution)"),
    ],
)  # fmt: skip
def test_a_mismatch_says_how_to_ask(arguments: Any, words: str) -> None:
    assert words in str(problem("train", *arguments))


def test_what_was_granted_is_read_from_the_environment() -> None:
    plane = {"SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "4"}
    assert granted_tasks(plane) == ([2, 2, 2, 1], "plane=4")
    assert granted_tasks({"SLURM_TASKS_PER_NODE": "8"}) == ([8], "block")
    assert granted_tasks({}) is None
    with pytest.raises(UserError, match="SLURM_TASKS_PER_NODE"):
        granted_tasks({"SLURM_TASKS_PER_NODE": "two"})


def test_a_torn_placement_is_refused_before_submission(tmp_path: Path) -> None:
    cfg = config(tmp_path, "stages.train.nodes=2", "site.distribution=cyclic")
    torn = cfg.model_copy(update={"parallel": cfg.parallel.model_copy(update={"tensor": 2})})
    run = Run(tmp_path / "runs/tiny")
    assert parameters(run, cfg, "train", None)["additional_parameters"]["distribution"] == "cyclic"
    with pytest.raises(UserError, match="must share one"):
        parameters(run, torn, "train", None)
    parameters(run, torn, "evaluate", None)  # it has no tensor parallel groups


def test_a_mismatch_in_an_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.create(config(tmp_path, "stages.train.nodes=2"))
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2")
    assert "--nodes=2 --ntasks-per-node=2" in str(topology.mismatch(run, "train", 4))
    assert topology.mismatch(run, "shard", 2) is None
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x3)")
    assert topology.mismatch(run, "train", 4) is None
    monkeypatch.delenv("SLURM_TASKS_PER_NODE")
    assert topology.mismatch(run, "train", 4) is None


# -- doctor --------------------------------------------------------------------------------------------------


DBD = {"AccountingStorageType": "accounting_storage/slurmdbd", "AccountingStorageEnforce": "limits"}
TREE = {"TopologyPlugin": "topology/tree", "SchedulerParameters": "max_switch_wait=9"}


def judged(config: dict[str, str], mpi: list[str] | None = None, **partition: str) -> dict[str, Finding]:
    facts = Facts(config, [{"PartitionName": "p", "State": "UP", **partition}], {}, mpi or [])
    return {finding.what: finding for finding in judge(facts)}


@pytest.mark.parametrize(
    ("config", "what", "verdict", "words"),
    [
        ({"SLURM_VERSION": "20.11.9"}, "Slurm", "note", "22.05"),
        ({"SLURM_VERSION": "24.05.1"}, "Slurm", "ok", "22.05"),
        ({"MaxArraySize": "0"}, "MaxArraySize", "problem", "stages.shard.tasks to 1"),
        ({"MaxJobCount": "200"}, "MaxJobCount", "note", "all users"),
        ({"MinJobAge": "2 sec"}, "MinJobAge", "note", "after its end"),
        (DBD, "accounting", "ok", "site.account"),
        ({"AuthInfo": "(null)"}, "after a requeue", "ok", "cred_expire"),
        ({"PreemptType": "preempt/qos"}, "partition p", "ok", "sacctmgr show qos"),
        ({"PreemptType": "preempt/partition_prio"}, "partition p", "note", "treated with SUSPEND"),
        ({}, "partition p", "ok", "not preempted"),
        ({}, "srun --mpi", "note", "mpirun"),
        (TREE, "TopologyPlugin", "ok", "9 s"),
    ],
)  # fmt: skip
def test_doctor_knows_other_clusters(config: dict[str, str], what: str, verdict: str, words: str) -> None:
    finding = judged(config, PreemptMode="SUSPEND,GANG")[what]
    assert finding.verdict == verdict and words in finding.meaning + finding.found
    assert judged({"AuthInfo": "(null)"})["after a requeue"].found == "120 s"


def test_doctor_judges_qos_that_are_preempted() -> None:
    listed = parse_qos("low||requeue|00:02:00\nmid||cluster|00:00:00\nhigh|low,mid|cluster|00:00:00\nodd line\n")
    assert [qos["Name"] for qos in listed] == ["low", "mid", "high"]
    facts = Facts({"PreemptType": "preempt/qos", "PreemptMode": "CANCEL"}, [], {}, [], listed)
    found = {finding.what: finding for finding in judge(facts)}
    assert found["QOS low"].verdict == "ok" and "120 s to save" in found["QOS low"].meaning
    assert "by high" in found["QOS mid"].found and "is gone" in found["QOS mid"].meaning and "QOS high" not in found


@pytest.mark.parametrize(
    ("nodes", "kind", "unseen", "verdict"),
    [(9, "ext4", None, "problem"), (9, "ext4", "", "ok"), (9, "nfs4", "no", "problem"), (9, "lustre", None, "ok"),
     (9, "fuse.sshfs", None, "ok"), (0, "ext4", None, "ok"), (9, "", None, "problem")],
)  # fmt: skip
def test_doctor_judges_file_systems(tmp_path: Path, nodes: int, kind: str, unseen: str | None, verdict: str) -> None:
    assert next(file_system(tmp_path, nodes, kind, unseen)).verdict == verdict


def test_submit_without_slurm_still_plans(tmp_path: Path) -> None:
    write_config(tmp_path)
    command = [sys.executable, str(CODE_ROOT / "submit.py"), "tiny.yaml", "--dry-run", "site.scratch=/with space"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PATH": "/nowhere"}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and "export TMPDIR='/with space'" in done.stdout, done.stderr

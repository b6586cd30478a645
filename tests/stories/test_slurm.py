"""The chain on a real Slurm of four nodes: submitted at once, trained over nodes, stopped, requeued, cancelled."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from pipeline.checkpoint.catalog import find_newest_step
from pipeline.data.manifest import load_manifest
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.cluster.machines import Machine
from tests.data_prep.test_shards import all_bytes
from tests.stories.test_local_runs import write_broken_packages
from tests.support.cluster_runs import (
    NODES,
    create_slow_run,
    get_job_id,
    has_evaluation,
    list_event_names,
    preempt_all_nodes,
    run_submit,
    submit_template,
    wait_for,
    write_config_on_data,
)
from tests.support.events import read_event_lines
from tests.support.requirements import skip_or_fail_in_ci
from tests.support.tiny import compute_run_digest, write_config
from tests.tracking.test_followers import curve, in_float32

cluster = cluster_fixture(grace=5)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def calm(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that went through undisturbed on four nodes."""
    folder = tmp_path_factory.mktemp("calm")
    write_config(folder, steps=40)
    started = time.monotonic()
    done = run_submit(cluster, folder, "tiny.yaml", *NODES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^\w+ +job \d+", done.stdout, re.M)) == 5, done.stdout
    assert time.monotonic() - started < 20 and not has_evaluation(folder / "runs/tiny"), "submitting does not wait"
    wait_for("the evaluation", lambda: has_evaluation(folder / "runs/tiny"))
    wait_for("the last event", lambda: "done" in list_event_names(folder / "runs/tiny", "evaluate"))
    return folder


@pytest.mark.short
def test_the_chain_runs_on_four_nodes(calm: Path, cluster: Cluster) -> None:
    run = calm / "runs/tiny"
    assert [line["step"] for line in read_jsonl(run / "metrics.jsonl")] == list(range(1, 41))
    started = next(e for e in read_event_lines(Run.open(run), "train") if e["event"] == "started")
    assert started["ranks"] == 4
    assert len(list((run / "jobs/train").glob("rank-*.log"))) == 4
    status = run_submit(cluster, calm, "status", "runs/tiny").stdout
    assert len(re.findall(r"^(prepare|shard|train|evaluate) +done", status, re.M)) == 4, status
    again = run_submit(cluster, calm, "tiny.yaml", *NODES)
    assert len(re.findall(r"^\w+ +done", again.stdout, re.M)) == 4, again.stdout


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_quickstart_itself_on_four_nodes(tmp_path: Path, cluster: Cluster) -> None:
    """Its 200 steps by eight ranks, two samples each: as good as on two."""
    run = tmp_path / "runs/quickstart"
    places = ("stages.train.nodes=4", "stages.evaluate.nodes=4", "train.micro_batch=2")
    done = run_submit(cluster, tmp_path, str(CODE_ROOT / "configs/quickstart.yaml"), f"run.root={run.parent}", *places)
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for("the end", lambda: "done" in list_event_names(run, "evaluate"), 3000)
    result = json.loads((run / "evaluation/step-00000200.json").read_text())
    assert result["bits_per_byte"] <= 0.9 * result["unigram_bits_per_byte"]
    assert f"{result['bits_per_byte']:.3f} bits per byte" in run_submit(cluster, tmp_path, "report", str(run)).stdout


def test_a_failed_shard_task_is_named_and_resume_writes_that_unit_alone(
    tmp_path: Path, calm: Path, cluster: Cluster
) -> None:
    """Four archives, a unit each; the end of the third is lost, and found again. What prepare reads of it is intact."""
    config = write_config(tmp_path, steps=5)
    source = random.Random(1)
    for part in range(4):
        documents = (json.dumps({"text": source.randbytes(4000).hex()}) + "\n" for _ in range(400 - 10 * part))
        (tmp_path / f"part-{part}.jsonl.gz").write_bytes(gzip.compress("".join(documents).encode()))
    broken = tmp_path / "part-2.jsonl.gz"
    good = broken.read_bytes()
    broken.write_bytes(good[:-20])
    tokenizer = f"data.tokenizer={{kind: file, path: {calm}/runs/tiny/data/tokenizer.json}}"
    words = (str(config), f"data.source={tmp_path}/part-*.jsonl.gz", tokenizer, "data.shard_tokens=2_000_000")
    done = run_submit(cluster, tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs/tiny"
    wait_for("the failure", lambda: "failed" in list_event_names(run, "shard"))
    wait_for("an empty queue", lambda: not cluster.run(["squeue", "-h"], timeout=60).stdout.strip(), 240)
    status = run_submit(cluster, tmp_path, "status", "runs/tiny").stdout
    assert f"cannot read {broken}" in status and "resume runs/tiny" in status and "3/4 units" in status
    failed = {e.get("task") for e in read_event_lines(Run.open(run), "shard", "failed")}
    assert failed == {0, None}, "the task of unit 2, and the job that does what the array left"
    assert "started" not in list_event_names(run, "train")
    refused = run_submit(cluster, tmp_path, *words)
    assert refused.returncode == ExitCode.USER_ERROR and f"cannot read {broken}" in refused.stderr

    def written() -> dict[str, tuple[int, bytes]]:
        return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in (run / "data/shards").iterdir()}

    before = written()
    assert {name[:10] for name in before} == {"unit-00000", "unit-00001", "unit-00003"}
    broken.write_bytes(good)
    assert run_submit(cluster, tmp_path, "resume", "runs/tiny").returncode == 0
    wait_for("the evaluation", lambda: has_evaluation(run))
    wait_for("an empty queue", lambda: not cluster.run(["squeue", "-h"], timeout=60).stdout.strip(), 240)
    after = written()
    assert before.items() <= after.items(), "the others were not touched"
    assert {name[:10] for name in after.keys() - before.keys()} == {"unit-00002"}


def test_a_node_that_crashes_under_an_array_of_shard_leaves_no_trace(tmp_path: Path, cluster: Cluster) -> None:
    """Eight tasks, two a node; each has made a unit, and has the shards of its second one written but no manifest, when
    a node loses power. Its tasks begin again elsewhere, and the folder is that of a run on this machine, byte by byte.
    """
    config = write_config(tmp_path, steps=1)
    more = ("stages.shard.tasks=8", "data.shard_tokens=1500", "optimizer.warmup_steps=1")
    spread = (*more, "site.data_jobs={cpus_per_task: 2}")
    run, gate = create_slow_run(tmp_path, config, spread), tmp_path / "gate"
    code, line = run / "code/pipeline/data/manifest.py", "    write_json(path, add_checksum(manifest.model_dump()))"
    assert code.read_text().count(line) == 1, "the manifest has changed"
    later = "path.parent.name == 'shards' and int(path.stem[5:]) >= 8"
    wait = f"    while {later} and not Path({str(gate)!r}).exists():\n        __import__('time').sleep(0.1)\n"
    code.write_text(code.read_text().replace(line, wait + line))

    def found(pattern: str) -> dict[int, tuple[int, int]]:
        """Inode and time of the files of units, by unit."""
        paths = [(path, path.stat()) for path in (run / "data/shards").glob(pattern)]
        return {int(path.name[5:10]): (stat.st_ino, stat.st_mtime_ns) for path, stat in paths}

    done = run_submit(cluster, tmp_path, str(config), *spread)
    array = re.search(r"job (\d+): array of 8", done.stdout)
    assert array is not None, done.stdout + done.stderr
    wait_for("second units", lambda: found("unit-?????-train-00.h5").keys() >= set(range(16)), 60)
    rows = cluster.output(["squeue", "-h", "-r", f"--jobs={array[1]}", "--states=R", "--format=%K %N"]).splitlines()
    nodes = {int(task): node for task, node in map(str.split, rows)}
    assert sorted(nodes) == list(range(8)) and set(Counter(nodes.values()).values()) == {2}, nodes
    lost, before = {task for task, node in nodes.items() if node == "n3"}, found("unit-?????.json")
    died = Machine("n3", cluster.directory).processes()
    try:
        cluster.crash("n3")
        assert died and not any(process.alive() for process in died)
        assert found("unit-?????.json") == before and set(before) == set(range(8)), "every second unit is undone"
        gate.touch()
        wait_for("the next stage", lambda: "started" in list_event_names(run, "train"), 200)
    finally:
        cluster.boot("n3")
        run_submit(cluster, tmp_path, "cancel", "runs/tiny")
    started = Counter(e.get("task") for e in read_event_lines(Run.open(run), "shard", "started"))
    assert {task for task, times in started.items() if times > 1} == lost, started
    assert before.items() <= found("unit-?????.json").items(), "those of the dead node, too, are not made again"
    for stage in ("prepare", "shard"):
        command = [sys.executable, "-m", "pipeline", stage, str(config), *more, "run.name=here"]
        subprocess.run(command, cwd=CODE_ROOT, check=True, capture_output=True, timeout=120)
    assert len(load_manifest(run / "data").train) > 16
    assert all_bytes(run / "data") == all_bytes(tmp_path / "runs/here/data")
    cluster.wait_idle()


def at_once(cluster: Cluster, folder: Path, *arguments: str) -> list[tuple[int, str]]:
    """Three submit.py with the same words; codes and outputs."""
    command = [sys.executable, str(CODE_ROOT / "submit.py"), *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, **cluster.environment(), "COLUMNS": "200"}
    three = [subprocess.Popen(command, cwd=folder, env=environment, **pipes) for _ in range(3)]
    outputs = [one.communicate(timeout=240)[0] for one in three]
    return [(one.returncode, output) for one, output in zip(three, outputs, strict=True)]


def test_three_at_once_submit_one_chain(tmp_path: Path, cluster: Cluster) -> None:
    """What waits for tomorrow stays in the queue, to be counted."""
    config, chain = write_config(tmp_path), ["evaluate-tiny", "prepare-tiny", "shard-tiny", "shard-tiny", "train-tiny"]
    queue = ["squeue", "-h", "--format=%j"]
    try:
        for words in (
            (str(config), "site.sbatch={begin: now+1day}"),
            ("resume", "runs/tiny"),
            ("resume", "runs/tiny", "stages.train.time='00:30:00'"),  # each asks anew, in the last one's place
        ):
            ends = at_once(cluster, tmp_path, *words)
            assert [code for code, _ in ends] == [0, 0, 0], ends
            assert sorted(cluster.output(queue).split()) == chain, ends
            if len(words) == 2:
                assert list_event_names(tmp_path / "runs/tiny").count("submitted") == len(chain), ends
                assert sum(len(re.findall(r"^\w+ +job \d+ pending$", text, re.M)) for _, text in ends) >= 8, ends
    finally:
        run_submit(cluster, tmp_path, "cancel", "runs/tiny")
    wait_for("an empty queue", lambda: not cluster.run(["squeue", "-h"], timeout=60).stdout.strip(), 240)


def test_preempted_it_requeues_itself_and_ends_with_the_same_digest(
    tmp_path: Path, calm: Path, cluster: Cluster
) -> None:
    """And is published once, whole. The first attempt at that is killed just before the folder has its name: it has
    brought nothing, so the chain waits for a person."""
    tracked = "track={tensorboard: true, telemetry_s: 1}"  # which changes no digest
    publish = (f"publish.to={tmp_path / 'models'}", "publish.license=mit", tracked)
    config = write_config_on_data(tmp_path, calm, "low")
    run = create_slow_run(tmp_path, config, (*NODES, *publish))
    stage, line = run / "code/pipeline/base/files.py", "            os.rename(temporary, folder)"
    text = stage.read_text()
    assert text.count(line) == 1, "the stage has changed"
    killed = (
        f"            if not Path('{tmp_path}/killed').exists():\n                Path('{tmp_path}/killed').touch()\n"
    )
    stage.write_text(text.replace(line, f"{killed}                os.kill(os.getpid(), 9)\n{line}"))
    assert run_submit(cluster, tmp_path, str(config), *NODES, *publish).returncode == 0
    wait_for("step 8", lambda: len(list(read_jsonl(run / "metrics.jsonl"))) >= 8)
    preempt_all_nodes(cluster)
    wait_for("the requeue", lambda: "requeued" in list_event_names(run, "train"), 60)
    wait_for("the evaluation", lambda: has_evaluation(run), 150)
    wait_for("a killed attempt", lambda: "failed" in list_event_names(run, "publish"), 120)
    assert (tmp_path / "killed").exists() and not list((tmp_path / "models/low").glob("step-*")), "none"
    # the job runs on for a moment after its event
    wait_for("an empty queue", lambda: not cluster.run(["squeue", "-h"], timeout=60).stdout.strip(), 60)
    told = run_submit(cluster, tmp_path, "status", "runs/low").stdout
    assert "killed by SIGKILL" in told and "this attempt brought nothing new" in told and "resume runs/low" in told
    assert run_submit(cluster, tmp_path, "resume", "runs/low").returncode == 0
    wait_for("the end", lambda: "done" in list_event_names(run, "publish"), 150)
    (version,) = (tmp_path / "models/low").iterdir()
    assert subprocess.run(["sha256sum", "--status", "-c", "SHA256SUMS"], cwd=version, timeout=60).returncode == 0
    assert version.name == "step-00000040" and list_event_names(run, "publish").count("started") == 2
    assert list_event_names(run, "train").count("started") >= 2
    restored = [e for e in read_event_lines(Run.open(run), "train") if e["event"] == "restored"]
    assert restored and restored[0]["lost_steps"] == 0, "the save was agreed: nothing is done again"
    assert [line["step"] for line in read_jsonl(run / "metrics.jsonl")] == list(range(1, 41))
    assert compute_run_digest(Run(tmp_path / "runs/low")) == compute_run_digest(Run(calm / "runs/tiny"))
    losses = {line["step"]: line["loss"] for line in read_jsonl(run / "metrics.jsonl")}
    assert curve(run, "train/loss") == in_float32(losses.items())
    looks = {path.name: len(list(read_jsonl(path))) for path in run.glob("telemetry-*.jsonl")}
    assert len(looks) == 4 and min(looks.values()) > 3, looks


def test_a_plain_scancel_stays_cancelled(tmp_path: Path, calm: Path, cluster: Cluster) -> None:
    config = write_config_on_data(tmp_path, calm, "gone")
    run = create_slow_run(tmp_path, config)
    assert run_submit(cluster, tmp_path, str(config), *NODES).returncode == 0
    wait_for("step 5", lambda: len(list(read_jsonl(run / "metrics.jsonl"))) >= 5)
    job = get_job_id(run, "train")
    assert cluster.run(["scancel", job], timeout=60).returncode == 0
    wait_for("its end", lambda: "CANCELLED" in cluster.run(["scontrol", "show", "job", job], timeout=60).stdout, 60)
    time.sleep(8)  # a requeue would show by now
    state = cluster.run(["squeue", "-h", "-t", "all", "-j", job, "-o", "%T"], timeout=60).stdout
    assert state.strip() == "CANCELLED" and "requeued" not in list_event_names(run, "train")
    assert not cluster.run(["squeue", "-h"], timeout=60).stdout.strip(), "the evaluation waits in vain"
    before = get_job_id(run, "evaluate")
    assert run_submit(cluster, tmp_path, "resume", "runs/gone").returncode == 0
    assert get_job_id(run, "evaluate") != before and cluster.job_state(get_job_id(run, "evaluate")) == "PENDING"
    run_submit(cluster, tmp_path, "cancel", "runs/gone")
    wait_for("an empty queue", lambda: not cluster.run(["squeue", "-h"], timeout=60).stdout.strip(), 240)


def test_cancel_saves_and_ends_the_chain(tmp_path: Path, calm: Path, cluster: Cluster) -> None:
    config = write_config_on_data(tmp_path, calm, "ended")
    run = create_slow_run(tmp_path, config)
    assert run_submit(cluster, tmp_path, str(config), *NODES).returncode == 0
    wait_for("step 5", lambda: len(list(read_jsonl(run / "metrics.jsonl"))) >= 5)
    assert run_submit(cluster, tmp_path, "cancel", "runs/ended").returncode == 0
    wait_for("its end", lambda: "cancelled" in list_event_names(run, "train"), 60)
    wait_for("an empty queue", lambda: not cluster.run(["squeue", "-h"], timeout=60).stdout.strip(), 240)
    assert find_newest_step(run / "checkpoints") == len(list(read_jsonl(run / "metrics.jsonl"))) >= 5
    assert run_submit(cluster, tmp_path, str(config), *NODES).returncode == ExitCode.USER_ERROR


@pytest.mark.parametrize("name", ["a 'b\"; $(touch pwned) & `tick` ünï"])
def test_awkward_paths_are_data_not_shell(tmp_path: Path, cluster: Cluster, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    write_broken_packages(folder)  # nor is the working directory a place to take code from
    config = write_config(folder, steps=1)
    assert run_submit(cluster, folder, "tiny.yaml", "stages.shard.tasks=1", "optimizer.warmup_steps=1").returncode == 0
    run = folder / "runs/tiny"
    wait_for("prepare", lambda: "done" in list_event_names(run, "prepare"), 40)
    job = cluster.run(["scontrol", "show", "job", get_job_id(run, "prepare")], timeout=60).stdout
    assert f"sluice {run}" in job
    run_submit(cluster, folder, "cancel", "runs/tiny")
    assert not list(tmp_path.rglob("pwned")) and config.exists()
    assert json.loads((run / "data/prepare.json").read_text())


def test_the_chain_template(tmp_path: Path, cluster: Cluster) -> None:
    config = write_config(tmp_path, steps=6)
    options = ["-N2", "--ntasks-per-node=2", f"--output={tmp_path}/log", "slurm/templates/chain.sbatch", str(config)]
    job = submit_template(cluster, tmp_path, *options, "stages.train.nodes=2", "stages.evaluate.nodes=2")
    run = tmp_path / "runs/tiny"
    wait_for("the evaluation", lambda: (run / "events.jsonl").exists() and "done" in list_event_names(run, "evaluate"))
    wait_for("its end", lambda: cluster.job_state(job) == "COMPLETED", 30)
    assert "× the unigram" in (tmp_path / "log").read_text()


def test_a_chain_that_an_admin_puts_back_goes_on(tmp_path: Path, calm: Path, cluster: Cluster) -> None:
    """Slurm's TERM reaches submit.py, which is the batch script: no person stopped anything."""
    config = write_config_on_data(tmp_path, calm, "chained")
    run = create_slow_run(tmp_path, config)
    options = ["-N4", "--ntasks-per-node=1", f"--output={tmp_path}/log", "slurm/templates/chain.sbatch"]
    job = submit_template(cluster, tmp_path, *options, str(config), *NODES)
    wait_for("step 8", lambda: len(list(read_jsonl(run / "metrics.jsonl"))) >= 8)
    cluster.output(["scontrol", "requeue", job])
    wait_for("the end", lambda: "done" in list_event_names(run, "train"), 120)
    told = read_event_lines(Run.open(run), "train")
    assert "stop file" not in [e.get("by") for e in told] + [e.get("cause") for e in told]
    assert [e["restarts"] for e in told if e["event"] == "started"] == [0, 1]
    assert compute_run_digest(Run(tmp_path / "runs/chained")) == compute_run_digest(Run(calm / "runs/tiny"))


def test_the_train_template_requeues_itself_where_only_the_batch_script_is_told(
    tmp_path: Path, calm: Path, cluster: Cluster
) -> None:
    run = create_slow_run(tmp_path, write_config_on_data(tmp_path, calm, "template"))
    options = ["-N4", "--ntasks-per-node=1", "--signal=B:USR1@60", f"--output={tmp_path}/log"]
    submit_template(cluster, tmp_path, *options, "slurm/templates/train.sbatch", str(run))
    wait_for("step 8", lambda: len(list(read_jsonl(run / "metrics.jsonl"))) >= 8)
    preempt_all_nodes(cluster)
    wait_for("the requeue", lambda: "requeued" in list_event_names(run, "train"), 60)
    wait_for("the end", lambda: "done" in list_event_names(run, "train"), 120)
    told = [(e["by"], e["cause"]) for e in read_event_lines(Run.open(run), "train") if e["event"] == "stopping"]
    assert told == [("SIGUSR1", "preempted")]
    assert compute_run_digest(Run(tmp_path / "runs/template")) == compute_run_digest(Run(calm / "runs/tiny"))


def test_templates_are_clean_shell() -> None:
    if shutil.which("shellcheck") is None:
        skip_or_fail_in_ci("shellcheck is not installed (.ci/install-packages does that)")
    for path in sorted((CODE_ROOT / "slurm/templates").glob("*.sbatch")):
        done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout

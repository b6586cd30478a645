"""Test the chain of a run on a real Slurm with four nodes: submission, training, stops, requeues and cancellation."""

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
from tests.data_prep.test_shards import read_all_files
from tests.stories.test_local_runs import write_broken_packages
from tests.support.cluster_runs import (
    TRAIN_ON_4_NODES,
    count_steps,
    create_slow_run,
    get_job_id,
    has_evaluation,
    list_event_names,
    preempt_all_nodes,
    run_submit,
    submit_template,
    wait_for,
    wait_for_empty_queue,
    write_config_with_copied_data,
)
from tests.support.edits import replace_in_file
from tests.support.events import read_event_lines
from tests.support.requirements import skip_or_fail_in_ci
from tests.support.tiny import compute_run_digest, write_config
from tests.tracking.test_followers import read_tensorboard_curve, round_to_float32

cluster = cluster_fixture(grace=5)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def reference(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a chain on four nodes without interruptions. Return the folder with the completed run `runs/tiny`."""
    folder = tmp_path_factory.mktemp("reference")
    write_config(folder, steps=40)
    start = time.monotonic()
    result = run_submit(cluster, folder, "tiny.yaml", *TRAIN_ON_4_NODES)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(re.findall(r"^\w+ +job \d+", result.stdout, re.M)) == 5, result.stdout
    assert time.monotonic() - start < 20, "submit.py must not wait for jobs"
    assert not has_evaluation(folder / "runs/tiny")
    wait_for("the evaluation", lambda: has_evaluation(folder / "runs/tiny"))
    wait_for("the last event", lambda: "done" in list_event_names(folder / "runs/tiny", "evaluate"))
    return folder


def test_the_chain_runs_on_four_nodes(reference: Path, cluster: Cluster) -> None:
    """The fixture has run the chain. Submitting its config again must show that all stages are done."""
    run = reference / "runs/tiny"
    assert [line["step"] for line in read_jsonl(run / "metrics.jsonl")] == list(range(1, 41))
    [event] = read_event_lines(Run.open(run), "train", "started")
    assert event["ranks"] == 4
    assert len(list((run / "jobs/train").glob("rank-*.log"))) == 4
    status = run_submit(cluster, reference, "status", "runs/tiny").stdout
    assert len(re.findall(r"^(prepare|shard|train|evaluate) +done", status, re.M)) == 4, status
    output = run_submit(cluster, reference, "tiny.yaml", *TRAIN_ON_4_NODES).stdout
    assert len(re.findall(r"^\w+ +done", output, re.M)) == 4, output


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_quickstart_learns_on_four_nodes(tmp_path: Path, cluster: Cluster) -> None:
    run = tmp_path / "runs/quickstart"
    overrides = (f"run.root={run.parent}", "stages.train.nodes=4", "stages.evaluate.nodes=4", "train.micro_batch=2")
    result = run_submit(cluster, tmp_path, str(CODE_ROOT / "configs/quickstart.yaml"), *overrides)
    assert result.returncode == 0, result.stdout + result.stderr
    wait_for("the evaluation", lambda: "done" in list_event_names(run, "evaluate"), 3000)
    evaluation = json.loads((run / "evaluation/step-00000200.json").read_text())
    assert evaluation["bits_per_byte"] <= 0.9 * evaluation["unigram_bits_per_byte"]
    report = run_submit(cluster, tmp_path, "report", str(run)).stdout
    assert f"{evaluation['bits_per_byte']:.3f} bits per byte" in report


def test_resume_after_a_failed_shard_task_writes_only_the_missing_work_unit(
    tmp_path: Path, reference: Path, cluster: Cluster
) -> None:
    """Each of four compressed files is a work unit. At first, the third file is truncated.

    prepare reads only the beginning of the files, so it does not fail.
    """
    config = write_config(tmp_path, steps=5)
    generator = random.Random(1)
    for number in range(4):
        documents = (json.dumps({"text": generator.randbytes(4000).hex()}) + "\n" for _ in range(400 - 10 * number))
        (tmp_path / f"part-{number}.jsonl.gz").write_bytes(gzip.compress("".join(documents).encode()))
    damaged_file = tmp_path / "part-2.jsonl.gz"
    intact_content = damaged_file.read_bytes()
    damaged_file.write_bytes(intact_content[:-20])
    tokenizer = f"data.tokenizer={{kind: file, path: {reference}/runs/tiny/data/tokenizer.json}}"
    arguments = (str(config), f"data.source={tmp_path}/part-*.jsonl.gz", tokenizer, "data.shard_tokens=2_000_000")
    result = run_submit(cluster, tmp_path, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    run = tmp_path / "runs/tiny"
    wait_for("the failure", lambda: "failed" in list_event_names(run, "shard"))
    wait_for_empty_queue(cluster)
    status = run_submit(cluster, tmp_path, "status", "runs/tiny").stdout
    assert str(damaged_file) in status and "resume runs/tiny" in status and "3/4 units" in status
    failed_tasks = {event.get("task") for event in read_event_lines(Run.open(run), "shard", "failed")}
    assert failed_tasks == {0, None}, "array task 0, which writes unit 2, and the job after the array must fail"
    assert "started" not in list_event_names(run, "train")
    result = run_submit(cluster, tmp_path, *arguments)
    assert result.returncode == ExitCode.USER_ERROR and str(damaged_file) in result.stderr

    def read_shards() -> dict[str, tuple[int, bytes]]:
        """Return modification time and content of each file of the shards, by name."""
        return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in (run / "data/shards").iterdir()}

    shards_before = read_shards()
    assert {name[:10] for name in shards_before} == {"unit-00000", "unit-00001", "unit-00003"}
    damaged_file.write_bytes(intact_content)
    assert run_submit(cluster, tmp_path, "resume", "runs/tiny").returncode == 0
    wait_for("the evaluation", lambda: has_evaluation(run))
    wait_for_empty_queue(cluster)
    shards_after = read_shards()
    assert shards_before.items() <= shards_after.items(), "the other units must not change"
    assert {name[:10] for name in shards_after.keys() - shards_before.keys()} == {"unit-00002"}


def test_a_node_crash_during_a_shard_array_does_not_change_the_data(tmp_path: Path, cluster: Cluster) -> None:
    """Eight array tasks run on four nodes, and each writes two work units.

    A node crashes when all tasks have completed their first units, but not the manifests of their second units. At this
    point, the edited code waits for the file `gate`. The tasks of the node start again on other nodes. The data
    must equal the data of a run on this machine.
    """
    config = write_config(tmp_path, steps=1)
    overrides = ("stages.shard.tasks=8", "data.shard_tokens=1500", "optimizer.warmup_steps=1")
    cluster_overrides = (*overrides, "site.data_jobs={cpus_per_task: 2}")  # two tasks fit on a node with four CPUs
    run = create_slow_run(tmp_path, config, cluster_overrides)
    gate = tmp_path / "gate"
    module = run / "code/pipeline/data/manifest.py"
    write_line = "    write_json(path, add_checksum(manifest.model_dump()))"
    is_second_unit = "path.parent.name == 'shards' and int(path.stem[5:]) >= 8"
    wait_lines = (
        f"    while {is_second_unit} and not Path({str(gate)!r}).exists():\n        __import__('time').sleep(0.1)\n"
    )
    replace_in_file(module, write_line, wait_lines + write_line)

    def stat_files(pattern: str) -> dict[int, tuple[int, int]]:
        """Return inode and modification time of the files that match `pattern`, by work unit."""
        paths = [(path, path.stat()) for path in (run / "data/shards").glob(pattern)]
        return {int(path.name[5:10]): (stat.st_ino, stat.st_mtime_ns) for path, stat in paths}

    result = run_submit(cluster, tmp_path, str(config), *cluster_overrides)
    match = re.search(r"job (\d+): array of 8", result.stdout)
    assert match is not None, result.stdout + result.stderr
    wait_for(
        "the shards of the second units", lambda: stat_files("unit-?????-train-00.h5").keys() >= set(range(16)), 60
    )
    tasks = cluster.output(["squeue", "-h", "-r", f"--jobs={match[1]}", "--states=R", "--format=%K %N"]).splitlines()
    node_by_task = {int(task): node for task, node in map(str.split, tasks)}
    assert sorted(node_by_task) == list(range(8))
    assert set(Counter(node_by_task.values()).values()) == {2}, node_by_task
    lost_tasks = {task for task, node in node_by_task.items() if node == "n3"}
    manifests_before = stat_files("unit-?????.json")
    processes = Machine("n3", cluster.directory).processes()
    try:
        cluster.crash("n3")
        assert processes and not any(process.is_alive() for process in processes)
        assert stat_files("unit-?????.json") == manifests_before
        assert set(manifests_before) == set(range(8)), "only the first unit of each task may be complete"
        gate.touch()
        wait_for("the next stage", lambda: "started" in list_event_names(run, "train"), 200)
    finally:
        cluster.boot("n3")
        run_submit(cluster, tmp_path, "cancel", "runs/tiny")
    starts = Counter(event.get("task") for event in read_event_lines(Run.open(run), "shard", "started"))
    assert {task for task, count in starts.items() if count > 1} == lost_tasks, starts
    assert manifests_before.items() <= stat_files("unit-?????.json").items(), "complete units must not be written again"
    for stage in ("prepare", "shard"):
        command = [sys.executable, "-m", "pipeline", stage, str(config), *overrides, "run.name=local"]
        subprocess.run(command, cwd=CODE_ROOT, check=True, capture_output=True, timeout=120)
    assert len(load_manifest(run / "data").train) > 16
    assert read_all_files(run / "data") == read_all_files(tmp_path / "runs/local/data")
    cluster.wait_idle()


def submit_three_times(cluster: Cluster, folder: Path, *arguments: str) -> list[tuple[int, str]]:
    """Run submit.py three times at once with these arguments. Return the exit code and the output of each."""
    command = [sys.executable, str(CODE_ROOT / "submit.py"), *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, **cluster.environment(), "COLUMNS": "200"}
    processes = [subprocess.Popen(command, cwd=folder, env=environment, **pipes) for _ in range(3)]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def test_three_concurrent_submits_submit_one_chain(tmp_path: Path, cluster: Cluster) -> None:
    """The jobs may start only tomorrow, so they stay in the queue and can be counted."""
    config = write_config(tmp_path)
    job_names = ["evaluate-tiny", "prepare-tiny", "shard-tiny", "shard-tiny", "train-tiny"]
    squeue = ["squeue", "-h", "--format=%j"]
    try:
        for arguments in (
            (str(config), "site.sbatch={begin: now+1day}"),
            ("resume", "runs/tiny"),
            # each of the three commands replaces the jobs of the previous command
            ("resume", "runs/tiny", "stages.train.time='00:30:00'"),
        ):
            results = submit_three_times(cluster, tmp_path, *arguments)
            assert [code for code, _ in results] == [0, 0, 0], results
            assert sorted(cluster.output(squeue).split()) == job_names, results
            if len(arguments) == 2:  # one command submitted the 5 jobs; each other command finds all or most of them
                assert list_event_names(tmp_path / "runs/tiny").count("submitted") == len(job_names), results
                pending_lines = [re.findall(r"^\w+ +job \d+ pending$", output, re.M) for _, output in results]
                assert sum(map(len, pending_lines)) >= 8, results
    finally:
        run_submit(cluster, tmp_path, "cancel", "runs/tiny")
    wait_for_empty_queue(cluster)


def test_a_preempted_run_requeues_itself_and_has_the_same_digest(
    tmp_path: Path, reference: Path, cluster: Cluster
) -> None:
    """Also, the first attempt of publish is killed just before it renames the folder with the model.

    This attempt makes no progress, so the stage is not retried until the user runs `resume`. Then the complete model
    must be published, and only once. The curve in TensorBoard must have each step once.
    """
    track = "track={tensorboard: true, telemetry_s: 1}"  # does not change the digest
    publish = (f"publish.to={tmp_path / 'models'}", "publish.license=mit", track)
    config = write_config_with_copied_data(tmp_path, reference, "low")
    run = create_slow_run(tmp_path, config, (*TRAIN_ON_4_NODES, *publish))
    module = run / "code/pipeline/base/files.py"
    rename_line = "            os.rename(temporary, folder)"
    kill_lines = (
        f"            if not Path('{tmp_path}/killed').exists():\n"
        f"                Path('{tmp_path}/killed').touch()\n"
        "                os.kill(os.getpid(), 9)\n"
    )
    replace_in_file(module, rename_line, f"{kill_lines}{rename_line}")
    assert run_submit(cluster, tmp_path, str(config), *TRAIN_ON_4_NODES, *publish).returncode == 0
    wait_for("step 8", lambda: count_steps(run) >= 8)
    preempt_all_nodes(cluster)
    wait_for("the requeue", lambda: "requeued" in list_event_names(run, "train"), 60)
    wait_for("the evaluation", lambda: has_evaluation(run), 150)
    wait_for("a killed attempt", lambda: "failed" in list_event_names(run, "publish"), 120)
    assert (tmp_path / "killed").exists() and not list((tmp_path / "models/low").glob("step-*"))
    wait_for_empty_queue(cluster, 60)  # the job still runs for a moment after its last event
    status = run_submit(cluster, tmp_path, "status", "runs/low").stdout
    assert "SIGKILL" in status and "resume runs/low" in status, status
    assert run_submit(cluster, tmp_path, "resume", "runs/low").returncode == 0
    wait_for("the published model", lambda: "done" in list_event_names(run, "publish"), 150)
    (model_folder,) = (tmp_path / "models/low").iterdir()
    check_hashes = ["sha256sum", "--status", "-c", "SHA256SUMS"]
    assert subprocess.run(check_hashes, cwd=model_folder, timeout=60).returncode == 0
    assert model_folder.name == "step-00000040" and list_event_names(run, "publish").count("started") == 2
    assert list_event_names(run, "train").count("started") >= 2
    restored = read_event_lines(Run.open(run), "train", "restored")
    assert restored and restored[0]["lost_steps"] == 0, "no step may be repeated"
    assert [line["step"] for line in read_jsonl(run / "metrics.jsonl")] == list(range(1, 41))
    assert compute_run_digest(Run(tmp_path / "runs/low")) == compute_run_digest(Run(reference / "runs/tiny"))
    losses = {line["step"]: line["loss"] for line in read_jsonl(run / "metrics.jsonl")}
    assert read_tensorboard_curve(run, "train/loss") == round_to_float32(losses.items())
    line_counts = {path.name: len(list(read_jsonl(path))) for path in run.glob("telemetry-*.jsonl")}
    assert len(line_counts) == 4 and min(line_counts.values()) > 3, line_counts


def test_a_job_ended_by_scancel_is_not_requeued(tmp_path: Path, reference: Path, cluster: Cluster) -> None:
    """The evaluate job, which depends on the train job, is cancelled, and `resume` submits it again."""
    config = write_config_with_copied_data(tmp_path, reference, "gone")
    run = create_slow_run(tmp_path, config)
    assert run_submit(cluster, tmp_path, str(config), *TRAIN_ON_4_NODES).returncode == 0
    wait_for("step 5", lambda: count_steps(run) >= 5)
    job_id = get_job_id(run, "train")
    assert cluster.run(["scancel", job_id], timeout=60).returncode == 0
    show_job = ["scontrol", "show", "job", job_id]
    wait_for("the end of the job", lambda: "CANCELLED" in cluster.run(show_job, timeout=60).stdout, 60)
    time.sleep(8)  # long enough for a requeue
    state = cluster.run(["squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T"], timeout=60).stdout
    assert state.strip() == "CANCELLED" and "requeued" not in list_event_names(run, "train")
    assert not cluster.run(["squeue", "-h"], timeout=60).stdout.strip(), "the evaluate job must also be cancelled"
    evaluate_job_id = get_job_id(run, "evaluate")
    assert run_submit(cluster, tmp_path, "resume", "runs/gone").returncode == 0
    assert get_job_id(run, "evaluate") != evaluate_job_id
    assert cluster.job_state(get_job_id(run, "evaluate")) == "PENDING"
    run_submit(cluster, tmp_path, "cancel", "runs/gone")
    wait_for_empty_queue(cluster)


def test_cancel_saves_a_checkpoint_and_cancels_the_chain(tmp_path: Path, reference: Path, cluster: Cluster) -> None:
    config = write_config_with_copied_data(tmp_path, reference, "ended")
    run = create_slow_run(tmp_path, config)
    assert run_submit(cluster, tmp_path, str(config), *TRAIN_ON_4_NODES).returncode == 0
    wait_for("step 5", lambda: count_steps(run) >= 5)
    assert run_submit(cluster, tmp_path, "cancel", "runs/ended").returncode == 0
    wait_for("the end of train", lambda: "cancelled" in list_event_names(run, "train"), 60)
    wait_for_empty_queue(cluster)
    assert find_newest_step(run / "checkpoints") == count_steps(run) >= 5
    assert run_submit(cluster, tmp_path, str(config), *TRAIN_ON_4_NODES).returncode == ExitCode.USER_ERROR


@pytest.mark.parametrize("name", ["a 'b\"; $(touch pwned) & `tick` ünï"])
def test_special_characters_in_paths_are_not_interpreted_by_a_shell(
    tmp_path: Path, cluster: Cluster, name: str
) -> None:
    """If a shell interpreted the name of the folder, it would create the file `pwned`."""
    folder = tmp_path / name
    folder.mkdir()
    write_broken_packages(folder)  # jobs must not import code from the working directory
    config = write_config(folder, steps=1)
    assert run_submit(cluster, folder, "tiny.yaml", "stages.shard.tasks=1", "optimizer.warmup_steps=1").returncode == 0
    run = folder / "runs/tiny"
    wait_for("prepare", lambda: "done" in list_event_names(run, "prepare"), 40)
    job_info = cluster.run(["scontrol", "show", "job", get_job_id(run, "prepare")], timeout=60).stdout
    assert f"sluice {run}" in job_info, "the comment of the job must contain the unchanged path"
    run_submit(cluster, folder, "cancel", "runs/tiny")
    assert not list(tmp_path.rglob("pwned")) and config.exists()
    assert json.loads((run / "data/prepare.json").read_text())


def test_the_chain_template_runs_all_stages(tmp_path: Path, cluster: Cluster) -> None:
    config = write_config(tmp_path, steps=6)
    options = ["-N2", "--ntasks-per-node=2", f"--output={tmp_path}/log", "slurm/templates/chain.sbatch", str(config)]
    job_id = submit_template(cluster, *options, "stages.train.nodes=2", "stages.evaluate.nodes=2")
    run = tmp_path / "runs/tiny"
    wait_for("the evaluation", lambda: (run / "events.jsonl").exists() and "done" in list_event_names(run, "evaluate"))
    wait_for("the end of the job", lambda: cluster.job_state(job_id) == "COMPLETED", 30)
    assert "unigram" in (tmp_path / "log").read_text()


def test_a_chain_that_an_administrator_requeues_continues(tmp_path: Path, reference: Path, cluster: Cluster) -> None:
    """submit.py runs in the batch script of the template and receives SIGTERM from Slurm.

    submit.py must not treat this signal as a request of the user to stop the run.
    """
    config = write_config_with_copied_data(tmp_path, reference, "chained")
    run = create_slow_run(tmp_path, config)
    options = ["-N4", "--ntasks-per-node=1", f"--output={tmp_path}/log", "slurm/templates/chain.sbatch"]
    job_id = submit_template(cluster, *options, str(config), *TRAIN_ON_4_NODES)
    wait_for("step 8", lambda: count_steps(run) >= 8)
    cluster.output(["scontrol", "requeue", job_id])
    wait_for("the end of train", lambda: "done" in list_event_names(run, "train"), 120)
    events = read_event_lines(Run.open(run), "train")
    assert "stop file" not in [event.get("by") for event in events] + [event.get("cause") for event in events]
    assert [event["restarts"] for event in events if event["event"] == "started"] == [0, 1]
    assert compute_run_digest(Run(tmp_path / "runs/chained")) == compute_run_digest(Run(reference / "runs/tiny"))


def test_the_train_template_requeues_itself_if_only_the_batch_script_is_signalled(
    tmp_path: Path, reference: Path, cluster: Cluster
) -> None:
    """With `--signal=B:…`, Slurm sends the signal only to the batch script, not to the ranks."""
    run = create_slow_run(tmp_path, write_config_with_copied_data(tmp_path, reference, "template"))
    options = ["-N4", "--ntasks-per-node=1", "--signal=B:USR1@60", f"--output={tmp_path}/log"]
    submit_template(cluster, *options, "slurm/templates/train.sbatch", str(run))
    wait_for("step 8", lambda: count_steps(run) >= 8)
    preempt_all_nodes(cluster)
    wait_for("the requeue", lambda: "requeued" in list_event_names(run, "train"), 60)
    wait_for("the end of train", lambda: "done" in list_event_names(run, "train"), 120)
    (stopping,) = read_event_lines(Run.open(run), "train", "stopping")
    assert (stopping["by"], stopping["cause"]) == ("SIGUSR1", "preempted")
    assert compute_run_digest(Run(tmp_path / "runs/template")) == compute_run_digest(Run(reference / "runs/tiny"))


def test_templates_pass_shellcheck() -> None:
    if shutil.which("shellcheck") is None:
        skip_or_fail_in_ci("shellcheck is not installed (.ci/install-packages installs it)")
    for path in sorted((CODE_ROOT / "slurm/templates").glob("*.sbatch")):
        result = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, timeout=240)
        assert result.returncode == 0, result.stdout

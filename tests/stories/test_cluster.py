"""Test the test cluster (tests/cluster) itself, and how its Slurm handles preemption and crashed nodes.

Other tests rely on the cluster. If they fail while these tests pass, the error is in Sluice.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.base.errors import UserError
from tests.cluster import NODES, Cluster, Options
from tests.cluster.cluster import find_cluster_problem
from tests.cluster.fixture import cluster_fixture, require_cluster
from tests.cluster.machines import Machine, Process

cluster = cluster_fixture(grace=0, user_signal=False, slurmd_timeout=3)
accounting_cluster = cluster_fixture(accounting=True)
netns_cluster = cluster_fixture(netns=True, slurmd_timeout=3)


@pytest.fixture
def directory() -> Iterator[Path]:
    """Yield an empty folder with a short path. Afterwards, stop the cluster in the folder if it still runs."""
    require_cluster(Options(netns=True))
    folder = Path(tempfile.mkdtemp(prefix="sluice-cluster-", dir="/tmp"))
    yield folder
    Cluster(folder).down()
    if folder.exists():
        folder.rmdir()


def list_traces(directory: Path) -> list[str]:
    """Return a description of each process, network device and mount on this host that belongs to the cluster."""
    traces = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            description = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
        except OSError:
            continue
        if str(directory).encode() in description and int(process.name) != os.getpid():
            traces.append(f"process {process.name}: {(process / 'cmdline').read_text()}")
    links = subprocess.run(["ip", "-oneline", "link"], capture_output=True, text=True, timeout=10).stdout
    traces += [line for line in links.splitlines() if Cluster(directory).network.bridge in line]
    traces += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(directory) in line]
    return traces


def make_cluster_command(*arguments: str) -> list[str]:
    """Return the command line of `python -m tests.cluster` with these arguments."""
    return [sys.executable, "-m", "tests.cluster", *arguments]


def wait_for_text(path: Path, text: str, timeout: float) -> str:
    """Wait until a file contains `text` and return its content."""
    deadline = time.monotonic() + timeout
    while text not in (content := path.read_text() if path.exists() else ""):
        assert time.monotonic() < deadline, f"no {text!r} in {path.name}: {content!r}"
        time.sleep(0.1)
    return content


def test_four_nodes_are_idle_and_have_host_names(cluster: Cluster) -> None:
    assert cluster.node_states() == dict.fromkeys(NODES, "idle")
    assert sorted(cluster.output(["srun", "-N4", "hostname"]).split()) == list(NODES)
    names = cluster.output(["srun", "-N1", "getent", "hosts", *NODES]).split()
    assert names == ["127.0.0.11", "n1", "127.0.0.12", "n2", "127.0.0.13", "n3", "127.0.0.14", "n4"]


def test_tasks_run_on_their_nodes_and_share_files(cluster: Cluster, tmp_path: Path) -> None:
    program = "import os, pathlib; pathlib.Path(os.environ['SLURM_PROCID']).write_text(os.uname().nodename)"
    cluster.output(["srun", "-wn1,n2", "--ntasks-per-node=2", f"--chdir={tmp_path}", sys.executable, "-c", program])
    assert [(tmp_path / str(rank)).read_text() for rank in range(4)] == ["n1", "n1", "n2", "n2"]


def test_a_batch_job_and_an_allocation_start_steps(cluster: Cluster, tmp_path: Path) -> None:
    cluster.output(["sbatch", "--wait", "-wn1,n2", f"--output={tmp_path}/out", "--wrap=srun hostname"])
    assert sorted((tmp_path / "out").read_text().split()) == ["n1", "n2"]
    assert sorted(cluster.output(["salloc", "-wn1,n2", "srun", "hostname"]).split()) == ["n1", "n2"]


def test_jobs_get_fake_gpus(cluster: Cluster) -> None:
    print_gpus = ["bash", "-c", "echo ${CUDA_VISIBLE_DEVICES:-none}"]
    assert cluster.output(["srun", "-N2", "--gpus-per-node=2", *print_gpus]).split() == ["0,1", "0,1"]
    assert cluster.output(["srun", "--gres=gpu:h100:1", *print_gpus]) == "0"
    assert cluster.output(["srun", *print_gpus]) == "none"


def test_a_job_of_low_priority_is_preempted_and_runs_again(cluster: Cluster, tmp_path: Path) -> None:
    """The job writes its restart count at each start, and "term" when it receives SIGTERM."""
    log = tmp_path / "log"
    script = tmp_path / "job"
    script.write_text(f"""#!/bin/bash
echo "start ${{SLURM_RESTART_COUNT-first}}" >> {log}
[ -n "$SLURM_RESTART_COUNT" ] && exit 0
srun bash -c 'trap "echo term >> {log}" TERM; echo ready >> {log}; while :; do sleep 0.1; done'
""")
    low_priority_job = cluster.output(["sbatch", "--parsable", "-N4", "-c4", "--output=/dev/null", str(script)])
    wait_for_text(log, "ready\n" * 4, timeout=240)
    cluster.output(["srun", "--partition=high", "-N4", "-c4", "true"], timeout=240)
    cluster.wait_job(low_priority_job, "COMPLETED", timeout=240)
    lines = log.read_text().splitlines()
    assert lines[0] == "start first" and lines[-1] == "start 1" and "term" in lines
    cluster.wait_idle()


@pytest.mark.long
def test_a_crashed_node_is_down_until_it_boots_and_its_job_runs_again(cluster: Cluster, tmp_path: Path) -> None:
    """All processes of the node end with it, including one in another session (`setsid`)."""
    echo = f"echo start ${{SLURM_RESTART_COUNT-0}} on $SLURMD_NODENAME >> {tmp_path}/log"
    wrap = f"--wrap=setsid sleep 1000 & {echo}; wait"
    job = cluster.output(["sbatch", "--parsable", "--nodelist=n2", "--output=/dev/null", wrap])
    wait_for_text(tmp_path / "log", "start 0 on n2\n", timeout=240)
    processes = Machine("n2", cluster.directory).processes()
    cluster.crash("n2")
    assert not any(process.is_alive() for process in processes)
    cluster.wait_nodes("down*", nodes=["n2"], timeout=240)
    cluster.boot("n2")
    cluster.wait_nodes("idle", "mixed", nodes=["n2"], timeout=240)
    wait_for_text(tmp_path / "log", "start 1 on n2\n", timeout=240)
    assert cluster.job_state(job) == "RUNNING"
    cluster.clear()


def test_a_drained_node_gets_no_jobs(cluster: Cluster) -> None:
    cluster.drain("n1")
    cluster.wait_nodes("drained", nodes=["n1"])
    assert cluster.output(["srun", "-N3", "hostname"]).split().count("n1") == 0
    cluster.undrain("n1")
    cluster.wait_idle()


def test_the_command_line_controls_the_same_cluster(cluster: Cluster) -> None:
    """`python -m tests.cluster` shows the cluster that this test started. Invalid commands are errors with a remedy."""
    directory = ["--directory", str(cluster.directory)]
    status = subprocess.run(make_cluster_command("status", *directory), capture_output=True, text=True, timeout=240)
    assert status.returncode == 0 and status.stdout.count("runs  idle") == 4
    set_environment = f'eval "$({" ".join(make_cluster_command("env", *directory))})"'
    shell = f"{set_environment}; sinfo --noheader --format=%D --partition=high"
    assert subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=240).stdout == "4\n"
    for arguments, fact in (
        (["crash", "n9"], "n1, n2, n3, n4"),
        (["disconnect", "n1"], "--netns"),
        (["boot", "n1"], "crash"),
        (["up"], "down"),
    ):
        result = subprocess.run(
            make_cluster_command(*arguments, *directory), capture_output=True, text=True, timeout=240
        )
        assert result.returncode == 1 and fact in result.stderr and "Traceback" not in result.stderr, result
    assert all(cluster.machines().values())


def test_options_of_the_cluster_configure_slurm(cluster: Cluster, accounting_cluster: Cluster) -> None:
    """The first cluster has the options at the top of this module. The second cluster has the default values."""
    for test_cluster, sends_signal, grace, timeout in ((cluster, False, 0, 3), (accounting_cluster, True, 10, 15)):
        settings = test_cluster.output(["scontrol", "show", "config"])
        assert ("preempt_send_user_signal" in settings) is sends_signal
        assert f"SlurmdTimeout           = {timeout} sec" in settings
        low, high = (
            test_cluster.output(["scontrol", "--oneliner", "show", "partition", name]) for name in ("low", "high")
        )
        assert f"GraceTime={grace} " in low and "PreemptMode=REQUEUE" in low and "PreemptMode=OFF" in high


def test_accounting_reports_a_completed_job(accounting_cluster: Cluster) -> None:
    job_id = accounting_cluster.output(["sbatch", "--parsable", "--wait", "--output=/dev/null", "--wrap=exit 0"])
    query = ["sacct", f"--jobs={job_id}", "--allocations", "--noheader", "--parsable2"]
    deadline = time.monotonic() + 30
    while (row := accounting_cluster.output([*query, "--format=JobID,State,Partition"])) != f"{job_id}|COMPLETED|low":
        assert time.monotonic() < deadline, row
        time.sleep(0.2)


def test_nodes_with_network_namespaces_reach_each_other_until_disconnected(netns_cluster: Cluster) -> None:
    """n1 connects to a closed port of n3. If n3 is reachable, it refuses the connection."""
    assert sorted(netns_cluster.output(["srun", "-N4", "hostname"]).split()) == list(NODES)
    script = "timeout 2 bash -c '</dev/tcp/n3/1' 2>&1 | grep -q refused && echo reachable || echo unreachable"
    connect = ["srun", "--nodelist=n1", "bash", "-c", script]
    assert netns_cluster.output(connect) == "reachable"
    netns_cluster.disconnect_node("n3")
    assert netns_cluster.output(connect) == "unreachable"
    netns_cluster.reconnect_node("n3")
    assert netns_cluster.output(connect) == "reachable"
    netns_cluster.crash("n3")
    assert netns_cluster.output(connect) == "unreachable"
    netns_cluster.boot("n3")
    assert netns_cluster.output(connect) == "reachable"


@pytest.mark.long
def test_slurm_notices_that_a_node_is_disconnected_and_connected_again(netns_cluster: Cluster) -> None:
    netns_cluster.wait_idle()
    netns_cluster.disconnect_node("n4")
    netns_cluster.wait_nodes("down*", nodes=["n4"], timeout=240)
    netns_cluster.reconnect_node("n4")
    netns_cluster.wait_idle(timeout=240)


def test_down_removes_all_processes_networks_and_mounts(directory: Path) -> None:
    test_cluster = Cluster(directory).up(Options(netns=True))
    test_cluster.output(["sbatch", "-N2", "--output=/dev/null", "--wrap=srun setsid sleep 1000"])
    processes = [process for name in test_cluster.machines() for process in Machine(name, directory).processes()]
    # two processes for each of four nodes, munge and slurmctld
    assert len(processes) == 12 and all(process.is_alive() for process in processes)
    traces = list_traces(directory)
    assert any("slurmd" in trace for trace in traces) and test_cluster.network.bridge in str(traces)
    test_cluster.down()
    assert not any(process.is_alive() for process in processes)
    assert list_traces(directory) == [] and not directory.exists()
    test_cluster.down()  # a second call must do nothing


@pytest.mark.parametrize("last_file", ["site", "machines/munge", "machines/n1", "machines/n4"])
def test_down_removes_everything_after_up_was_killed(directory: Path, last_file: str) -> None:
    """`up` is killed as soon as it has written the file `last_file`.json."""
    up = subprocess.Popen(make_cluster_command("up", "--netns", "--directory", str(directory)))
    deadline = time.monotonic() + 60
    while not (directory / f"{last_file}.json").exists():
        assert up.poll() is None and time.monotonic() < deadline
    os.kill(up.pid, signal.SIGKILL)
    up.wait(10)
    assert directory.exists()
    Cluster(directory).down()
    deadline = time.monotonic() + 5
    while traces := list_traces(directory):  # a machine without a record exits soon after `up` has died
        assert time.monotonic() < deadline, traces
    assert not directory.exists()


def test_a_machine_without_a_record_exits(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The starting process fails after it has started the machine, before it has written the record of the machine.

    Without a record, `down` could not end the machine. The machine must exit without running its command.
    """

    def fail(path: Path, text: str) -> None:
        time.sleep(0.5)  # a machine that did not wait for its record would run its command now
        raise OSError("simulated failure")

    for folder in ("log", "machines"):
        (directory / folder).mkdir()
    (directory / "hosts").touch()
    monkeypatch.setattr("tests.cluster.machines.write_file_atomically", fail)
    with pytest.raises(OSError, match="simulated failure"):
        Machine("n1", directory).start("n1", ["touch", directory / "command_was_run"])
    deadline = time.monotonic() + 5
    while traces := list_traces(directory):
        assert time.monotonic() < deadline, traces
    assert not (directory / "command_was_run").exists()
    shutil.rmtree(directory)


def test_up_reports_the_reason_of_a_failure_and_removes_everything(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.cluster.config.format_slurm_conf", lambda directory, site: "NoSuchKey=1\n")
    with pytest.raises(RuntimeError) as raised:
        Cluster(directory).up(Options(netns=True))
    assert "slurmctld" in str(raised.value) and "NoSuchKey" in str(raised.value)
    assert list_traces(directory) == [] and not directory.exists()


def test_a_directory_with_other_files_is_rejected_and_unchanged(directory: Path) -> None:
    (directory / "thesis").write_text("text")
    with pytest.raises(UserError):
        Cluster(directory).up()
    Cluster(directory).down()
    assert (directory / "thesis").read_text() == "text"
    (directory / "thesis").unlink()


def test_a_process_with_a_recycled_pid_is_not_killed() -> None:
    """A process is identified by its PID and its start time."""
    with subprocess.Popen(["sleep", "60"]) as sleep:
        current_process = Process.parse(Path(f"/proc/{sleep.pid}/stat").read_text())
        earlier_process = Process(current_process.pid, current_process.start - 1)
        assert current_process.is_alive() and not earlier_process.is_alive()
        earlier_process.end()
        assert sleep.poll() is None
        current_process.end()
        assert sleep.wait(10) == -signal.SIGKILL and not current_process.is_alive()


def test_a_missing_requirement_skips_the_test_or_fails_it_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a user other than root, root is missing. For root, this test hides all programs."""
    if os.geteuid() == 0:
        monkeypatch.setattr("tests.cluster.cluster.shutil.which", lambda name: None)
    reason = find_cluster_problem(Options())
    assert reason and ("install-packages" in reason or "root" in reason)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception):
        require_cluster(Options())
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception):
        require_cluster(Options())

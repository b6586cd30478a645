"""Test the output of `--dry-run`: summary, jobs, layout, memory, inputs and warnings."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import typer

from cli import submit
from cli.main import app
from pipeline.base.console import PlainConsole
from pipeline.base.errors import ExitCode, UserError
from pipeline.config.read import load_config
from pipeline.run.directory import Run
from planning import memory_check
from planning.plan import describe_plan
from slurm.submit import local_runner
from tests.support.tiny import make_run, write_config


@pytest.fixture
def run_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs submit.py with arguments in a folder with tiny.yaml, and returns the output."""
    write_config(tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["submit.py", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            app(list(arguments))
        assert exit_info.value.code == 0
        return capsys.readouterr().out

    return run


def test_the_summary_fits_on_a_screen_and_begins_with_the_verdict(run_cli: Callable[..., str]) -> None:
    """A screen has 24 lines. Without `--scripts`, the summary has no scripts and no resolved config."""
    for arguments in ((), ("--executor", "slurm"), ("sweep={grid: {optimizer.lr: [0.1, 0.2, 0.3, 0.4, 0.5]}}",)):
        output = run_cli("tiny.yaml", "--dry-run", *arguments)
        assert len(output.splitlines()) <= 24 and output.startswith("run       runs/tiny\nverdict   "), output
        assert "#!/bin/bash" not in output and "sequence_length" not in output and "--scripts" in output
    assert not Path("runs").exists()


def test_the_option_scripts_prints_scripts_after_the_summary(run_cli: Callable[..., str]) -> None:
    """There are scripts only for Slurm. With `--scripts`, the resolved config is also printed.

    The five jobs are prepare, shard, the job that completes shard, train and evaluate.
    """
    local_output = run_cli("tiny.yaml", "--dry-run", "--scripts", "--executor", "local")
    assert "#!/bin/bash" not in local_output and "sequence_length: 32" in local_output
    slurm_output = run_cli("tiny.yaml", "--dry-run", "--scripts", "--executor", "slurm")
    summary, scripts = slurm_output.split("# ---- config, resolved\n")
    assert summary.startswith("run ") and scripts.count("#!/bin/bash") == 5 and "sequence_length: 32" in scripts


def test_without_slurm_no_slurm_options_are_printed(
    run_cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    output = run_cli("tiny.yaml", "--dry-run", "--scripts")
    assert "#SBATCH" not in output and "none on Slurm: 4 stages on this machine" in output


@pytest.mark.parametrize("controller_state", [None, "UP", "DOWN"])
def test_a_controller_that_does_not_respond_is_a_problem(
    run_cli: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, controller_state: str | None
) -> None:
    """A dry run works without a controller, but reports that a submission would fail.

    `controller_state` is None if Slurm is not installed.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "scontrol") if controller_state else ():
        (folder / name).write_text(f"#!/bin/sh\necho 'Slurmctld(primary) at a is {controller_state}'\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin" if controller_state else "/nowhere")
    output = run_cli("tiny.yaml", "--dry-run", "--executor", "slurm")
    assert ("problem   submitting would fail" in output) == (controller_state != "UP"), output
    assert ("scontrol ping" in output) == (controller_state != "UP")


@pytest.mark.parametrize(
    ("overrides", "expected_batch", "expected_layout"),
    [
        (
            ["parallel.tensor=2"],
            "1 replica × 2 micro-batches of 4",
            "2 ranks on 1 node: 1 data-parallel replica × tensor 2",
        ),
        ([], "2 replicas × 1 micro-batch of 4", "2 ranks on 1 node: 2 data-parallel replicas"),
        (
            ["parallel={pipeline: 2, zero: 1}", "stages.train={nodes: 2, tasks_per_node: 2}", "train.global_batch=16"],
            "2 replicas × 2 micro-batches of 4",
            "4 ranks on 2 nodes: 2 data-parallel replicas × pipeline 2 (1f1b), ZeRO 1 over 2 ranks",
        ),
    ],
)  # fmt: skip
def test_the_batch_is_split_over_replicas_and_the_layout_is_shown(
    run_cli: Callable[..., str], overrides: list[str], expected_batch: str, expected_layout: str
) -> None:
    output = run_cli("tiny.yaml", "--dry-run", "train.micro_batch=4", *overrides)
    assert re.search(rf"^training  30 steps of .* sequences .*: {re.escape(expected_batch)}$", output, re.M), output
    assert f"\nlayout    {expected_layout}\n" in output, output


def test_a_dry_run_for_an_existing_run_shows_changes_and_remaining_stages(run_cli: Callable[..., str]) -> None:
    """The config may have corrections, and `resume` may have changed values. Completed stages need no job."""
    run = make_run(Path.cwd())
    output = run_cli("tiny.yaml", "--dry-run", "optimizer.lr=0.5", "--executor", "local")
    assert "\ncorrects  optimizer.lr: 0.01 → 0.5\n" in output
    run.apply_overrides(["train.steps=40"])
    output = run_cli("tiny.yaml", "--dry-run", "--executor", "local")
    assert "training  40 steps of 8" in output and "train.steps: 30 → 40" in output, output
    assert "\ndone      prepare, shard\n" in output
    assert "\ntrain     2 processes" in output and "\nprepare " not in output
    assert "2 stages on this machine" in output
    assert "jobs      2 Slurm jobs;" in run_cli("tiny.yaml", "--dry-run", "--executor", "slurm")


def test_slurm_requests_are_summed(run_cli: Callable[..., str]) -> None:
    """The node-hours are: prepare 1, shard 2 (two tasks), train 3 × 2, evaluate 1. The GPU-hours: 12 × 2 and 1."""
    site = "site={partition: gpu, gpus_per_node: 4, mem_gb: 100, sbatch: {reservation: r1}}"
    train = "stages.train={nodes: 3, tasks_per_node: 4, time: '02:00:00'}"
    output = run_cli("tiny.yaml", "--dry-run", "--executor", "slurm", site, train, "train.global_batch=24")
    assert "jobs      5 Slurm jobs, 6 with the tasks of arrays; the largest 3 nodes and 12 GPUs; " in output
    assert "10.0 node-hours, 25.0 GPU-hours at most" in output, output
    (line,) = [line for line in output.splitlines() if line.startswith("train ")]
    assert "3 × 4 = 12 processes, 02:00:00, after shard" in line
    assert all(option in line for option in ("partition gpu", "mem_gb 100", "gpus_per_node 4", "reservation r1"))


LARGE_MODEL = ("model={dim: 8192, layers: 80, heads: 64, intermediate_size: 28672}", "train.precision=bf16")


@pytest.mark.parametrize(
    ("arguments", "size_text", "fits"),
    [
        (["site.gpu_memory_gib=80"], "site.gpu_memory_gib: 80 GiB", False),
        (["site.machine=h100"], "site.machine h100: 79.6 GiB", False),
        (["--machine", "b200", "site.machine=h100"], "--machine b200: 180 GiB", False),
        (["site.gpu_type=h100", "model.layers=2"], "site.gpu_type h100: 79.6 GiB", True),
        (["site.gpu_type=nvidia_a100_3g.20gb", "model.layers=2"], "site.gpu_type nvidia_a100_3g.20gb: 20 GiB", False),
        (["site.gpu_type=a100_40gb", "model.layers=2"], "site.gpu_type a100_40gb: 40 GiB", True),
        (["site.gpu_type=gtx"], None, True),
        ([], None, True),
    ],
)
def test_gpu_memory_is_checked_as_in_plan_if_its_size_is_known(
    run_cli: Callable[..., str], arguments: list[str], size_text: str | None, fits: bool
) -> None:
    """Each rank has one GPU. The dry run does not import torch, but its verdict must equal that of `plan`.

    `size_text` is the source and the size of the memory; None: the size is unknown, and the memory is not checked.
    """
    output = run_cli("tiny.yaml", "--dry-run", "--executor", "slurm", *LARGE_MODEL, "site.gpus_per_node=2", *arguments)
    lines = [line for line in output.splitlines() if re.match("(problem|memory) .*GPU", line)]
    if size_text is None:
        assert not lines
        return
    (line,) = lines
    assert size_text in line and line.startswith("memory ") == fits and (" fits: " in line) == fits, line
    size_gib = re.search(r": ([\d.]+) GiB", line)
    assert size_gib is not None
    overrides = [argument for argument in arguments if "=" in argument]
    config = load_config(Path("tiny.yaml"), [*LARGE_MODEL, *overrides, f"site.gpu_memory_gib={size_gib[1]}"])
    with nullcontext() if fits else pytest.raises(UserError):
        assert list(describe_plan(config))


def test_a_gpu_type_with_several_memory_sizes_gets_a_verdict_for_each_size(run_cli: Callable[..., str]) -> None:
    """There are A100 with 40 GiB and with 80 GiB."""
    output = run_cli(
        "tiny.yaml", "--dry-run", *LARGE_MODEL, "model.layers=4", "site.gpu_type=a100", "--executor", "slurm"
    )
    (line,) = [line for line in output.splitlines() if "GPU: " in line]
    assert re.search(r"does not fit: .*a100: 40 GiB.*; fits: .*a100: 80 GiB", line), line


@pytest.mark.timeout(60)
def test_a_model_with_too_many_layers_to_list_does_not_fit(run_cli: Callable[..., str]) -> None:
    output = run_cli("tiny.yaml", "--dry-run", f"model.layers={2**63}")
    assert f"problem   host memory: does not fit: model.layers is {2**63:,}" in output, output


def test_an_unknown_machine_is_a_problem_in_a_config_and_an_error_as_option(run_cli: Callable[..., str]) -> None:
    assert "problem   GPU memory: site.machine: h101" in run_cli("tiny.yaml", "--dry-run", "site.machine=h101")
    with pytest.raises(UserError) as error:
        app(["tiny.yaml", "--dry-run", "--machine", "h101"])
    assert error.value.code == "plan.no_such_machine" and "h101" in str(error.value)
    with pytest.raises(UserError) as error:
        app(["tiny.yaml", "--machine", "h100"])
    assert error.value.code == "cli.conflict" and "--dry-run" in str(error.value)


HUGE_MODEL = "model={dim: 16384, layers: 64, heads: 128}"


def test_a_model_that_exceeds_the_host_memory_of_this_machine_is_a_problem(
    run_cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two ranks needs 16 bytes per parameter: fp32 weights, gradients and two moments."""
    monkeypatch.setattr(memory_check, "has_gpu", lambda: False)
    # the machine has 23 GB
    monkeypatch.setattr(memory_check, "local_memory_limit", lambda: (23 * 10**9, "this machine"))
    assert "memory    host: fits" in run_cli("tiny.yaml", "--dry-run", "--executor", "local")
    output = run_cli("tiny.yaml", "--dry-run", "--executor", "local", HUGE_MODEL)
    match = re.search(r"^problem   host memory: does not fit: .* ([\d,]+) GB at the start .* of 23.0 GB", output, re.M)
    # 64 layers of width 16384 with two key-value heads of 128 and intermediate size 43712, and a vocabulary of 300
    parameters = 64 * 16384 * (2 * 16384 + 2 * 2 * 128 + 3 * 43712) + 2 * 300 * 16384
    assert match and float(match[1].replace(",", "")) * 1e9 == pytest.approx(2 * 16 * parameters, rel=0.01), output


def test_a_local_run_needs_host_memory_for_the_ranks_of_all_nodes(run_cli: Callable[..., str]) -> None:
    two_nodes = ("stages.train.nodes=2", "--executor")
    assert "host: fits: the 4 ranks" in run_cli("tiny.yaml", "--dry-run", *two_nodes, "local")
    assert "host: the 2 ranks" in run_cli("tiny.yaml", "--dry-run", *two_nodes, "slurm")


@pytest.mark.parametrize(
    ("override", "limit"),
    [
        ("site.mem_gb=64", "68.7 GB (mem_gb)"),
        ("stages.train.mem_gb=32", "34.4 GB (mem_gb)"),
        ("site={cpus_per_task: 4, sbatch: {mem-per-cpu: 2G}}", "17.2 GB (sbatch.mem-per-cpu)"),
        ("site={gpus_per_node: 2, sbatch: {mem-per-gpu: 500}}", "1.0 GB (sbatch.mem-per-gpu)"),
    ],
)
def test_a_model_that_exceeds_the_host_memory_of_its_job_is_a_problem(
    run_cli: Callable[..., str], override: str, limit: str
) -> None:
    output = run_cli("tiny.yaml", "--dry-run", "--executor", "slurm", HUGE_MODEL, override)
    (line,) = [line for line in output.splitlines() if "host memory: does not fit" in line]
    assert limit in line


@pytest.mark.parametrize(
    ("cgroup_line", "limit_file"),
    [
        ("0::/user.slice/user-7.slice/s", "user.slice/user-7.slice/memory.max"),
        ("4:memory:/jobs/a", "memory/jobs/memory.limit_in_bytes"),
        ("0::/", "memory.max"),
    ],
)
def test_the_memory_limit_of_a_cgroup_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup_line: str, limit_file: str
) -> None:
    """Login nodes often limit the memory of each user, and containers may also have limits.

    `cgroup_line` is a line of /proc/self/cgroup. The second line is that of cgroup v1. The value `max` is no limit.
    """
    monkeypatch.setattr(memory_check, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory_check, "PROCESS_CGROUPS", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text(f"3:cpuset:/x\n{cgroup_line}\n")
    assert memory_check.local_memory_limit()[1] == "this machine"
    (tmp_path / limit_file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / limit_file).write_text("max\n")
    assert memory_check.local_memory_limit()[1] == "this machine"
    (tmp_path / limit_file).write_text("1000000\n")
    assert memory_check.local_memory_limit() == (1000000, f"the limit in {tmp_path / limit_file}")


def test_ranks_on_gpus_need_host_memory_for_offloaded_state(run_cli: Callable[..., str]) -> None:
    """With `parallel.offload`, state of ranks is in host memory from the start. Otherwise, a save copies it there."""

    def read_host_memory_gb(*overrides: str) -> tuple[float, float]:
        """Return the predicted host memory of the ranks at the start and during a save, in GB."""
        output = run_cli(
            "tiny.yaml", "--dry-run", "--executor", "slurm", *LARGE_MODEL, "site.gpus_per_node=2", *overrides
        )
        match = re.search(r"need about ([\d.,]+) GB at the start and ([\d.,]+) GB during a save", output)
        assert match is not None, output
        return float(match[1].replace(",", "")), float(match[2].replace(",", ""))

    start_gb, peak_gb = read_host_memory_gb()
    assert start_gb < 5 < peak_gb, "a save copies the state to host memory"
    offloaded_start_gb, _ = read_host_memory_gb("parallel={offload: true, zero: 3}")
    assert offloaded_start_gb > 100


def test_the_problem_names_the_sweep_point_that_exceeds_the_memory(
    run_cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "local_memory_limit", lambda: (23 * 10**9, "this machine"))
    monkeypatch.setattr(memory_check, "has_gpu", lambda: False)
    output = run_cli("tiny.yaml", "--dry-run", "--executor", "local", "sweep={grid: {model.dim: [32, 16384]}}")
    assert "problem   host memory: point 001: does not fit" in output, output


def test_submitting_a_run_prints_memory_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of the dry run are repeated at a submission, where they are warnings."""
    config = load_config(write_config(tmp_path), [HUGE_MODEL, "site.mem_gb=64", "site.gpu_memory_gib=80"])
    beginnings = [line.split(" does not fit")[0] for line in memory_check.memory_warnings(config, "slurm")]
    assert beginnings == ["warning: GPU memory:", "warning: host memory:"]
    output = io.StringIO()
    monkeypatch.setattr(submit, "console", PlainConsole(file=output, width=300))
    monkeypatch.setattr(memory_check, "local_memory_limit", lambda: (23 * 10**9, "this machine"))
    monkeypatch.setattr(local_runner, "run_chain_locally", lambda run, console: ExitCode.STOPPED)
    monkeypatch.setattr(Run, "copy_code", lambda self, **options: None)
    with pytest.raises(typer.Exit):
        submit.start_run(Run.create(config), "local", is_resumed=False)
    assert "warning: host memory: does not fit" in output.getvalue()


def test_the_number_and_size_of_input_files_are_printed(run_cli: Callable[..., str]) -> None:
    size = Path("corpus.jsonl").stat().st_size
    assert f"\ninputs    1 file, {size:,} bytes\n" in run_cli("tiny.yaml", "--dry-run")
    Path("more.jsonl").write_text('{"text": "a"}\n')
    assert f"\ninputs    2 files, {size + 14:,} bytes\n" in run_cli("tiny.yaml", "--dry-run", "data.source='*.jsonl'")
    assert "\ninputs" not in run_cli("tiny.yaml", "--dry-run", "data.source=python-stdlib"), "this source has no files"


def test_a_note_is_printed_if_threads_outnumber_cores(
    run_cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})  # this process may use 2 cores
    assert "note " not in run_cli("tiny.yaml", "--dry-run", "--executor", "local"), (
        "no note is needed for two ranks on two cores"
    )
    for override, message in (
        ("stages.train.tasks_per_node=4", "4 ranks of train, each with train.threads=1, share 2 CPU cores"),
        ("train.threads=2", "2 ranks of train, each with train.threads=2, share 2 CPU cores"),
    ):
        assert message in run_cli("tiny.yaml", "--dry-run", "--executor", "local", override)

"""Test `submit.py profile` with a train stage that runs on this machine."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from pipeline.config.read import load_config
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from tests.support.tiny import slow_down_steps, write_config

SUBMIT = [sys.executable, str(CODE_ROOT / "submit.py")]


def run_submit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run submit.py in `folder` and return its result."""
    return subprocess.run([*SUBMIT, *arguments], cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.mark.story
def test_profile_records_steps_of_a_running_train_stage(tmp_path: Path) -> None:
    """Also, `profile` is an error for a missing rank and for a run that no longer trains."""
    run = slow_down_steps(Run.create(load_config(write_config(tmp_path, steps=1000))), 0.1)
    process = subprocess.Popen([*SUBMIT, "tiny.yaml"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 240
        while sum(1 for _ in read_jsonl(run.metrics_file)) < 5:
            assert time.monotonic() < deadline and process.poll() is None, "the train stage did not reach step 5"
            time.sleep(0.1)
        result = run_submit(tmp_path, "profile", "runs/tiny", "--steps", "2", "--ranks", "1")
        assert result.returncode == 0, result.stderr
        profiles = re.findall(
            r"^step-(\d+): ([\d.]+) ms: compute (\d+) %.*idle (\d+) %.*mean of 1 rank\)", result.stdout, re.M
        )
        assert len(profiles) == 2 and int(profiles[1][0]) == int(profiles[0][0]) + 1, result.stdout
        _, step_ms, _, idle_percent = profiles[0]
        assert float(step_ms) > 100 and int(idle_percent) > 20, "each step sleeps for 100 ms, in which the rank is idle"
        for path in re.findall(r"(\S+/trace\.json\.gz) for https://ui.perfetto.dev", result.stdout):
            events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
            # `profile` shows rank 1 as process 2
            assert {event["pid"] for event in events} == {2} and any("gloo" in event["name"] for event in events)
        result = run_submit(tmp_path, "profile", "runs/tiny", "--steps", "1", "--ranks", "9")
        assert result.returncode == ExitCode.USER_ERROR and "run.no_profile" in result.stderr, (
            result.stdout + result.stderr
        )
    finally:
        subprocess.run([*SUBMIT, "cancel", "runs/tiny"], cwd=tmp_path, timeout=240, stdout=subprocess.DEVNULL)
        process.wait(240)
    profiled_steps = [line["step"] for line in read_jsonl(run.metrics_file) if "profile" in line]
    assert profiled_steps == [int(step) for step, *_ in profiles]
    result = run_submit(tmp_path, "profile", "runs/tiny")
    assert result.returncode == ExitCode.USER_ERROR and "tiny" in result.stderr and "--steps 0" in result.stderr
    result = run_submit(tmp_path, "profile", "runs/tiny", "--steps", "0")  # shows the profiles that were recorded
    assert result.returncode == 0 and result.stdout.count("ui.perfetto.dev") == 2, result.stdout + result.stderr
    report = run_submit(tmp_path, "report", "runs/tiny")
    assert re.search(r"2 profiled steps: [\d.]+ ms", report.stdout), report.stdout

"""Tests of followers in processes that are killed and paused, with real MLflow and Prometheus servers."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.errors import ExitCode
from pipeline.base.files import write_atomic
from pipeline.config.read import load_config
from pipeline.run.directory import Run, create_points
from tests.support.events import read_event_lines, write_event
from tests.support.fake_run import FakeRun, read_json_lines
from tests.support.ranks import find_rank_processes
from tests.support.servers import find_free_port, mlflow_server, prometheus_server
from tests.support.tiny import write_config
from tests.tracking.test_followers import Chat, chat_url, read_tensorboard_curve, round_to_float32, scrape_prometheus
from tracking.follower import Follower
from tracking.tracker import tracker_run_id
from tracking.wandb import read_offline_steps

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.story
__all__ = ["chat_url"]  # a fixture


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start an MLflow server and yield its URI."""
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as uri:
        yield uri


def read_wandb_curve(run: Run) -> list[tuple[int, float]]:
    """Return the steps and losses in the offline files of W&B."""
    return [
        (step, values["loss"])
        for step, values in read_offline_steps(run.path / "track", tracker_run_id(run))
        if "loss" in values
    ]


def find_mlflow_run(uri: str, run: Run) -> tuple[Any, Any]:
    """Return the client of MLflow, and the only run on the server that belongs to `run`."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (mlflow_run,) = client.search_runs(experiments, f"tags.`sluice.run` = '{tracker_run_id(run)}'")
    return client, mlflow_run


def read_mlflow_curve(uri: str, run: Run, name: str = "loss") -> list[tuple[int, float]]:
    """Return the steps and values of a metric on the server."""
    client, mlflow_run = find_mlflow_run(uri, run)
    return sorted((metric.step, metric.value) for metric in client.get_metric_history(mlflow_run.info.run_id, name))


class Process:
    """A follower or a server in its own process, which tests kill and pause."""

    def __init__(self, log: Path, *command: str) -> None:
        self._command = [sys.executable, "-m", *command]
        self._log = open(log, "ab")  # noqa: SIM115
        self.start()

    @classmethod
    def start_follower(cls, run: Run, name: str) -> Process:
        """Start the follower of a run that feeds the tracker `name`."""
        return cls(run.path / f"{name}.log", "tracking.follower", name, str(run.path))

    def start(self) -> None:
        """Start the process."""
        self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=self._log, stderr=self._log)

    def disturb(self, action: str) -> None:
        """Kill the process and start it again (`kill`), or `pause` or `continue` it."""
        if action == "kill":
            self._process.kill()
            self._process.wait(60)
            self.start()
        else:
            self._process.send_signal(signal.SIGSTOP if action == "pause" else signal.SIGCONT)

    def finish(self) -> None:
        """Terminate the process, which sends the remaining data first. Kill it after 120 s."""
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(120)
        self._process.kill()
        self._process.wait(60)
        self._log.close()


class WebhookReceiver(Process):
    """A webhook receiver that is killed, paused, or misbehaves (tests/support/webhook_receiver.py)."""

    BEHAVIORS = ("well", "refuse", "hang", "lose")  # defined in tests/support/webhook_receiver.py

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._behavior_file = folder / "behavior"
        self._received_file = folder / "received.jsonl"
        port = find_free_port()
        self._behavior_file.write_text("well")
        self.url = f"http://127.0.0.1:{port}/secret"
        super().__init__(folder / "log", "tests.support.webhook_receiver", str(port), str(folder))

    def disturb(self, action: str) -> None:
        """Do one of `kill`, `pause` and `continue`, or set one of the `BEHAVIORS`."""
        if action in self.BEHAVIORS:
            write_atomic(self._behavior_file, action)
        super().disturb("continue" if action in self.BEHAVIORS else action)

    def read_messages(self) -> list[tuple[str, str]]:
        """Return the id and text of each received message, without durations and locations."""
        messages = read_json_lines(self._received_file) if self._received_file.exists() else []
        assert all(f"id {message['id']}]" in message["text"] for message in messages)
        return [(message["id"], re.sub(r" for [\d:]+,| \[.*", "", message["text"])) for message in messages]


def record_losses(run: FakeRun, losses: dict[int, set[float]]) -> None:
    """Add each step's current loss to the set of its losses so far."""
    for step, loss in run.read_values().items():
        losses[step].add(round(loss, 9))


def evaluate_after_restart(run: FakeRun) -> None:
    """Crash after a save but before the held-out evaluation of that step. The next attempt runs the evaluation."""
    run.save()
    run.crash()
    run.evaluate_late()


def fail_attempt(run: FakeRun, generator: random.Random, number: int) -> str:
    """Fail an attempt and start the next one. Return the message that a webhook must receive."""
    cause = generator.choice(["crashed", "hang"])
    message = f"failure {number}"
    write_event(run.run, "failed", "train", job_id=str(run.attempt), cause=cause, exit_code=1, message=message)
    run.crash()
    return f"tiny: train {'stalled' if cause == 'hang' else 'failed (crashed)'}: {message}"


def test_each_step_and_message_arrives_once_through_twenty_disturbances(tmp_path: Path, mlflow: str) -> None:
    seed = int(os.environ.get("SLUICE_SEED") or random.SystemRandom().randrange(10**6))
    print(f"to repeat: SLUICE_SEED={seed}")
    generator = random.Random(seed)
    port = find_free_port()
    webhook_receiver = WebhookReceiver(tmp_path / "chat")
    track = f"track={{tensorboard: true, wandb: {{project: p}}, mlflow: {{uri: '{mlflow}'}}"
    track += f", prometheus: {{port: {port}}}, webhook: {{url: '{webhook_receiver.url}'}}}}"
    run = FakeRun(tmp_path, track, "train.steps=100000", "recovery.hang_s=20")
    names = ("tensorboard", "wandb", "mlflow", "prometheus", "webhook")
    losses = defaultdict[int, set[float]](set)
    followers = {name: Process.start_follower(run.run, name) for name in names}
    expected_messages = []
    try:
        for number in range(20):
            run.write_steps(generator.randint(5, 40))
            record_losses(run, losses)
            time.sleep(generator.choice([0.2, 1.0, 2.5, 4.0]))
            followers[names[number % 5]].disturb(generator.choice(["kill", "kill", "pause", "continue"]))
            webhook_receiver.disturb(generator.choice(["kill", "pause", "continue", *webhook_receiver.BEHAVIORS]))
            if number == 10 or generator.random() < 0.4:
                evaluate_after_restart(run)
            elif generator.random() < 0.4:
                run.save()
            else:
                expected_messages.append(fail_attempt(run, generator, number))
        # the last step must not be one that saves
        run.write_steps(10 if (run.step + 10) % run.run.config.checkpoint.every_steps else 11)
        record_losses(run, losses)
        for follower in followers.values():
            follower.disturb("continue")
        webhook_receiver.disturb("well")
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            with suppress(OSError):
                if f'sluice_step{{run="tiny",sweep=""}} {run.step:.1f}\n' in scrape_prometheus(port):
                    break
            time.sleep(0.5)
        else:
            pytest.fail("Prometheus does not reach the last step")
        stall = f"tiny: train seems to stall: no step since step {run.step}"
        while stall not in [text for _, text in webhook_receiver.read_messages()]:
            assert time.monotonic() < deadline, "the stall at the end is not reported"
            time.sleep(0.5)
        write_event(run.run, "done", "train", job_id=str(run.attempt))
        write_event(run.run, "done", "evaluate", job_id="0")
    finally:
        for follower in followers.values():
            follower.finish()
        webhook_receiver.finish()
    messages = webhook_receiver.read_messages()
    assert expected_messages
    assert {*expected_messages, stall, "tiny: done"} <= {text for _, text in messages}
    text_by_id = dict(messages)
    assert all(text_by_id[message_id] == text for message_id, text in messages), "the same ID is used for two messages"
    messages_except_stalls = [text for text in text_by_id.values() if "seems" not in text]
    # one message for each failure and one for the end of the run
    assert len(messages_except_stalls) == 1 + sum(
        event["event"] == "failed" for event in read_event_lines(run.run, "train")
    )
    assert read_tensorboard_curve(run.run.path, "train/loss") == round_to_float32(run.read_values().items())
    held_out_losses = [*run.read_values("held_out_loss").items()]
    assert held_out_losses and read_tensorboard_curve(run.run.path, "train/held_out_loss") == held_out_losses
    mlflow_losses = read_mlflow_curve(mlflow, run.run, "held_out_loss")
    assert set(mlflow_losses) >= set(held_out_losses)
    assert len(dict(mlflow_losses)) == len(mlflow_losses), "a step was sent twice"
    for points in (read_wandb_curve(run.run), read_mlflow_curve(mlflow, run.run)):
        assert [step for step, _ in points] == [*range(1, len(points) + 1)], "a step is missing or was sent twice"
        assert len(points) >= run.step
        assert [(step, loss) for step, loss in points if round(loss, 9) not in losses[step]] == []


def run_sluice(*arguments: str, timeout: float = 500) -> subprocess.CompletedProcess[str]:
    """Run submit.py with these arguments. `timeout` is in seconds."""
    command = [sys.executable, str(ROOT / "submit.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def test_a_resumed_run_has_one_curve_in_each_tracker(tmp_path: Path, mlflow: str) -> None:
    """A run is stopped with Ctrl-C and resumed with one rank. `track` then sends the same steps to another tracker."""
    config = write_config(tmp_path, steps=120)
    track = f"track={{tensorboard: true, wandb: {{project: p}}, mlflow: {{uri: '{mlflow}'}}, telemetry_s: 0.5}}"
    command = [sys.executable, str(ROOT / "submit.py"), str(config), "--executor", "local", track]
    with open(tmp_path / "log", "wb") as log:
        first_attempt = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    path = tmp_path / "runs/tiny"
    deadline = time.monotonic() + 300
    while not (path / "metrics.jsonl").exists() or len((path / "metrics.jsonl").read_bytes().splitlines()) < 20:
        assert time.monotonic() < deadline and first_attempt.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    first_attempt.send_signal(signal.SIGINT)
    assert first_attempt.wait(200) == ExitCode.STOPPED, (tmp_path / "log").read_text()
    completed = run_sluice("resume", str(path), "stages.train.tasks_per_node=1")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    run = Run.open(path)
    losses = {line["step"]: line["loss"] for line in read_json_lines(run.metrics_file)}
    assert [*losses] == [*range(1, 121)]
    completed = run_sluice("track", str(path))
    assert completed.returncode == 0 and completed.stdout.count("up to date") == 3, completed.stdout + completed.stderr
    assert "wandb sync" in completed.stdout
    assert read_tensorboard_curve(path, "train/loss") == round_to_float32(losses.items())
    assert read_wandb_curve(run) == read_mlflow_curve(mlflow, run) == [*losses.items()]
    client, mlflow_run = find_mlflow_run(mlflow, run)
    assert mlflow_run.info.status == "FINISHED" and mlflow_run.data.params["train.steps"] == "120"
    assert mlflow_run.data.metrics["evaluation/loss"] == pytest.approx(
        read_tensorboard_curve(path, "evaluation/loss")[0][1], abs=1e-3
    )
    assert {artifact.path for artifact in client.list_artifacts(mlflow_run.info.run_id)} >= {
        "config.yaml",
        "evaluation",
        "report.html",
    }
    samples = read_json_lines(next(path.glob("telemetry-*.jsonl")))
    assert len(samples) > 3
    assert all(0 <= sample["cpu_percent"] <= 100 and sample["memory_gb"] > 0 for sample in samples)
    completed = run_sluice("track", str(path), "--to", "jsonl", f"track.jsonl={tmp_path}/all.jsonl")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    steps = [line for line in read_json_lines(tmp_path / "all.jsonl") if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [*losses] and {line["attempt"] for line in steps} == {1, 2}


def test_a_stall_is_reported_before_the_watchdog_stops_the_rank(tmp_path: Path, chat_url: str) -> None:
    config = write_config(tmp_path, steps=100_000)
    overrides = [
        f"track={{webhook: {{url: '{chat_url}'}}}}",
        "recovery.hang_s=24",
        "recovery.hang=0",  # no retry after a hang
        "checkpoint.every_steps=100000",
    ]
    command = [sys.executable, str(ROOT / "submit.py"), str(config), "--executor", "local", *overrides]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    run = Run(tmp_path / "runs/tiny")
    deadline = time.monotonic() + 300
    while not run.metrics_file.exists() or len(run.metrics_file.read_bytes().splitlines()) < 20:
        assert time.monotonic() < deadline and process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.1)
    process_by_rank = find_rank_processes(run.path)
    assert len(process_by_rank) == 2, process_by_rank
    process_by_rank[1].send_signal(signal.SIGSTOP)
    while not Chat.messages:
        assert time.monotonic() < deadline and process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.1)
    assert re.search(r"stall.*no step for 00:", Chat.messages[0][1])
    assert not read_event_lines(run, "train", "failed"), "the watchdog ended the attempt before the stall was reported"
    assert process.wait(200) != 0
    assert "train stalled: " in Chat.messages[1][1] and len(Chat.messages) == 2


def test_a_sweep_has_a_curve_for_each_point(tmp_path: Path, mlflow: str) -> None:
    track = f"track={{tensorboard: true, wandb: {{project: p}}, mlflow: {{uri: '{mlflow}', experiment: sweep}}}}"
    sweep = "sweep={grid: {optimizer.lr: [0.001, 0.002], run.seed: [4, 5]}}"
    run = Run.create(load_config(write_config(tmp_path), [track, sweep]))  # the seeds alternate between 4 and 5
    for number, point in enumerate(create_points(run)):
        fake_run = FakeRun.from_run(point)
        fake_run.write_steps(number + 3)
        fake_run.crash()
        fake_run.write_steps(number + 7)
        for name in ("tensorboard", "wandb", "mlflow"):
            assert Follower(point, name).follow(lambda: False)
        losses = [*fake_run.read_values().items()]
        assert (
            read_tensorboard_curve(point.path, "train/loss") == round_to_float32(losses) and len(losses) == number + 7
        )
        assert [step for step, _ in read_wandb_curve(point)] == [step for step, _ in losses]
        assert read_mlflow_curve(mlflow, point) == losses
        mlflow_run = find_mlflow_run(mlflow, point)[1]
        assert mlflow_run.info.run_name == f"tiny-{number:03d}" and mlflow_run.data.tags["sluice.sweep"] == "tiny"
        assert mlflow_run.data.params["run.seed"] == str(4 + number % 2)


def list_queries(dashboard: Any) -> Iterator[str]:
    """Yield every query of a dashboard."""
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
        if "panels" in panel:
            yield from list_queries(panel)


def test_prometheus_has_data_for_each_query_of_the_dashboard(tmp_path: Path) -> None:
    dashboard = json.loads((ROOT / "dashboards/sluice.json").read_text())
    port = find_free_port()
    run = FakeRun(tmp_path, f"track={{prometheus: {{port: {port}}}}}")
    gpu = {"index": 0, "power_w": 512.5, "utilization_percent": 50, "memory_gb": 2.5, "sm_clock_mhz": 1980}
    gpu["temperature_c"] = 61
    sample = {"time": time.time(), "host": "node7", "cpu_percent": 50.0, "memory_gb": 1.5, "gpus": [gpu]}
    (run.run.path / "telemetry-node7.jsonl").write_text(json.dumps(sample) + "\n")
    run.write_steps(5)
    run.crash()
    write_event(run.run, "straggler", "train", rank=3, host="node7", ratio=1.5, step=3)
    run.write_steps(3)
    run.write_evaluation()
    follower = Process.start_follower(run.run, "prometheus")
    queries = [query.replace("$run", "tiny").replace("$__rate_interval", "1m") for query in list_queries(dashboard)]
    assert len(queries) >= 10
    try:
        with prometheus_server(tmp_path, port) as uri:
            deadline = time.monotonic() + 90
            without_data = queries
            while without_data and time.monotonic() < deadline:
                time.sleep(1)
                run.write_steps(1)
                without_data = [query for query in without_data if not has_data(uri, query)]
            assert not without_data
    finally:
        follower.finish()


def has_data(uri: str, query: str) -> bool:
    """Return True if Prometheus has data for a query. Fail the test if the query is invalid."""
    url = f"{uri}/api/v1/query?query={urllib.parse.quote(query)}"
    with urllib.request.urlopen(url, timeout=20) as response:
        answer = json.load(response)
    assert answer["status"] == "success", query
    return bool(answer["data"]["result"])

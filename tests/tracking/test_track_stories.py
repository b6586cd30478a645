"""Followers as they run: processes that are killed and stopped, and real servers behind them."""

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

from pipeline.base.files import write_atomic
from pipeline.config.read import load_config
from pipeline.run.directory import Run
from pipeline.run.points import create_points
from tests.support.events import read_event_lines, write_event
from tests.support.fake_run import FakeRun, read_json_lines
from tests.support.servers import find_free_port, mlflow_server, prometheus_server
from tests.support.tiny import write_config
from tests.tracking.test_followers import Chat, chat, curve, in_float32, scraped
from tracking.follower import Follower
from tracking.tracker import tracker_run_id
from tracking.wandb import read_offline_steps

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.story
__all__ = ["chat"]  # a fixture


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as uri:
        yield uri


def curve_of_wandb(run: Run) -> list[tuple[int, float]]:
    """Step and loss in W&B's offline files."""
    return [
        (step, values["loss"])
        for step, values in read_offline_steps(run.path / "track", tracker_run_id(run))
        if "loss" in values
    ]


def mlflow_run(uri: str, run: Run) -> tuple[Any, Any]:
    """MLflow's client, and the one run there is."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiments = [one.experiment_id for one in client.search_experiments()]
    (found,) = client.search_runs(experiments, f"tags.`sluice.run` = '{tracker_run_id(run)}'")
    return client, found


def curve_of_mlflow(uri: str, run: Run, name: str = "loss") -> list[tuple[int, float]]:
    """Step and value on the server."""
    client, found = mlflow_run(uri, run)
    return sorted((one.step, one.value) for one in client.get_metric_history(found.info.run_id, name))


class Process:
    """A follower or a server, in a process of its own, killed and stopped without a word."""

    def __init__(self, log: Path, *command: str) -> None:
        self._command = [sys.executable, "-m", *command]
        self._log = open(log, "ab")  # noqa: SIM115
        self.start()

    @classmethod
    def follower(cls, run: Run, name: str) -> Process:
        return cls(run.path / f"{name}.log", "tracking.follower", name, str(run.path))

    def start(self) -> None:
        """Start it, where none runs."""
        self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=self._log, stderr=self._log)

    def hurt(self, way: str) -> None:
        """Kill it and start another one; stop it; let it go on."""
        if way == "kill":
            self._process.kill()
            self._process.wait(60)
            self.start()
        else:
            self._process.send_signal(signal.SIGSTOP if way == "stop" else signal.SIGCONT)

    def end(self) -> None:
        """Let it hand over the rest."""
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(120)
        self._process.kill()
        self._process.wait(60)
        self._log.close()


class Listener(Process):
    """A receiver of webhooks that is killed, stopped and in bad moods (tests/support/webhook_receiver.py)."""

    MOODS = ("well", "refuse", "hang", "lose")

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._mood, self._heard, port = folder / "behavior", folder / "received.jsonl", find_free_port()
        self._mood.write_text("well")
        self.url = f"http://127.0.0.1:{port}/secret"
        super().__init__(folder / "log", "tests.support.webhook_receiver", str(port), str(folder))

    def hurt(self, way: str) -> None:
        """Also: change its mood."""
        if way in self.MOODS:
            write_atomic(self._mood, way)
        super().hurt("go on" if way in self.MOODS else way)

    def heard(self) -> list[tuple[str, str]]:
        """Id and words of what it took, without how long and where."""
        found = read_json_lines(self._heard) if self._heard.exists() else []
        assert all(f"id {one['id']}]" in one["text"] for one in found), "the id stands in the text, too"
        return [(one["id"], re.sub(r" for [\d:]+,| \[.*", "", one["text"])) for one in found]


def note(one: FakeRun, values: dict[int, set[float]]) -> None:
    """Add what each step's loss is now to what it was before."""
    for step, loss in one.read_values().items():
        values[step].add(round(loss, 9))


def make_up(one: FakeRun) -> None:
    """A stop comes before a look at held-out data is done; the next attempt makes up for it."""
    one.save()
    one.crash()
    one.evaluate_late()


def fail(one: FakeRun, draw: random.Random, blow: int) -> str:
    """An attempt fails, and the next one begins; what a chat is to hear of it."""
    cause = draw.choice(["crashed", "hang"])
    write_event(one.run, "failed", "train", job_id=str(one.attempt), cause=cause, exit_code=1, message=f"blow {blow}")
    one.crash()
    return f"tiny: train {'stalled' if cause == 'hang' else 'failed (crashed)'}: blow {blow}"


def test_each_step_stands_once_and_each_word_is_heard_through_twenty_blows(tmp_path: Path, mlflow: str) -> None:
    seed = int(os.environ.get("SLUICE_SEED") or random.SystemRandom().randrange(10**6))
    print(f"again with SLUICE_SEED={seed}")
    draw, port, chat = random.Random(seed), find_free_port(), Listener(tmp_path / "chat")
    track = f"track={{tensorboard: true, wandb: {{project: p}}, mlflow: {{uri: '{mlflow}'}}"
    track += f", prometheus: {{port: {port}}}, webhook: {{url: '{chat.url}'}}}}"
    one = FakeRun(tmp_path, track, "train.steps=100000", "recovery.hang_s=20")
    names, values = ("tensorboard", "wandb", "mlflow", "prometheus", "webhook"), defaultdict[int, set[float]](set)
    feeds, to_hear = {name: Process.follower(one.run, name) for name in names}, []
    try:
        for blow in range(20):
            one.write_steps(draw.randint(5, 40))
            note(one, values)
            time.sleep(draw.choice([0.2, 1.0, 2.5, 4.0]))
            feeds[names[blow % 5]].hurt(draw.choice(["kill", "kill", "stop", "go on"]))
            chat.hurt(draw.choice(["kill", "stop", "go on", *chat.MOODS]))
            if blow == 10 or draw.random() < 0.4:
                make_up(one)
            elif draw.random() < 0.4:
                one.save()
            else:
                to_hear.append(fail(one, draw, blow))
        one.write_steps(10 if (one.step + 10) % one.run.config.checkpoint.every_steps else 11)  # no save
        note(one, values)
        for feed in feeds.values():
            feed.hurt("go on")
        chat.hurt("well")
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            with suppress(OSError):
                if f'sluice_step{{run="tiny",sweep=""}} {one.step:.1f}\n' in scraped(port):
                    break
            time.sleep(0.5)
        else:
            pytest.fail("Prometheus does not come to the last step")
        stall = f"tiny: train seems to stall: no step since step {one.step}"
        while stall not in [words for _, words in chat.heard()]:
            assert time.monotonic() < deadline, "the stall at the end is not told"
            time.sleep(0.5)
        write_event(one.run, "done", "train", job_id=str(one.attempt))
        write_event(one.run, "done", "evaluate", job_id="0")
    finally:
        for feed in feeds.values():
            feed.end()
        chat.end()
    assert to_hear and {*to_hear, stall, "tiny: done"} <= {words for _, words in chat.heard()}
    by_id = dict(chat.heard())
    assert [by_id[name] for name, _ in chat.heard()] == [words for _, words in chat.heard()], "an id, a message"
    failures = [words for words in by_id.values() if "seems" not in words]
    assert len(failures) == 1 + sum(event["event"] == "failed" for event in read_event_lines(one.run, "train"))
    assert curve(one.run.path, "train/loss") == in_float32(one.read_values().items())
    made_up = [*one.read_values("held_out_loss").items()]
    assert made_up and curve(one.run.path, "train/held_out_loss") == made_up
    late = curve_of_mlflow(mlflow, one.run, "held_out_loss")
    assert set(late) >= set(made_up) and len(dict(late)) == len(late), "each step once"
    for found in (curve_of_wandb(one.run), curve_of_mlflow(mlflow, one.run)):
        assert [step for step, _ in found] == [*range(1, len(found) + 1)], "each step once, in order"
        assert len(found) >= one.step
        assert [(step, loss) for step, loss in found if round(loss, 9) not in values[step]] == []


def sluice(*words: str, timeout: float = 500) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "submit.py"), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def test_one_curve_over_a_stop_and_another_layout(tmp_path: Path, mlflow: str) -> None:
    """A training that is stopped and goes on with one rank; the same afterwards by hand, into a sink that is new."""
    config = write_config(tmp_path, steps=120)
    track = f"track={{tensorboard: true, wandb: {{project: p}}, mlflow: {{uri: '{mlflow}'}}, telemetry_s: 0.5}}"
    command = [sys.executable, str(ROOT / "submit.py"), str(config), "--executor", "local", track]
    with open(tmp_path / "log", "wb") as log:
        first = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    path = tmp_path / "runs/tiny"
    deadline = time.monotonic() + 300
    while not (path / "metrics.jsonl").exists() or len((path / "metrics.jsonl").read_bytes().splitlines()) < 20:
        assert time.monotonic() < deadline and first.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    assert first.wait(200) == 75, (tmp_path / "log").read_text()
    done = sluice("resume", str(path), "stages.train.tasks_per_node=1")
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run.open(path)
    losses = {line["step"]: line["loss"] for line in read_json_lines(run.metrics_file)}
    assert [*losses] == [*range(1, 121)]
    done = sluice("track", str(path))
    assert done.returncode == 0 and done.stdout.count("up to date") == 3, done.stdout + done.stderr
    assert "wandb sync" in done.stdout
    assert curve(path, "train/loss") == in_float32(losses.items())
    assert curve_of_wandb(run) == curve_of_mlflow(mlflow, run) == [*losses.items()]
    client, there = mlflow_run(mlflow, run)
    assert there.info.status == "FINISHED" and there.data.params["train.steps"] == "120"
    assert there.data.metrics["evaluation/loss"] == pytest.approx(curve(path, "evaluation/loss")[0][1], abs=1e-3)
    assert {one.path for one in client.list_artifacts(there.info.run_id)} >= {
        "config.yaml",
        "evaluation",
        "report.html",
    }
    looks = read_json_lines(next(path.glob("telemetry-*.jsonl")))
    assert len(looks) > 3 and all(0 <= look["cpu_percent"] <= 100 and look["memory_gb"] > 0 for look in looks)
    done = sluice("track", str(path), "--to", "jsonl", f"track.jsonl={tmp_path}/all.jsonl")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [line for line in read_json_lines(tmp_path / "all.jsonl") if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [*losses] and {line["attempt"] for line in steps} == {1, 2}


def test_a_rank_that_hangs_is_told_before_the_watchdog_ends_it(tmp_path: Path, chat: str) -> None:
    config = write_config(tmp_path, steps=100_000)
    more = [
        f"track={{webhook: {{url: '{chat}'}}}}",
        "recovery.hang_s=24",
        "recovery.hang=0",
        "checkpoint.every_steps=100000",
    ]
    command = [sys.executable, str(ROOT / "submit.py"), str(config), "--executor", "local", *more]
    with open(tmp_path / "log", "wb") as log:
        training = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    run, deadline = Run(tmp_path / "runs/tiny"), time.monotonic() + 300
    while not run.metrics_file.exists() or len(run.metrics_file.read_bytes().splitlines()) < 20:
        assert time.monotonic() < deadline and training.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.1)
    words = f"pipeline\0train\0{run.path}".encode()
    ranks = [int(one.parent.name) for one in Path("/proc").glob("[0-9]*/cmdline") if words in cmdline(one)]
    assert len(ranks) == 2, ranks
    os.kill(ranks[1], signal.SIGSTOP)
    while not Chat.heard:
        assert time.monotonic() < deadline and training.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.1)
    assert "train seems to stall: no step for 00:" in Chat.heard[0][1]
    assert not read_event_lines(run, "train", "failed"), "the attempt has not ended"
    assert training.wait(200) != 0
    assert "train stalled: " in Chat.heard[1][1] and len(Chat.heard) == 2


def cmdline(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""


def test_a_sweep_has_a_curve_for_each_point(tmp_path: Path, mlflow: str) -> None:
    track = f"track={{tensorboard: true, wandb: {{project: p}}, mlflow: {{uri: '{mlflow}', experiment: sweep}}}}"
    sweep = "sweep={grid: {optimizer.lr: [0.001, 0.002], run.seed: [4, 5]}}"
    run = Run.create(load_config(write_config(tmp_path), [track, sweep]))
    for number, point in enumerate(create_points(run)):
        one = FakeRun.from_run(point)
        one.write_steps(number + 3)
        one.crash()
        one.write_steps(number + 7)
        for name in ("tensorboard", "wandb", "mlflow"):
            assert Follower(point, name).follow(lambda: False)
        losses = [*one.read_values().items()]
        assert curve(point.path, "train/loss") == in_float32(losses) and len(losses) == number + 7
        assert [step for step, _ in curve_of_wandb(point)] == [step for step, _ in losses]
        assert curve_of_mlflow(mlflow, point) == losses
        found = mlflow_run(mlflow, point)[1]
        assert found.info.run_name == f"tiny-{number:03d}" and found.data.tags["sluice.sweep"] == "tiny"
        assert found.data.params["run.seed"] == str(4 + number % 2)


def queries(board: Any) -> Iterator[str]:
    """Every query of a dashboard."""
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
        yield from queries(panel) if "panels" in panel else ()


def test_each_query_of_the_dashboard_has_data(tmp_path: Path) -> None:
    board = json.loads((ROOT / "dashboards/sluice.json").read_text())
    port = find_free_port()
    one = FakeRun(tmp_path, f"track={{prometheus: {{port: {port}}}}}")
    gpu = {"index": 0, "power_w": 512.5, "utilization_percent": 50, "memory_gb": 2.5, "sm_clock_mhz": 1980}
    gpu["temperature_c"] = 61
    looks = [{"time": time.time(), "host": "node7", "cpu_percent": 50.0, "memory_gb": 1.5, "gpus": [gpu]}]
    (one.run.path / "telemetry-node7.jsonl").write_text(json.dumps(looks[0]) + "\n")
    one.write_steps(5)
    one.crash()
    write_event(one.run, "straggler", "train", rank=3, host="node7", ratio=1.5, step=3)
    one.write_steps(3)
    one.write_evaluation()
    feed = Process.follower(one.run, "prometheus")
    asked = [query.replace("$run", "tiny").replace("$__rate_interval", "1m") for query in queries(board)]
    assert len(asked) >= 10
    try:
        with prometheus_server(tmp_path, port) as uri:
            deadline, empty = time.monotonic() + 90, asked
            while empty and time.monotonic() < deadline:
                time.sleep(1)
                one.write_steps(1)
                empty = [query for query in empty if not answered(uri, query)]
            assert not empty, "no data"
    finally:
        feed.end()


def answered(uri: str, query: str) -> bool:
    """Whether Prometheus has data for a query; an error fails the test."""
    with urllib.request.urlopen(f"{uri}/api/v1/query?query={urllib.parse.quote(query)}", timeout=20) as answer:
        found = json.load(answer)
    assert found["status"] == "success", query
    return bool(found["data"]["result"])

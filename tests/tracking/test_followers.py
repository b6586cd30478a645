"""Tests of followers, the processes that read a run directory and send its data to one tracker.

Each step is sent once despite restarts, stalls of the run are reported, and a failure of one tracker does not affect
the others.
"""

from __future__ import annotations

import json
import re
import stat
import struct
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import suppress
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cli.submit import check_submission
from pipeline.base.errors import UserError
from pipeline.base.signals import StopFlag
from pipeline.config.read import load_config
from pipeline.run.events import LostWork
from tests.support.events import write_event
from tests.support.fake_run import FakeRun, read_json_lines
from tests.support.servers import find_free_port
from tests.support.tiny import write_config
from tracking import follower, tracker, webhook
from tracking.follower import Follower


def read_tensorboard_curve(run: Path, tag: str) -> list[tuple[int, float]]:
    """Return the steps and values of a tag, as the reader of TensorBoard finds them. TensorBoard stores float32."""
    reader = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return [(scalar.step, scalar.value) for scalar in reader.Scalars(tag)]


def round_to_float32(curve: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the curve with its values rounded to float32, as TensorBoard stores them."""
    return [(step, struct.unpack("f", struct.pack("f", loss))[0]) for step, loss in curve]


class SimulatedKillError(Exception):
    """The follower was killed at this point."""


ACTIONS = st.lists(
    st.sampled_from([
        "steps", "steps", "poll", "poll", "save", "crash", "fail_and_restart poll restore", "kill",
        "poll_without_commit kill", "steps save crash evaluate_late", "steps save poll crash evaluate_late",
        "steps save poll crash announce_held_out_loss poll add_held_out_loss",
        "steps save crash announce_held_out_loss poll_without_commit kill add_held_out_loss",
    ]),
    min_size=4, max_size=14,
)  # fmt: skip
"""Random sequences of actions of a run and its followers. Most names are methods of FakeRun."""


@pytest.fixture(scope="module")
def fake_run(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    """Return a run that is tracked in TensorBoard and in a file of JSON lines."""
    folder = tmp_path_factory.mktemp("track")
    return FakeRun(folder, f"track={{tensorboard: true, jsonl: {folder}/all.jsonl}}")


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS, step_count=st.integers(1, 9))
def test_each_step_is_sent_once_despite_kills_and_restores(
    fake_run: FakeRun, monkeypatch: pytest.MonkeyPatch, actions: list[str], step_count: int
) -> None:
    """TensorBoard shows the final values of metrics.jsonl; the file of JSON lines has the first value of each step."""
    fake_run.reset()
    run = fake_run.run
    file = run.config.track.jsonl
    assert file is not None
    file.unlink(missing_ok=True)
    first_values: dict[int, float] = {}
    names = ("tensorboard", "jsonl")
    followers = {name: Follower(run, name) for name in names}
    for action in " ".join([*actions, "crash steps poll"]).split():  # the last actions send all that is still missing
        if action == "steps":
            fake_run.write_steps(step_count)
        elif action == "poll":
            for current_follower in followers.values():
                current_follower.catch_up()
            first_values = fake_run.read_values() | first_values
        elif action == "kill":  # new followers continue from the saved state
            followers = {name: Follower(run, name) for name in names}
        elif action == "poll_without_commit":  # the follower sends the data, but is killed before it saves its state
            with monkeypatch.context() as patch, suppress(SimulatedKillError):
                patch.setattr(follower, "write_json", _raise_simulated_kill)
                followers["tensorboard"].catch_up()
        else:
            getattr(fake_run, action)()
    assert read_tensorboard_curve(run.path, "train/loss") == round_to_float32(fake_run.read_values().items())
    if held_out_losses := fake_run.read_values("held_out_loss"):
        assert read_tensorboard_curve(run.path, "train/held_out_loss") == [*held_out_losses.items()]
    sent_steps = [(line["step"], line["loss"]) for line in read_json_lines(file) if line["kind"] == "step"]
    assert dict(sent_steps) == first_values and len(sent_steps) == len(first_values)
    sent_held_out = {line["step"]: line["held_out_loss"] for line in read_json_lines(file) if "held_out_loss" in line}
    assert held_out_losses.items() <= sent_held_out.items()


def _raise_simulated_kill(*_: object) -> None:
    raise SimulatedKillError


@pytest.mark.story
def test_a_tracker_that_fails_is_constructed_again(
    fake_run: FakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_run.reset()
    fake_run.write_steps(3)
    monkeypatch.setattr(follower, "POLL_S", 0.05)
    original_create = follower.create_tracker
    failures = iter([True, True])

    def create_after_two_failures(*arguments: Any) -> Any:
        return _raise_simulated_kill() if next(failures, False) else original_create(*arguments)

    monkeypatch.setattr(follower, "create_tracker", create_after_two_failures)
    polls = iter([True] * 60)  # `follow` continues for 60 polls, then sends the rest once more
    assert Follower(fake_run.run, "tensorboard").follow(lambda: next(polls, False))
    assert [step for step, _ in read_tensorboard_curve(fake_run.run.path, "train/loss")] == [1, 2, 3]
    assert capsys.readouterr().err.count("test_followers.SimulatedKillError") == 2


class Chat(BaseHTTPRequestHandler):
    """The webhook of a chat. It stores messages, or answers 503 (see `requests_to_fail` and `max_messages`)."""

    requests_to_fail = 0
    """How many of the next requests are answered with 503."""
    max_messages = 1000
    """If this many messages are stored, each request is answered with 503, as by a rate limit."""
    messages: ClassVar[list[tuple[str, str]]] = []
    """Identifier and text of each stored message."""

    def do_POST(self) -> None:
        """Store a message, or answer 503."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if type(self).requests_to_fail > 0 or len(self.messages) >= self.max_messages:
            type(self).requests_to_fail -= 1
            self.send_error(503)
            return
        type(self).messages.append((self.headers["Idempotency-Key"], body["text"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Do not log requests."""


@pytest.fixture
def chat_url() -> Iterator[str]:
    """Start a chat without messages and return the URL of its webhook."""
    Chat.messages.clear()
    Chat.max_messages = 1000
    server = HTTPServer(("127.0.0.1", 0), Chat)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/secret"
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_a_chat_receives_failures_hangs_and_the_end_of_the_run_once(
    tmp_path: Path, chat_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_run = FakeRun(tmp_path, "track={webhook: {variable: CHAT}}")
    fake_run.crash()
    with pytest.raises(UserError, match="CHAT"):  # the environment variable with the URL is not set
        Follower(fake_run.run, "webhook").catch_up()
    monkeypatch.setenv("CHAT", chat_url)
    write_event(fake_run.run, "failed", "train", job_id="2", cause="hang", exit_code=1, message="rank 3\nand more")
    write_event(fake_run.run, "requeued", "train", job_id="2", cause="hang", budget="hang")
    write_event(fake_run.run, "done", "train", job_id="2")
    write_event(fake_run.run, "done", "evaluate", job_id="3")
    Chat.requests_to_fail = 2
    for _ in range(2):  # each follower is started again after its request failed
        with pytest.raises(OSError, match="answered 503") as error:
            Follower(fake_run.run, "webhook").catch_up()
        assert "secret" not in str(error.value)
    Follower(fake_run.run, "webhook").catch_up()
    Follower(fake_run.run, "webhook").catch_up()
    assert [text.partition(" [")[0] for _, text in Chat.messages] == [
        "tiny: train failed (crashed): an error", "tiny: train stalled: rank 3", "tiny: done"
    ]  # fmt: skip
    assert all(f"id {identifier}]" in text for identifier, text in Chat.messages)
    assert len({identifier for identifier, _ in Chat.messages}) == 3


def test_a_chat_message_is_one_line_without_links_and_mentions(tmp_path: Path, chat_url: str) -> None:
    fake_run = FakeRun(tmp_path, f"track={{webhook: {{url: '{chat_url}'}}}}")
    message = "<!channel> & <https://evil.example|log in> @here me@here.example\rsecond\u2028third\x0bfourth"
    write_event(fake_run.run, "failed", "train", job_id="2", cause="crashed", exit_code=1, message=message)
    Follower(fake_run.run, "webhook").catch_up()
    ((_, text),) = Chat.messages
    assert "&lt;!channel&gt; &amp; &lt;https://evil.example|log in&gt;" in text
    assert not re.search(r"[<>]|@here\b", text) and "me@\u200bhere.example" in text
    assert len(text.splitlines()) == 1 and "second" in text and "fourth" in text


@pytest.mark.parametrize("key", ["step", "events", "heard"])  # `heard` is the time of the last data, in seconds
def test_a_saved_state_with_a_negative_number_is_ignored_and_all_steps_are_sent(tmp_path: Path, key: str) -> None:
    fake_run = FakeRun(tmp_path, f"track={{jsonl: {tmp_path}/all.jsonl}}")
    fake_run.write_steps(2)
    Follower(fake_run.run, "jsonl").catch_up()
    file = fake_run.run.path / "track/jsonl.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {key: -7}))
    (tmp_path / "all.jsonl").unlink()
    Follower(fake_run.run, "jsonl").catch_up()
    assert [line["step"] for line in read_json_lines(tmp_path / "all.jsonl") if line["kind"] == "step"] == [1, 2]


def test_each_message_is_sent_once_to_a_chat_with_a_rate_limit(tmp_path: Path, chat_url: str) -> None:
    fake_run = FakeRun(tmp_path, f"track={{webhook: {{url: '{chat_url}'}}}}")
    for _ in range(3):
        fake_run.crash()
    for message_count in (1, 2, 3):
        Chat.max_messages = message_count
        with suppress(OSError):
            Follower(fake_run.run, "webhook").catch_up()
    assert len(Chat.messages) == len(set(Chat.messages)) == 3


@pytest.mark.parametrize(
    "url", ["hooks.example/secret", "https://hooks.example/a secret", "https://hooks.example:secret/x"]
)
def test_an_invalid_webhook_url_is_not_printed(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_run = FakeRun(tmp_path, "track={webhook: {variable: CHAT}}")
    fake_run.crash()
    monkeypatch.setenv("CHAT", url)
    assert not Follower(fake_run.run, "webhook").follow(lambda: False)
    log = capsys.readouterr().err
    assert "secret" not in log and ("CHAT" in log or "InvalidURL" in log)


def start_idle_follower(fake_run: FakeRun, name: str, seconds: float) -> Follower:
    """Return a follower that has sent all data of the run, the newest of which arrived `seconds` ago."""
    Follower(fake_run.run, name).catch_up()
    file = fake_run.run.path / "track" / f"{name}.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"heard": time.time() - seconds}))
    return Follower(fake_run.run, name)


@pytest.fixture
def started_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the start time of the process, before which idle time does not count, to 1970."""
    monkeypatch.setattr(webhook, "_PROCESS_START", 0.0)


@pytest.mark.usefixtures("started_long_ago")
def test_each_stall_is_reported_once_before_the_watchdog_acts(tmp_path: Path, chat_url: str) -> None:
    """A long start-up and a run that is stopping are not stalls.

    Each report arrives although a request fails, and only once although each check uses a new follower. A stall is
    reported after half the time that the watchdog waits: 300 s, and 1800 s at the start (recovery.start_s).
    """
    fake_run = FakeRun(tmp_path, f"track={{webhook: {{url: '{chat_url}'}}}}")

    def poll_after(idle_s: float) -> list[str]:
        """Return the messages that a follower sends when the newest data of the run is `idle_s` seconds old."""
        idle_follower = start_idle_follower(fake_run, "webhook", idle_s)
        message_count = len(Chat.messages)
        for _ in range(3):
            with suppress(OSError):
                idle_follower.catch_up()
        return [text.partition(" [")[0].removeprefix("tiny: ") for _, text in Chat.messages[message_count:]]

    stall = "train seems to stall: no step for"
    assert poll_after(800) == [], "half of recovery.start_s has not passed yet"
    fake_run.write_steps(3)
    assert poll_after(140) == [], "half the time that the watchdog waits has not passed yet"
    Chat.requests_to_fail = 1
    assert poll_after(160) == [f"{stall} 02:40, since step 3"]
    assert poll_after(160) == [], "this stall was already reported"
    fake_run.write_steps(1)
    assert poll_after(160) == [f"{stall} 02:40, since step 4"]
    fake_run.crash()
    Follower(fake_run.run, "webhook").catch_up()
    assert poll_after(910) == [f"{stall} 15:10, since the start"]
    fake_run.write_steps(1)
    write_event(fake_run.run, "stopping", "train", job_id="2", by="USR2")
    assert poll_after(1000) == []
    assert len({identifier for identifier, _ in Chat.messages}) == len(Chat.messages) == 4


@pytest.mark.usefixtures("started_long_ago")
def test_slow_steps_long_saves_and_the_last_save_are_not_stalls(
    tmp_path: Path, chat_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 s without a step are a stall only if steps and saves are usually short."""
    fake_run = FakeRun(tmp_path, f"track={{webhook: {{url: '{chat_url}'}}}}", "train.steps=8")
    for step_s, save_s, message_count in ((40.0, 0.0, 0), (1.0, 200.0, 0), (1.0, 0.0, 1)):
        fake_run.reset()
        fake_run.step_s = step_s
        fake_run.save_s = save_s
        fake_run.write_steps(3)
        start_idle_follower(fake_run, "webhook", 300).catch_up()
        assert len(Chat.messages) == message_count, (step_s, save_s)
    fake_run.write_steps(5)
    start_idle_follower(fake_run, "webhook", 300).catch_up()
    assert len(Chat.messages) == 1, "the run saves after the last step"
    fake_run.reset()
    fake_run.write_steps(3)
    # The previous job wrote no event when it ended. The follower of the next job starts before its event `started`.
    monkeypatch.setattr(webhook, "_PROCESS_START", time.time())
    start_idle_follower(fake_run, "webhook", 300).catch_up()
    assert len(Chat.messages) == 1


@pytest.mark.usefixtures("started_long_ago")
def test_a_save_or_held_out_evaluation_that_is_due_is_not_a_stall(tmp_path: Path, chat_url: str) -> None:
    """This includes the first save and the first evaluation, whose durations are not known yet.

    It also includes an evaluation if the line of the previous one is not among the last lines of metrics.jsonl.
    """
    overrides = ("checkpoint.every_steps=300", "train.evaluate_every=1000", "data.held_out=0.1", "train.steps=3000")
    fake_run = FakeRun(tmp_path, f"track={{webhook: {{url: '{chat_url}'}}}}", *overrides)

    def reports_stall(idle_s: float) -> bool:
        """Return True if a follower reports a stall when the newest data of the run is `idle_s` seconds old."""
        message_count = len(Chat.messages)
        start_idle_follower(fake_run, "webhook", idle_s).catch_up()
        return len(Chat.messages) > message_count

    fake_run.write_steps(300)
    assert not reports_stall(850), "the first save is due: the limit is half of recovery.save_s (1800 s)"
    assert reports_stall(950)
    fake_run.write_steps(1)
    assert reports_stall(160), "no save is due"
    fake_run.write_steps(698)
    assert not reports_stall(850), "the first held-out evaluation is due"
    fake_run.evaluate_s = 1000.0
    fake_run.write_steps(1)
    Follower(fake_run.run, "webhook").catch_up()
    fake_run.evaluate_s = 0.0
    fake_run.write_steps(999)
    assert not reports_stall(1100), "the evaluation may take as long as the previous one, a thousand steps ago"
    assert reports_stall(1200)


@pytest.mark.usefixtures("started_long_ago")
def test_the_last_save_of_a_run_that_a_callback_stopped_early_is_not_a_stall(tmp_path: Path, chat_url: str) -> None:
    fake_run = FakeRun(tmp_path, f"track={{webhook: {{url: '{chat_url}'}}}}", "checkpoint.every_steps=1000")
    fake_run.write_steps(3)
    write_event(fake_run.run, "stopped_early", "train", step=3, reason="the loss no longer improves")
    start_idle_follower(fake_run, "webhook", 850).catch_up()
    assert not Chat.messages


@pytest.mark.usefixtures("started_long_ago")
def test_time_in_suspension_does_not_count_as_a_stall(
    tmp_path: Path, chat_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_run = FakeRun(tmp_path, f"track={{webhook: {{url: '{chat_url}'}}}}")
    fake_run.write_steps(3)
    webhook_follower = Follower(fake_run.run, "webhook")
    start = time.time()
    webhook_follower.catch_up()
    # Suspended for 5,000 s, then polled every 20 s. The limit is 150 s, half the time that the watchdog waits.
    for seconds, message_count in ((5000, 0), *((elapsed, 0) for elapsed in range(5020, 5141, 20)), (5152, 1)):
        monkeypatch.setattr(webhook.time, "time", lambda now=start + seconds: now)
        webhook_follower.catch_up()
        assert len(Chat.messages) == message_count, f"{seconds} s after the start, suspended for the first 5,000 s"


@pytest.mark.usefixtures("started_long_ago")
def test_a_stall_is_mailed_once_with_sendmail_and_a_missing_sendmail_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_run = FakeRun(tmp_path, "track={mail: me@example.org}")
    fake_run.write_steps(2)
    with monkeypatch.context() as patch:
        patch.setattr(webhook.shutil, "which", lambda name, path: None)
        with pytest.raises(UserError, match=r"tiny: train .*05:00") as caught:
            start_idle_follower(fake_run, "mail", 300).catch_up()
        assert caught.value.code == "track.no_sendmail"
    program = tmp_path / "sendmail"
    program.write_text(f"#!/bin/sh\n[ $1 = -t ] && sleep 0.2 && cat >> {tmp_path}/sent\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(webhook, "TIMEOUT_S", 0.01)  # this limit is for requests of webhooks, not for sendmail
    for _ in range(2):
        Follower(fake_run.run, "mail").catch_up()
    mail = message_from_bytes((tmp_path / "sent").read_bytes())
    assert mail["To"] == "me@example.org"
    assert mail["Subject"] == "tiny: train seems to stall: no step for 05:00, since step 2"
    assert (tmp_path / "sent").read_text().count("since step 2 [") == 1


def scrape_prometheus(port: int) -> str:
    """Return the metrics that a follower exports on this port, in Prometheus' text format."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def test_prometheus_exports_the_newest_step_in_base_units(tmp_path: Path) -> None:
    port = find_free_port()
    fake_run = FakeRun(tmp_path, f"track={{prometheus: {{port: {port}, textfile: {tmp_path}/prom}}}}")
    prometheus = Follower(fake_run.run, "prometheus")
    fake_run.write_steps(5)
    gpu = {"index": 3, "power_w": 512.5, "utilization_percent": 50, "memory_gb": 2.5, "sm_clock_mhz": 1980}
    sample = {"time": time.time(), "host": "node7", "cpu_percent": 50.0, "memory_gb": 1.5, "gpus": [gpu]}
    (fake_run.run.path / "telemetry-node7.jsonl").write_text(json.dumps(sample) + "\n")
    prometheus.catch_up()
    fake_run.crash()
    fake_run.write_evaluation()
    fake_run.write_steps(2)
    prometheus.catch_up()
    text = scrape_prometheus(port)
    assert text == (tmp_path / "prom/sluice-tiny.prom").read_text()
    assert stat.S_IMODE((tmp_path / "prom/sluice-tiny.prom").stat().st_mode) == 0o600
    events = vars(prometheus._tracker)["_events"]
    assert events and not any(isinstance(event, LostWork) for event in events), (
        "events with lists of lost lines must not be kept in memory"
    )
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    labels = 'run="tiny",sweep=""'
    assert float(values[f"sluice_step{{{labels}}}"]) == 2 and float(values[f"sluice_steps{{{labels}}}"]) == 30
    assert float(values[f"sluice_tokens_total{{{labels}}}"]) == 512
    assert float(values[f'sluice_stops_total{{cause="crashed",{labels}}}']) == 1
    assert float(values[f'sluice_attempts_total{{{labels.split(",")[0]},stage="train",sweep=""}}']) == 2
    assert float(values[f'sluice_evaluation{{figure="loss",{labels}}}']) == 2.5
    gpu_labels = f'{{gpu="3",host="node7",{labels}}}'
    assert float(values[f"sluice_gpu_power_watts{gpu_labels}"]) == 512.5
    assert float(values[f"sluice_gpu_utilization_ratio{gpu_labels}"]) == 0.5
    assert float(values[f"sluice_gpu_memory_used_bytes{gpu_labels}"]) == 2.5e9
    lint = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert lint.returncode == 0 and not lint.stderr, lint.stderr


def test_a_missing_package_is_an_error_before_the_run_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(write_config(tmp_path), ["track={wandb: {project: p}, telemetry_s: 5}"])
    tracker.check_tracker_packages(config)
    monkeypatch.setattr(tracker, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'sluice\[wandb") as caught:
        check_submission(config, on_slurm=False)
    assert caught.value.code == "track.missing_package"
    assert not config.run.root.exists()


def test_track_fails_if_another_process_feeds_the_tracker(fake_run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fake_run.reset().run
    flag = StopFlag()
    assert Follower(run, "jsonl").wait_for_lock(flag, once=True)
    monkeypatch.setattr(follower, "LOCK_WAIT_S", 0.0)
    with pytest.raises(UserError, match="jsonl") as caught:
        Follower(run, "jsonl").wait_for_lock(flag, once=True)
    assert caught.value.code == "track.already_followed"


def test_update_trackers_returns_the_signal_number_if_a_follower_is_killed(
    fake_run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], -9))
    assert follower.update_trackers(fake_run.reset().run, "jsonl", ()) == 9


def test_followers_of_a_sweep_send_its_events_but_no_steps(
    tmp_path: Path, chat_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = FakeRun(tmp_path, "sweep={grid: {optimizer.lr: [1e-3, 2e-3]}}", f"track={{webhook: {{url: '{chat_url}'}}}}")
    for stage in ("prepare", "shard"):
        write_event(sweep.run, "done", stage)
    write_event(sweep.run, "failed", "shard", cause="data", message="no space")
    Follower(sweep.run, "webhook").catch_up()
    assert len(Chat.messages) == 1 and "no space" in Chat.messages[0][1], Chat.messages
    updated_trackers: list[str] = []

    def record_updated_tracker(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        updated_trackers.append(command[3])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(follower.subprocess, "run", record_updated_tracker)
    follower.update_trackers(sweep.run, "tensorboard", ())
    follower.update_trackers(sweep.run, "jsonl", ())
    # TensorBoard shows only steps, and only the sweep points have steps
    assert updated_trackers == ["jsonl"]


def test_textfile_sharing_all_makes_only_the_textfile_readable(tmp_path: Path) -> None:
    fake_run = FakeRun(tmp_path, f"track={{prometheus: {{textfile: {tmp_path}/prom, textfile_sharing: all}}}}")
    fake_run.write_steps(1)
    for _ in range(2):
        Follower(fake_run.run, "prometheus").catch_up()
        assert stat.S_IMODE((tmp_path / "prom/sluice-tiny.prom").stat().st_mode) == 0o644
    assert stat.S_IMODE(fake_run.run.path.stat().st_mode) == 0o700

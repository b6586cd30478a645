"""Followers: each step once, whatever happens to the training and to them; a sink that fails is no one's trouble."""

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
from typing import ClassVar

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


def curve(run: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard's own reader finds; its values are float32."""
    reader = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return [(one.step, one.value) for one in reader.Scalars(tag)]


def in_float32(curve: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """The same values as TensorBoard keeps them."""
    return [(step, struct.unpack("f", struct.pack("f", loss))[0]) for step, loss in curve]


class Killed(Exception):
    """A follower that is gone without a word."""


WAYS = st.lists(
    st.sampled_from([
        "steps", "steps", "look", "look", "save", "crash", "fail_and_restart look restore", "kill", "torn kill",
        "steps save crash evaluate_late", "steps save look crash evaluate_late",
        "steps save look crash announce_held_out_loss look add_held_out_loss",
        "steps save crash announce_held_out_loss torn kill add_held_out_loss",
    ]),
    min_size=4, max_size=14,
)  # fmt: skip


@pytest.fixture(scope="module")
def fake_run(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    folder = tmp_path_factory.mktemp("track")
    return FakeRun(folder, f"track={{tensorboard: true, jsonl: {folder}/all.jsonl}}")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ways=WAYS, number=st.integers(1, 9))
def test_each_step_stands_once(
    fake_run: FakeRun, monkeypatch: pytest.MonkeyPatch, ways: list[str], number: int
) -> None:
    """TensorBoard ends with what metrics.jsonl ends with; a file for log collectors has the first value of each."""
    one = fake_run.reset()
    file = one.run.config.track.jsonl
    assert file is not None
    file.unlink(missing_ok=True)
    first: dict[int, float] = {}
    names = ("tensorboard", "jsonl")
    feeds = {name: Follower(one.run, name) for name in names}
    for way in " ".join([*ways, "crash steps look"]).split():
        if way == "steps":
            one.write_steps(number)
        elif way == "look":
            for feed in feeds.values():
                feed.catch_up()
            first = one.read_values() | first
        elif way == "kill":
            feeds = {name: Follower(one.run, name) for name in names}
        elif way == "torn":  # handed over, and not remembered: a kill follows
            with monkeypatch.context() as patch, suppress(Killed):
                patch.setattr(follower, "write_json", _die)
                feeds["tensorboard"].catch_up()
        else:
            getattr(one, way)()
    found = curve(one.run.path, "train/loss")
    assert found == in_float32(one.read_values().items())
    if made_up := one.read_values("held_out_loss"):
        assert curve(one.run.path, "train/held_out_loss") == [*made_up.items()]
    told = [(line["step"], line["loss"]) for line in read_json_lines(file) if line["kind"] == "step"]
    assert dict(told) == first and len(told) == len(first)
    late = {line["step"]: line["held_out_loss"] for line in read_json_lines(file) if "held_out_loss" in line}
    assert made_up.items() <= late.items()


def _die(*_: object) -> None:
    raise Killed


def test_a_sink_that_fails_is_tried_again_and_no_other_waits(
    fake_run: FakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = fake_run.reset()
    one.write_steps(3)
    monkeypatch.setattr(follower, "POLL_S", 0.05)
    make, fails = follower.create_tracker, iter([True, True])
    monkeypatch.setattr(follower, "create_tracker", lambda *a: _die() if next(fails, False) else make(*a))
    looks = iter([True] * 60)
    assert Follower(one.run, "tensorboard").follow(lambda: next(looks, False))
    assert [step for step, _ in curve(one.run.path, "train/loss")] == [1, 2, 3]
    assert capsys.readouterr().err.count("test_followers.Killed") == 2


class Chat(BaseHTTPRequestHandler):
    """A chat that is out of order at first."""

    failing, most = 0, 1000
    heard: ClassVar[list[tuple[str, str]]] = []

    def do_POST(self) -> None:
        """Take a message, or none."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if type(self).failing > 0 or len(self.heard) >= self.most:
            type(self).failing -= 1
            self.send_error(503)
            return
        type(self).heard.append((self.headers["Idempotency-Key"], body["text"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def chat() -> Iterator[str]:
    Chat.heard.clear()
    Chat.most = 1000
    server = HTTPServer(("127.0.0.1", 0), Chat)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/secret"
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_a_chat_hears_of_failure_stall_and_end(tmp_path: Path, chat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = FakeRun(tmp_path, "track={webhook: {variable: CHAT}}")
    with pytest.raises(UserError, match="CHAT"):
        one.crash()
        Follower(one.run, "webhook").catch_up()
    monkeypatch.setenv("CHAT", chat)
    write_event(one.run, "failed", "train", job_id="2", cause="hang", exit_code=1, message="rank 3\nand more")
    write_event(one.run, "requeued", "train", job_id="2", cause="hang", budget="hang")
    write_event(one.run, "done", "train", job_id="2")
    write_event(one.run, "done", "evaluate", job_id="3")
    Chat.failing = 2
    for _ in range(2):
        with pytest.raises(OSError, match="answered 503") as error:
            Follower(one.run, "webhook").catch_up()
        assert "secret" not in str(error.value)
    Follower(one.run, "webhook").catch_up()
    Follower(one.run, "webhook").catch_up()
    assert [text.partition(" [")[0] for _, text in Chat.heard] == [
        "tiny: train failed (crashed): oh", "tiny: train stalled: rank 3", "tiny: done"
    ]  # fmt: skip
    assert all(f"id {name}]" in text for name, text in Chat.heard) and len({name for name, _ in Chat.heard}) == 3


def test_a_message_to_a_chat_calls_nobody_and_is_one_line(tmp_path: Path, chat: str) -> None:
    one = FakeRun(tmp_path, f"track={{webhook: {{url: '{chat}'}}}}")
    message = "<!channel> & <https://evil.example|log in> @here me@here.example\rsecond\u2028third\x0bfourth"
    write_event(one.run, "failed", "train", job_id="2", cause="crashed", exit_code=1, message=message)
    Follower(one.run, "webhook").catch_up()
    ((_, text),) = Chat.heard
    assert "&lt;!channel&gt; &amp; &lt;https://evil.example|log in&gt;" in text
    assert not re.search(r"[<>]|@here\b", text) and "me@\u200bhere.example" in text
    assert len(text.splitlines()) == 1 and "second" in text and "fourth" in text


@pytest.mark.parametrize("key", ["step", "events", "heard"])
def test_a_memory_with_a_negative_number_counts_as_none(tmp_path: Path, key: str) -> None:
    one = FakeRun(tmp_path, f"track={{jsonl: {tmp_path}/all.jsonl}}")
    one.write_steps(2)
    Follower(one.run, "jsonl").catch_up()
    file = one.run.path / "track/jsonl.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {key: -7}))
    (tmp_path / "all.jsonl").unlink()
    Follower(one.run, "jsonl").catch_up()
    assert [line["step"] for line in read_json_lines(tmp_path / "all.jsonl") if line["kind"] == "step"] == [1, 2]


def test_a_chat_that_takes_few_at_a_time_hears_each_once(tmp_path: Path, chat: str) -> None:
    one = FakeRun(tmp_path, f"track={{webhook: {{url: '{chat}'}}}}")
    for _ in range(3):
        one.crash()
    for Chat.most in (1, 2, 3):
        with suppress(OSError):
            Follower(one.run, "webhook").catch_up()
    assert len(Chat.heard) == len(set(Chat.heard)) == 3


@pytest.mark.parametrize(
    "url", ["hooks.example/secret", "https://hooks.example/a secret", "https://hooks.example:secret/x"]
)
def test_a_wrong_url_of_a_chat_stays_out_of_the_log(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = FakeRun(tmp_path, "track={webhook: {variable: CHAT}}")
    one.crash()
    monkeypatch.setenv("CHAT", url)
    assert not Follower(one.run, "webhook").follow(lambda: False)
    told = capsys.readouterr().err
    assert "secret" not in told and ("CHAT" in told or "InvalidURL" in told)


def quiet(one: FakeRun, name: str, seconds: float) -> Follower:
    """A follower that is up to date, and has heard nothing for so long."""
    Follower(one.run, name).catch_up()
    file = one.run.path / "track" / f"{name}.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"heard": time.time() - seconds}))
    return Follower(one.run, name)


@pytest.fixture
def long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers that began before all."""
    monkeypatch.setattr(webhook, "_PROCESS_START", 0.0)


@pytest.mark.usefixtures("long_ago")
def test_a_chat_hears_of_a_stall_before_the_watchdog_ends_it(tmp_path: Path, chat: str) -> None:
    """Once for each; not of a long start, nor while it ends; through a chat that is out of order, and kills."""
    one = FakeRun(tmp_path, f"track={{webhook: {{url: '{chat}'}}}}")

    def heard(seconds: float) -> list[str]:
        feed, before = quiet(one, "webhook", seconds), len(Chat.heard)
        for _ in range(3):
            with suppress(OSError):
                feed.catch_up()
        return [text.partition(" [")[0].removeprefix("tiny: ") for _, text in Chat.heard[before:]]

    stall = "train seems to stall: no step for"
    assert heard(800) == [], "a start takes longer"
    one.write_steps(3)
    assert heard(140) == [], "not yet"
    Chat.failing = 1
    assert heard(160) == [f"{stall} 02:40, since step 3"]
    assert heard(160) == [], "it was told"
    one.write_steps(1)
    assert heard(160) == [f"{stall} 02:40, since step 4"]
    one.crash()
    Follower(one.run, "webhook").catch_up()
    assert heard(910) == [f"{stall} 15:10, since the start"]
    one.write_steps(1)
    write_event(one.run, "stopping", "train", job_id="2", by="USR2")
    assert heard(1000) == []
    assert len({name for name, _ in Chat.heard}) == len(Chat.heard) == 4


@pytest.mark.usefixtures("long_ago")
def test_what_is_slow_is_no_stall(tmp_path: Path, chat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps as they are here, a save as long as those before, a last save; the job before that left no word."""
    one = FakeRun(tmp_path, f"track={{webhook: {{url: '{chat}'}}}}", "train.steps=8")
    for step_s, save_s, told in ((40.0, 0.0, 0), (1.0, 200.0, 0), (1.0, 0.0, 1)):
        one.reset()
        one.step_s, one.save_s = step_s, save_s
        one.write_steps(3)
        quiet(one, "webhook", 300).catch_up()
        assert len(Chat.heard) == told, (step_s, save_s)
    one.write_steps(5)
    quiet(one, "webhook", 300).catch_up()
    assert len(Chat.heard) == 1, "the last step, and its save"
    one.reset()
    one.write_steps(3)
    monkeypatch.setattr(webhook, "_PROCESS_START", time.time())  # the next job's follower, before `started`
    quiet(one, "webhook", 300).catch_up()
    assert len(Chat.heard) == 1


@pytest.mark.usefixtures("long_ago")
def test_a_save_or_look_that_is_due_is_no_stall(tmp_path: Path, chat: str) -> None:
    """Also where the one before is no longer in the tail of metrics.jsonl, and the first one; a wrong one is told."""
    due = "checkpoint.every_steps=300", "train.evaluate_every=1000", "data.held_out=0.1", "train.steps=3000"
    one = FakeRun(tmp_path, f"track={{webhook: {{url: '{chat}'}}}}", *due)

    def told(seconds: float) -> bool:
        before = len(Chat.heard)
        quiet(one, "webhook", seconds).catch_up()
        return len(Chat.heard) > before

    one.write_steps(300)
    assert not told(850), "the first save"
    assert told(950)
    one.write_steps(1)
    assert told(160), "no save"
    one.write_steps(698)
    assert not told(850), "the first look"
    one.evaluate_s = 1000.0
    one.write_steps(1)
    Follower(one.run, "webhook").catch_up()
    one.evaluate_s = 0.0
    one.write_steps(999)
    assert not told(1100), "a look as long as the one a thousand steps ago"
    assert told(1200)


@pytest.mark.usefixtures("long_ago")
def test_the_last_save_of_a_training_that_a_callback_completed_is_no_stall(tmp_path: Path, chat: str) -> None:
    one = FakeRun(tmp_path, f"track={{webhook: {{url: '{chat}'}}}}", "checkpoint.every_steps=1000")
    one.write_steps(3)
    write_event(one.run, "stopped_early", "train", step=3, reason="the loss no longer improves")
    quiet(one, "webhook", 850).catch_up()
    assert not Chat.heard


@pytest.mark.usefixtures("long_ago")
def test_a_job_that_was_suspended_does_not_stall(tmp_path: Path, chat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = FakeRun(tmp_path, f"track={{webhook: {{url: '{chat}'}}}}")
    one.write_steps(3)
    feed, start = Follower(one.run, "webhook"), time.time()
    feed.catch_up()
    for seconds, told in ((5000, 0), *((at, 0) for at in range(5020, 5141, 20)), (5152, 1)):
        monkeypatch.setattr(webhook.time, "time", lambda at=start + seconds: at)
        feed.catch_up()
        assert len(Chat.heard) == told, f"after {seconds} s, of which 5,000 were suspended"


@pytest.mark.usefixtures("long_ago")
def test_a_stall_is_mailed_by_the_nodes_own_sendmail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = FakeRun(tmp_path, "track={mail: me@example.org}")
    one.write_steps(2)
    with monkeypatch.context() as patch:
        patch.setattr(webhook.shutil, "which", lambda name, path: None)
        with pytest.raises(UserError, match="tiny: train seems to stall: no step for 05:00, since s"):
            quiet(one, "mail", 300).catch_up()
    program = tmp_path / "sendmail"
    program.write_text(f"#!/bin/sh\n[ $1 = -t ] && sleep 0.2 && cat >> {tmp_path}/sent\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(webhook, "TIMEOUT_S", 0.01)  # a mail may take longer than a request
    for _ in range(2):
        Follower(one.run, "mail").catch_up()
    mail = message_from_bytes((tmp_path / "sent").read_bytes())
    assert (
        mail["To"] == "me@example.org"
        and mail["Subject"] == "tiny: train seems to stall: no step for 05:00, since step 2"
    )
    assert (tmp_path / "sent").read_text().count("since step 2 [") == 1


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def test_prometheus_has_the_newest_step_with_units(tmp_path: Path) -> None:
    port = find_free_port()
    one = FakeRun(tmp_path, f"track={{prometheus: {{port: {port}, textfile: {tmp_path}/prom}}}}")
    feed = Follower(one.run, "prometheus")
    one.write_steps(5)
    gpu = {"index": 3, "power_w": 512.5, "utilization_percent": 50, "memory_gb": 2.5, "sm_clock_mhz": 1980}
    look = {"time": time.time(), "host": "node7", "cpu_percent": 50.0, "memory_gb": 1.5, "gpus": [gpu]}
    (one.run.path / "telemetry-node7.jsonl").write_text(json.dumps(look) + "\n")
    feed.catch_up()
    one.crash()
    one.write_evaluation()
    one.write_steps(2)
    feed.catch_up()
    text = scraped(port)
    assert text == (tmp_path / "prom/sluice-tiny.prom").read_text()
    assert stat.S_IMODE((tmp_path / "prom/sluice-tiny.prom").stat().st_mode) == 0o600
    events = vars(feed._tracker)["_events"]
    assert events and not any(isinstance(event, LostWork) for event in events), "lists of lost lines are long"
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    own = 'run="tiny",sweep=""'
    assert float(values[f"sluice_step{{{own}}}"]) == 2 and float(values[f"sluice_steps{{{own}}}"]) == 30
    assert float(values[f"sluice_tokens_total{{{own}}}"]) == 512
    assert float(values[f'sluice_stops_total{{cause="crashed",{own}}}']) == 1
    assert float(values[f'sluice_attempts_total{{{own.split(",")[0]},stage="train",sweep=""}}']) == 2
    assert float(values[f'sluice_evaluation{{figure="loss",{own}}}']) == 2.5
    of_gpu = f'{{gpu="3",host="node7",{own}}}'
    assert float(values[f"sluice_gpu_power_watts{of_gpu}"]) == 512.5
    assert float(values[f"sluice_gpu_utilization_ratio{of_gpu}"]) == 0.5
    assert float(values[f"sluice_gpu_memory_used_bytes{of_gpu}"]) == 2.5e9
    lint = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert lint.returncode == 0 and not lint.stderr, lint.stderr


def test_what_is_not_installed_is_told_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(write_config(tmp_path), ["track={wandb: {project: p}, telemetry_s: 5}"])
    tracker.check_tracker_packages(config)
    monkeypatch.setattr(tracker, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'sluice\[wandb"):
        check_submission(config, on_slurm=False)
    assert not config.run.root.exists()


def test_a_sink_that_others_feed_is_told_to_who_waits_for_the_end(
    fake_run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, flag = fake_run.reset(), StopFlag()
    assert Follower(one.run, "jsonl").wait_for_lock(flag, True)
    monkeypatch.setattr(follower, "LOCK_WAIT_S", 0.0)
    with pytest.raises(UserError, match="jsonl"):
        Follower(one.run, "jsonl").wait_for_lock(flag, True)


def test_what_was_killed_is_not_up_to_date(fake_run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], -9))
    assert follower.update_trackers(fake_run.reset().run, "jsonl", ()) == 9


def test_a_sweep_tells_its_own_events_and_its_points_the_end(
    tmp_path: Path, chat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = FakeRun(tmp_path, "sweep={grid: {optimizer.lr: [1e-3, 2e-3]}}", f"track={{webhook: {{url: '{chat}'}}}}")
    for stage in ("prepare", "shard"):
        write_event(sweep.run, "done", stage)
    write_event(sweep.run, "failed", "shard", cause="data", message="no room")
    Follower(sweep.run, "webhook").catch_up()
    assert len(Chat.heard) == 1 and "no room" in Chat.heard[0][1], Chat.heard
    fed: list[str] = []

    def once(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        fed.append(command[3])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(follower.subprocess, "run", once)
    follower.update_trackers(sweep.run, "tensorboard", ())
    follower.update_trackers(sweep.run, "jsonl", ())
    assert fed == ["jsonl"], "a sweep has no steps"


def test_a_collector_may_read_the_textfile_of_a_private_run(tmp_path: Path) -> None:
    one = FakeRun(tmp_path, f"track={{prometheus: {{textfile: {tmp_path}/prom, textfile_sharing: all}}}}")
    one.write_steps(1)
    for _ in range(2):
        Follower(one.run, "prometheus").catch_up()
        assert stat.S_IMODE((tmp_path / "prom/sluice-tiny.prom").stat().st_mode) == 0o644
    assert stat.S_IMODE(one.run.path.stat().st_mode) == 0o700

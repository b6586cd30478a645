"""What stands in paths, events, logs and configs is shown as text: no markup, no commands to the terminal."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path

import pytest

from cli.doctor import Finding, print_findings
from cli.logs import print_log
from pipeline.base.console import PlainConsole
from pipeline.base.errors import make_printable
from pipeline.base.files import append_line
from pipeline.config.read import load_config
from pipeline.run import attempts
from pipeline.run.directory import Run
from slurm.query.status import print_status
from slurm.submit.local_runner import report_stage_end
from tests.support.events import write_event
from tests.support.tiny import write_config
from tracking.report import print_report

CLEAR, TITLE, REVERSE = "\x1b[2J\x1b[H", "\x1b]0;mine\x07", "\u202etxt.exe"
EVIL = f"{CLEAR}{TITLE}all is done\x9b2J{REVERSE}\r[bold red]:smiley:[/nothing]"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that failed with evil words, in a folder with an evil name."""
    monkeypatch.setattr(Run, "copy_code", lambda self, **more: None)
    root = json.dumps(str(tmp_path / "a[/b]c[red]:smiley:"))
    run = Run.create(load_config(write_config(tmp_path), [f"run.root={root}"]))
    write_event(run, "started", "train", job_id="1", attempt=1, task=None, host=EVIL)
    write_event(run, "failed", "train", job_id="1", attempt=1, cause=EVIL, message=EVIL, exit_code=1)
    run.code_dir.mkdir()
    (run.code_dir / "COMMIT").write_text(EVIL)
    (run.code_dir / "DIFF").write_text("")
    (run.stage_dir("train") / "rank-0.log").write_bytes(f"step 1\tloss 5 é\r\n{EVIL}\n".encode() + b"\xff\x1b\n")
    (run.jobs_dir / "train/own-times.json").write_text(json.dumps({EVIL: 1.5}))
    return run


def harmless(text: str) -> None:
    assert not any(character in text for character in "\x1b\x07\x9b\u202e"), ascii(text)


def test_status_report_and_words_of_an_end_are_text(run: Run) -> None:
    file = io.StringIO()
    console = PlainConsole(file=file, width=200)
    print_status(run, console)
    print_report(run, console)
    said = partial(console.print, soft_wrap=True)
    report_stage_end(run, "train", attempts.load_stage_state(run, "train", None), 1.0, None, said)
    print_findings([Finding(EVIL, EVIL, EVIL)], console)
    shown = file.getvalue()
    harmless(shown)
    assert "a[/b]c[red]:smiley:/tiny" in shown and "[bold red]:smiley:[/nothing]" in shown
    assert shown.count("all is done") >= 6
    harmless((run.path / "report.html").read_text())


def test_logs_are_text(run: Run, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    append_line(run.events_file, "")
    print_log(run, "train", "0", follow=False)
    shown = capsysbinary.readouterr().out.decode()
    harmless(shown)
    assert shown.startswith("step 1\tloss 5 é\r\n?[2J?[H?]0;mine?all is done") and shown.endswith("\n\ufffd?\n")


def test_what_is_printable_stays() -> None:
    assert make_printable("é × … ▒ 漢\t\n") == "é × … ▒ 漢\t\n" and make_printable("\0\r\x7f\x85\u2066") == "?????"

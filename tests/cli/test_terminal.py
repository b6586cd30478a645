"""Test that paths, events, logs and configs are printed as plain text, without terminal control codes.

Markup of rich in these texts, such as [bold], must be printed unchanged.
"""

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

CLEAR_SCREEN = "\x1b[2J\x1b[H"
SET_TITLE = "\x1b]0;title\x07"
RIGHT_TO_LEFT = "\u202etxt.exe"
"""Text that a terminal displays from right to left."""
MALICIOUS_TEXT = f"{CLEAR_SCREEN}{SET_TITLE}all is done\x9b2J{RIGHT_TO_LEFT}\r[bold red]:smiley:[/nothing]"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a failed run with malicious text in its events, logs and commit, and with markup in its path."""
    monkeypatch.setattr(Run, "copy_code", lambda self, **options: None)
    root = json.dumps(str(tmp_path / "a[/b]c[red]:smiley:"))
    run = Run.create(load_config(write_config(tmp_path), [f"run.root={root}"]))
    write_event(run, "started", "train", job_id="1", attempt=1, task=None, host=MALICIOUS_TEXT)
    write_event(
        run, "failed", "train", job_id="1", attempt=1, cause=MALICIOUS_TEXT, message=MALICIOUS_TEXT, exit_code=1
    )
    run.code_dir.mkdir()
    (run.code_dir / "COMMIT").write_text(MALICIOUS_TEXT)
    (run.code_dir / "DIFF").write_text("")
    (run.stage_dir("train") / "rank-0.log").write_bytes(
        f"step 1\tloss 5 é\r\n{MALICIOUS_TEXT}\n".encode() + b"\xff\x1b\n"
    )
    (run.jobs_dir / "train/own-times.json").write_text(json.dumps({MALICIOUS_TEXT: 1.5}))
    return run


def assert_no_control_characters(text: str) -> None:
    """Check that a text has none of the control characters of MALICIOUS_TEXT, except line ends."""
    assert not any(character in text for character in "\x1b\x07\x9b\u202e"), ascii(text)


def test_status_report_and_messages_contain_no_control_codes(run: Run) -> None:
    file = io.StringIO()
    console = PlainConsole(file=file, width=200)
    print_status(run, console)
    print_report(run, console)
    print_line = partial(console.print, soft_wrap=True)
    report_stage_end(run, "train", attempts.load_stage_state(run, "train", None), 1.0, None, print_line)
    print_findings([Finding(MALICIOUS_TEXT, MALICIOUS_TEXT, MALICIOUS_TEXT)], console)
    output = file.getvalue()
    assert_no_control_characters(output)
    assert "a[/b]c[red]:smiley:/tiny" in output and "[bold red]:smiley:[/nothing]" in output
    assert output.count("all is done") >= 6
    assert_no_control_characters((run.path / "report.html").read_text())


def test_printed_logs_contain_no_control_codes(run: Run, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    append_line(run.events_file, "")
    print_log(run, "train", "0", follow=False)
    output = capsysbinary.readouterr().out.decode()
    assert_no_control_characters(output)
    assert output.startswith("step 1\tloss 5 é\r\n?[2J?[H?]0;title?all is done") and output.endswith("\n\ufffd?\n")


def test_make_printable_replaces_only_control_characters() -> None:
    assert make_printable("é × … ▒ 漢\t\n") == "é × … ▒ 漢\t\n" and make_printable("\0\r\x7f\x85\u2066") == "?????"

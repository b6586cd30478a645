"""Commands as they are typed and as they are printed: by every door, from any folder, with or without `.venv`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command

import submit
from cli import looks
from pipeline.__main__ import LOOKS, parse
from pipeline.base.command import command
from pipeline.base.errors import ExitCode, UserError
from pipeline.run.changes import changeable_keys
from pipeline.run.code import CODE_ROOT

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
UNPREPARED = [sys.executable, "-S"]
"""A Python that has none of the packages."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of this code, with its `.venv`."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    shutil.copy(CODE_ROOT / "submit.py", folder)
    for name in ("cli", "slurm", "tracking", "planning", "pipeline", "data_prep"):
        (folder / name).symlink_to(CODE_ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.fixture
def sluice(tmp_path: Path) -> Path:
    """The console script that pip makes of setup.cfg's entry point."""
    setup = ConfigParser()
    setup.read(CODE_ROOT / "setup.cfg")
    name, _, place = setup["options.entry_points"]["console_scripts"].strip().partition(" = ")
    module, _, function = place.partition(":")
    script = tmp_path / "bin" / name
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    script.chmod(0o755)
    return script


def run(words: list[str], folder: Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, env=environment or CLEAN, capture_output=True, text=True, timeout=60)


def test_submit_goes_on_in_the_checkouts_venv(checkout: Path, tmp_path: Path) -> None:
    done = run([*UNPREPARED, "checkout/submit.py", "status"], tmp_path)
    assert done.returncode == 0 and "no runs below runs" in done.stdout, done.stderr
    (checkout / ".venv").unlink()
    done = run([*UNPREPARED, "checkout/submit.py", "status"], tmp_path)
    assert done.returncode == ExitCode.USER_ERROR and "Traceback" not in done.stderr
    assert "typer" in done.stderr and f"`make install` makes {checkout}/.venv" in done.stderr


def test_a_wrapper_script_in_the_venv_is_started_once(checkout: Path, tmp_path: Path) -> None:
    """It starts an interpreter elsewhere, which has no packages either: that is told, not tried again for ever."""
    (checkout / ".venv").unlink()
    script = checkout / ".venv/bin/python"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/sh\necho started >>{tmp_path}/starts\nexec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    done = run([*UNPREPARED, "checkout/submit.py", "status"], tmp_path)
    assert done.returncode == ExitCode.USER_ERROR and "typer" in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "starts").read_text().split() == ["started"]


@pytest.mark.parametrize("door", ["here", "elsewhere", "sluice", "sluice by its path"])
def test_a_printed_command_can_be_pasted(checkout: Path, sluice: Path, tmp_path: Path, door: str) -> None:
    folder, words, environment = tmp_path, [*UNPREPARED, "checkout/submit.py"], CLEAN
    if door == "here":
        folder, words = checkout, [*UNPREPARED, "submit.py"]
    elif door.startswith("sluice"):
        words, environment = [str(sluice)], {**CLEAN, "PYTHONPATH": str(CODE_ROOT)}
    if door == "sluice":
        words, environment["PATH"] = ["sluice"], f"{sluice.parent}{os.pathsep}{environment['PATH']}"
    # `env` looks the program up, as a shell does
    shown = run(["env", *words, "status"], folder, environment).stdout
    printed = shown.replace("\n", " ").partition("to make one: ")[2].removesuffix(" CONFIG.yaml ")
    assert printed.split()[-1] == words[-1], shown
    pasted = run(["bash", "-c", f"{printed} --version"], folder, environment)
    assert pasted.stdout == f"sluice {submit.VERSION}\n", pasted.stderr


def test_a_command_is_quoted_and_a_job_names_the_documented_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/slurm/__main__.py", "train"])
    assert command("resume", "runs/it's") == """python submit.py resume 'runs/it'"'"'s'"""
    monkeypatch.setattr(sys, "argv", ["/no where/submit.py"])
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert command("status") == f"{sys.executable} '/no where/submit.py' status", "another Python would lack packages"


@pytest.mark.parametrize(
    ("word", "hint"),
    [("statuss", "did you mean status?"), ("canel", "did you mean cancel?"), ("xyzzy", "the commands are submit, ")],
)
def test_a_mistyped_command_is_answered_with_the_nearest(word: str, hint: str) -> None:
    with pytest.raises(UserError, match=f"{word}: there is no such command, and no such file; {hint}"):
        submit.app([word, "runs/tiny"])


def test_a_config_is_no_mistyped_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "statuss").write_text("run: {}")
    for words in (["statuss"], ["missing.yaml"], ["--executor", "local", "missing.yaml"], ["configs/missing"]):
        with pytest.raises(UserError, match=r"train.* is missing|missing.*cannot read it"):
            submit.app(words)


def test_the_shell_completes_commands(sluice: Path, tmp_path: Path) -> None:
    asked = {"PYTHONPATH": str(CODE_ROOT), "_SLUICE_COMPLETE": "complete_bash", "COMP_WORDS": "sluice re"}
    done = run([str(sluice)], tmp_path, {**CLEAN, **asked, "COMP_CWORD": "1"})
    assert done.stdout.split() == ["resume", "report"], done.stderr


def test_the_help_names_every_command_on_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """In groups and uncut, on 80 columns; and how to begin."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        submit.app(["--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0 and max(map(len, shown.splitlines())) <= 80 and "..." not in shown.split("Options:")[1]
    begun = re.findall(r"^      (\w+) .*  [a-z]", shown.split("Run\n")[1], re.M)
    commands = get_command(submit.app)
    assert isinstance(commands, TyperGroup)
    assert sorted(begun) == sorted(["CONFIG", *({*commands.commands} - {"submit"})])
    assert re.search(r" init .*\n.* my_text.yaml --dry-run .*\n.* my_text.yaml ", shown) and "torch" not in shown


def test_the_readme_lists_every_command() -> None:
    commands = get_command(submit.app)
    assert isinstance(commands, TyperGroup)
    block = (CODE_ROOT / "README.md").read_text().split("## The commands")[1].split("```")[1]
    assert {*re.findall(r"^python submit\.py ([a-z]+) ", block, re.M)} == {*commands.commands} - {"submit"}


def test_help_and_docs_say_what_resume_takes() -> None:
    """All that it takes itself, and no more."""
    section = (CODE_ROOT / "docs/changing.md").read_text().split("## What `resume` may change")[1]
    rows = [line.split("|")[1] for line in section.split("It also accepts")[0].splitlines() if line.startswith("|")]
    assert sorted(re.findall(r"`([^`]*)`", "".join(rows))) == sorted(changeable_keys())
    words = (submit.resume.__doc__ or "").split("may change")[1].split("and enlarge")[0]
    assert sorted(re.findall(r"[\w.]+\.[\w*]+", words)) == sorted(changeable_keys())


def test_the_ranks_door_helps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--help"])
    assert end.value.code == 0
    assert "evaluate RUN --step 100          a named checkpoint" in capsys.readouterr().out


def test_what_is_no_stage_is_the_same_by_both_doors() -> None:
    """Declared once: the names that the ranks' door knows, and the options of each, are those of submit.py."""
    ours, theirs = (get_command(one) for one in (submit.app, looks.app))
    assert isinstance(ours, TyperGroup) and isinstance(theirs, TyperGroup)
    assert {*theirs.commands} == {*LOOKS}
    for name, one in theirs.commands.items():
        both = one, ours.commands[name]
        words = [[(p.name, p.opts, p.default, p.required) for p in each.params] for each in both]
        assert words[0] == words[1] and both[0].help == both[1].help


def test_a_mistake_at_the_ranks_door_is_told() -> None:
    done = [
        run([sys.executable, "-m", "pipeline", *more], CODE_ROOT) for more in (["verify"], ["verify", "--stp=3", "x"])
    ]
    assert [one.returncode for one in done] == [2, 2] and "Traceback" not in "".join(one.stderr for one in done)
    assert "Missing argument" in done[0].stderr and "No such option: --stp" in done[1].stderr


def test_a_rank_may_open_as_many_files_as_it_is_let() -> None:
    """A job takes over the soft limit of where it was submitted."""
    asked = "from resource import *; from pipeline.__main__ import main; main(['train', 'nowhere.yaml']); "
    words = ["sh", "-c", 'ulimit -Sn 256 && ulimit -Hn 2000 && exec "$@"', "sh", sys.executable, "-c"]
    done = run([*words, f"{asked}print(getrlimit(RLIMIT_NOFILE))"], CODE_ROOT)
    assert done.stdout.endswith("(2000, 2000)\n"), done.stderr

"""Whose a run is: what somebody else may have written is read, and never executed, emptied or adopted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pipeline.base.errors import Exit, UserError
from pipeline.base.ownership import open_own_file, own_folder, require_own_folder
from pipeline.config.read import load_config
from pipeline.run import code as run_module
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from tests.checkpoint.test_checkpoint import save_rank
from tests.support.needs import lacking
from tests.support.ranks import run_ranks
from tests.support.tiny import write_config

NOBODY = 65534
SUBMIT = [sys.executable, str(CODE_ROOT / "submit.py")]
AS_NOBODY = [
    "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups",
    "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",  # to reach python, wherever it is installed
]  # fmt: skip


@pytest.fixture
def trap(tmp_path: Path) -> Run:
    """A run with a checkpoint, whose code leaves a file `executed` when any of it runs."""
    run = Run.create(load_config(write_config(tmp_path), ["run.sharing=all"]))
    run_ranks(1, save_rank, run.checkpoints, False)
    for entry in ("pipeline/__init__.py", "slurm/__init__.py", "submit.py"):
        (run.code / entry).write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    return run


def call(folder: Path, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert not (folder / "executed").exists(), f"{command} executed the run's code"
    assert "Traceback" not in done.stderr, done.stderr
    return done


def only_read(folder: Path, before: Sequence[str] = ()) -> None:
    """What only reads works, with the code that was started."""
    done = call(folder, [*before, *SUBMIT, "verify", "runs/tiny"])
    assert done.returncode == 0 and re.search(r"^digest [0-9a-f]{64}$", done.stdout, re.M), done.stderr
    for words in (["status"], ["report"]):
        done = call(folder, [*before, *SUBMIT, *words, "runs/tiny"])
        assert done.returncode == 0 and "runs/tiny" in done.stdout, done.stderr


def belongs_to(run: Run, uid: int) -> None:
    if os.geteuid() != 0:
        lacking("giving a run to somebody else needs root")
    for path in (run.path, *run.path.rglob("*")):
        os.chown(path, uid, uid)


def test_nothing_of_somebody_elses_run_is_executed_even_by_root(tmp_path: Path, trap: Run) -> None:
    belongs_to(trap, NOBODY)
    before = trap.events.read_bytes()
    for command in (
        [*SUBMIT, "tiny.yaml", "run.sharing=all", "--executor=local"],
        [*SUBMIT, "resume", "runs/tiny", "--executor=local"],
        [*SUBMIT, "resume", "runs/tiny", "--update-code"],
        [sys.executable, "-m", "slurm", "prepare", str(trap.path)],
        [sys.executable, "-m", "pipeline", "prepare", str(trap.path)],
        [sys.executable, "-m", "pipeline", "prepare", "tiny.yaml", "run.sharing=all"],
    ):
        environment = {**os.environ, "PYTHONPATH": str(CODE_ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=240)
        assert done.returncode == Exit.USER_ERROR, command
        assert re.search(rb"runs/tiny belongs to \w+ \(uid 65534\).* another run.name", done.stderr), done.stderr
        assert not (tmp_path / "executed").exists(), command
    assert trap.events.read_bytes() == before and not list(trap.jobs.iterdir())
    only_read(tmp_path)


@pytest.mark.parametrize("place", ["config.yaml", "changes.jsonl", "jobs/train/1_submitted.pkl"])
def test_a_single_file_of_somebody_elses_in_our_run_is_refused(tmp_path: Path, place: str) -> None:
    run = Run.create(load_config(write_config(tmp_path)))
    run.stage_folder("train")
    (run.path / place).touch()
    run.refuse_foreign()
    if os.geteuid() != 0:
        lacking("giving a file to somebody else needs root")
    os.chown(run.path / place, NOBODY, NOBODY)
    with pytest.raises(UserError, match=rf"{place} belongs to \w+ \(uid {NOBODY}\)"):
        run.refuse_foreign()


def test_another_user_reads_and_does_not_execute(tmp_path: Path, trap: Run) -> None:
    belongs_to(trap, 0)
    only_read(tmp_path, AS_NOBODY)
    done = call(tmp_path, [*AS_NOBODY, *SUBMIT, "resume", "runs/tiny"])
    assert done.returncode == Exit.USER_ERROR and "runs/tiny belongs to root (uid 0)" in done.stderr


def others_may_write(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


PLACES: dict[str, Callable[[Run], Path]] = {
    "the run": lambda run: run.path,
    "its code": lambda run: run.code,
    "a file of it": lambda run: run.code / "pipeline/run/directory.py",
    "jobs": lambda run: run.jobs,
    "a stage's pickles": lambda run: run.stage_folder("train"),
    "a pickle": lambda run: run.stage_folder("train") / "1_submitted.pkl",
    "a job's script": lambda run: run.stage_folder("train") / "submission_file_1.sh",
    "the config, whose lines each job's shell runs": lambda run: run.config_file,
    "its changes": lambda run: run.changes,
}


@pytest.mark.parametrize("place", PLACES)
def test_what_others_may_write_is_not_executed_until_that_is_mended(tmp_path: Path, place: str) -> None:
    run = Run.create(load_config(write_config(tmp_path), ["run.sharing=group"]))
    if not PLACES[place](run).exists():
        PLACES[place](run).touch()
    run.refuse_foreign()
    others_may_write(PLACES[place](run))
    with pytest.raises(UserError, match=rf"{PLACES[place](run)} \(of .* may be written by others") as found:
        Run.open(run.path).refuse_foreign()
    assert f"chmod -R go-w {run.path}" in str(found.value)
    subprocess.run(str(found.value).rpartition(": ")[2], shell=True, check=True, timeout=10)
    run.refuse_foreign()


def test_a_private_run_may_have_any_modes_inside(tmp_path: Path) -> None:
    """Those made from checkouts with group-write modes, before these were left behind: nobody else gets there."""
    run = Run.create(load_config(write_config(tmp_path)))
    for path in (run.code, *run.code.rglob("*"), run.jobs):
        others_may_write(path)
    run.refuse_foreign()


def test_a_folder_that_others_may_write_is_not_adopted(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path))
    (tmp_path / "runs/tiny").mkdir(parents=True)
    (tmp_path / "runs/tiny").chmod(0o777)
    with pytest.raises(UserError, match=r"mode 777.* may be written by others"):
        Run.create(config)
    assert not list((tmp_path / "runs/tiny").iterdir())


def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_kept(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path))
    precious = tmp_path / "thesis"
    precious.write_text("mine")
    (tmp_path / "runs/tiny").mkdir(parents=True)
    (tmp_path / "runs/tiny/.creating").symlink_to(precious)
    with pytest.raises(UserError, match=r"\.creating is a symbolic link.* remove it"):
        Run.create(config)
    (tmp_path / "runs/tiny/.creating").unlink()
    run = Run.create(config)
    (run.stage_folder("train") / "lock").symlink_to(precious)
    with pytest.raises(UserError, match="train/lock is a symbolic link"):
        run.lock("train")
    with pytest.raises(UserError, match="train/lock is a symbolic link"):
        run.holder("train")
    assert precious.read_text() == "mine"


@pytest.mark.parametrize(("sharing", "folder", "file"), [("private", 0o700, 0o600), ("group", 0o750, 0o640)])
def test_the_copied_code_takes_no_modes_from_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharing: str, folder: int, file: int
) -> None:
    checkout = tmp_path / "checkout"
    for name in ("pipeline", "slurm", "data_prep"):
        shutil.copytree(CODE_ROOT / name, checkout / name)
    shutil.copy(CODE_ROOT / "submit.py", checkout)
    for path in (checkout, *checkout.rglob("*")):
        path.chmod(0o777 if path.is_dir() or path.name == "submit.py" else 0o666)
    monkeypatch.setattr(run_module, "CODE_ROOT", checkout)
    run = Run.create(load_config(write_config(tmp_path), [f"run.sharing={sharing}"]))
    os.umask(0)
    run.snapshot_code()
    os.umask(0o022)
    modes = {path: path.stat().st_mode & 0o7777 for path in (run.code, *run.code.rglob("*"))}
    assert modes.pop(run.code / "submit.py") == folder, "it was executable, and is"
    assert {mode for path, mode in modes.items() if path.is_dir()} == {folder}
    assert {mode for path, mode in modes.items() if not path.is_dir()} == {file}


def test_a_folder_that_is_open_stays_the_same_and_errors_name_its_path(tmp_path: Path) -> None:
    (mine := tmp_path / "mine").mkdir()
    with own_folder(mine) as held:
        mine.rename(tmp_path / "moved")
        mine.mkdir()
        (held / "file").write_text("in it")
    assert (tmp_path / "moved/file").read_text() == "in it" and not list(mine.iterdir())
    with pytest.raises(FileNotFoundError) as missing, own_folder(mine) as held:
        (held / "none").read_text()
    assert missing.value.filename == str(mine / "none")
    with pytest.raises(UserError, match=re.escape(f"{mine}/inside is a symbolic link")), own_folder(mine) as held:
        (held / "inside").symlink_to(tmp_path)
        require_own_folder(held / "inside")
    with pytest.raises(UserError, match=re.escape(f"{tmp_path}/moved/file is not a folder")):
        require_own_folder(tmp_path / "moved/file")
    with pytest.raises(FileNotFoundError):
        require_own_folder(tmp_path / "none")


def test_a_file_is_our_own_or_is_not_opened(tmp_path: Path) -> None:
    (mine := tmp_path / "mine").write_text("text")
    with open_own_file(mine) as file:
        assert file.read() == b"text"
    (link := tmp_path / "link").symlink_to(mine)
    os.mkfifo(pipe := tmp_path / "pipe")
    for path, problem in ((link, "symbolic link"), (pipe, "not an ordinary file"), (tmp_path, "not an ordinary file")):
        with pytest.raises(UserError, match=f"{path} is .*{problem}"):
            open_own_file(path)
    mine.chmod(0o620)
    with pytest.raises(UserError, match=rf"{mine} .*620.* written by others"):
        open_own_file(mine)
    mine.chmod(0o600)
    if os.geteuid() != 0:
        lacking("giving a file to somebody else needs root")
    os.chown(mine, NOBODY, NOBODY)
    with pytest.raises(UserError, match=rf"{mine} belongs to \w+ \(uid {NOBODY}\)"):
        open_own_file(mine)

"""Whose a run is: what somebody else may have written is read, and never executed, emptied or adopted."""

from __future__ import annotations

import grp
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pipeline.base.errors import ExitCode, UserError
from pipeline.base.ownership import (
    check_own_folder,
    describe_replacement_risk,
    find_unsafe_ancestors,
    make_ownership_script,
    open_own_file,
    open_own_folder,
)
from pipeline.config.read import load_config
from pipeline.run import code as run_module
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run, create_points
from slurm.submit.sbatch import render_batch_script
from tests.checkpoint.test_checkpoint import save_rank
from tests.support.ranks import run_ranks
from tests.support.requirements import skip_or_fail_in_ci
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
    run_ranks(1, save_rank, run.checkpoints_dir, False)
    for entry in ("pipeline/__init__.py", "slurm/__init__.py", "submit.py"):
        (run.code_dir / entry).write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
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
        skip_or_fail_in_ci("giving a run to somebody else needs root")
    for path in (run.path, *run.path.rglob("*")):
        os.chown(path, uid, uid)


def test_nothing_of_somebody_elses_run_is_executed_even_by_root(tmp_path: Path, trap: Run) -> None:
    belongs_to(trap, NOBODY)
    before = trap.events_file.read_bytes()
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
        assert done.returncode == ExitCode.USER_ERROR, command
        assert re.search(rb"runs/tiny belongs to \w+ \(uid 65534\).* another run.name", done.stderr), done.stderr
        assert not (tmp_path / "executed").exists(), command
    assert trap.events_file.read_bytes() == before and not list(trap.jobs_dir.iterdir())
    only_read(tmp_path)


@pytest.mark.parametrize(
    "place",
    [
        "config.yaml", "changes.jsonl", "jobs/train/1_submitted.pkl", "data/filter.py", "data/prepare.json",
        "data/chat.json", "data/code/filter.py", "data/code/prepare.json", "data",
    ],
)  # fmt: skip
def test_a_single_file_of_somebody_elses_in_our_run_is_refused(tmp_path: Path, place: str) -> None:
    run = Run.create(load_config(write_config(tmp_path)))
    run.stage_dir("train")
    (run.data_dir / "code").mkdir()  # of a source of a mixture
    (run.path / place).touch()
    run.check_owner()
    if os.geteuid() != 0:
        skip_or_fail_in_ci("giving a file to somebody else needs root")
    os.chown(run.path / place, NOBODY, NOBODY)
    with pytest.raises(UserError, match=rf"{place} belongs to \w+ \(uid {NOBODY}\)"):
        run.check_owner()


def test_another_user_reads_and_does_not_execute(tmp_path: Path, trap: Run) -> None:
    belongs_to(trap, 0)
    only_read(tmp_path, AS_NOBODY)
    done = call(tmp_path, [*AS_NOBODY, *SUBMIT, "resume", "runs/tiny"])
    assert done.returncode == ExitCode.USER_ERROR and "runs/tiny belongs to root (uid 0)" in done.stderr


def others_may_write(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


PLACES: dict[str, Callable[[Run], Path]] = {
    "the run": lambda run: run.path,
    "its code": lambda run: run.code_dir,
    "a file of it": lambda run: run.code_dir / "pipeline/run/directory.py",
    "jobs": lambda run: run.jobs_dir,
    "a stage's pickles": lambda run: run.stage_dir("train"),
    "a pickle": lambda run: run.stage_dir("train") / "1_submitted.pkl",
    "a job's script": lambda run: run.stage_dir("train") / "submission_file_1.sh",
    "the config, whose lines each job's shell runs": lambda run: run.config_file,
    "its changes": lambda run: run.changes_file,
    "its data": lambda run: run.data_dir,
    "the filter that prepare copied": lambda run: run.data_dir / "filter.py",
    "what prepare fixed": lambda run: run.data_dir / "prepare.json",
    "the chat template": lambda run: run.data_dir / "chat.json",
}


@pytest.mark.parametrize("place", PLACES)
def test_what_others_may_write_is_not_executed_until_that_is_mended(tmp_path: Path, place: str) -> None:
    run = Run.create(load_config(write_config(tmp_path), ["run.sharing=group"]))
    if not PLACES[place](run).exists():
        PLACES[place](run).touch()
    run.check_owner()
    others_may_write(PLACES[place](run))
    with pytest.raises(UserError, match=rf"{PLACES[place](run)} \(of .* may be written by others") as found:
        Run.open(run.path).check_owner()
    assert f"chmod -R go-w {run.path}" in str(found.value)
    subprocess.run(str(found.value).rpartition(": ")[2], shell=True, check=True, timeout=10)
    run.check_owner()


def test_a_private_run_may_have_any_modes_inside(tmp_path: Path) -> None:
    """Those made from checkouts with group-write modes, before these were left behind: nobody else gets there."""
    run = Run.create(load_config(write_config(tmp_path)))
    for path in (run.code_dir, *run.code_dir.rglob("*"), run.jobs_dir):
        others_may_write(path)
    run.check_owner()


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
    (run.stage_dir("train") / "lock").symlink_to(precious)
    with pytest.raises(UserError, match="train/lock is a symbolic link"):
        run.lock_stage("train")
    with pytest.raises(UserError, match="train/lock is a symbolic link"):
        run.lock_holder("train")
    assert precious.read_text() == "mine"


@pytest.mark.parametrize(("sharing", "folder", "file"), [("private", 0o700, 0o600), ("group", 0o750, 0o640)])
def test_the_copied_code_takes_no_modes_from_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharing: str, folder: int, file: int
) -> None:
    checkout = tmp_path / "checkout"
    for name in ("cli", "slurm", "tracking", "planning", "pipeline", "data_prep"):
        shutil.copytree(CODE_ROOT / name, checkout / name)
    shutil.copy(CODE_ROOT / "submit.py", checkout)
    for path in (checkout, *checkout.rglob("*")):
        path.chmod(0o777 if path.is_dir() or path == checkout / "submit.py" else 0o666)
    monkeypatch.setattr(run_module, "CODE_ROOT", checkout)
    run = Run.create(load_config(write_config(tmp_path), [f"run.sharing={sharing}"]))
    os.umask(0)
    run.copy_code()
    os.umask(0o022)
    modes = {path: path.stat().st_mode & 0o7777 for path in (run.code_dir, *run.code_dir.rglob("*"))}
    assert modes.pop(run.code_dir / "submit.py") == folder, "it was executable, and is"
    assert {mode for path, mode in modes.items() if path.is_dir()} == {folder}
    assert {mode for path, mode in modes.items() if not path.is_dir()} == {file}


def test_a_folder_that_is_open_stays_the_same_and_errors_name_its_path(tmp_path: Path) -> None:
    (mine := tmp_path / "mine").mkdir()
    with open_own_folder(mine) as held:
        mine.rename(tmp_path / "moved")
        mine.mkdir()
        (held / "file").write_text("in it")
    assert (tmp_path / "moved/file").read_text() == "in it" and not list(mine.iterdir())
    with pytest.raises(FileNotFoundError) as missing, open_own_folder(mine) as held:
        (held / "none").read_text()
    assert missing.value.filename == str(mine / "none")
    with pytest.raises(UserError, match=re.escape(f"{mine}/inside is a symbolic link")), open_own_folder(mine) as held:
        (held / "inside").symlink_to(tmp_path)
        check_own_folder(held / "inside")
    with pytest.raises(UserError, match=re.escape(f"{tmp_path}/moved/file is not a folder")):
        check_own_folder(tmp_path / "moved/file")
    with pytest.raises(FileNotFoundError):
        check_own_folder(tmp_path / "none")


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
        skip_or_fail_in_ci("giving a file to somebody else needs root")
    os.chown(mine, NOBODY, NOBODY)
    with pytest.raises(UserError, match=rf"{mine} belongs to \w+ \(uid {NOBODY}\)"):
        open_own_file(mine)


@pytest.mark.parametrize(
    ("mode", "uid", "problem"),
    [
        (0o2775, 0, r"group .*no sticky bit \(mode 2775\)"),
        (0o777, 0, r"everybody .*no sticky bit \(mode 777\)"),
        (0o1777, 0, None),
        (0o3775, 0, None),
        (0o2755, 0, None),
        (0o755, NOBODY, rf"belongs to \w+ \(uid {NOBODY}\)"),
        (0o1777, NOBODY, rf"belongs to \w+ \(uid {NOBODY}\)"),
    ],
)
def test_folders_above_a_run_in_which_others_can_replace_it_are_named(
    tmp_path: Path, mode: int, uid: int, problem: str | None
) -> None:
    """At any height, through a link, whether the run exists or not."""
    (lab := tmp_path / "lab").mkdir()
    if uid:
        if os.geteuid() != 0:
            skip_or_fail_in_ci("giving a folder to somebody else needs root")
        os.chown(lab, uid, uid)
    elif os.geteuid() == 0:
        os.chown(lab, 0, 1)
    lab.chmod(mode)
    (tmp_path / "link").symlink_to(lab)
    for run in ("lab/tiny", "lab/me/runs/tiny", "link/me/tiny"):
        found = find_unsafe_ancestors(tmp_path / run)
        assert [folder for folder, _ in found] == ([lab] if problem else []), found
        warning = describe_replacement_risk(tmp_path / run)
        assert (warning is None) == (problem is None)
        assert warning is None or re.search(f"{lab} .*{problem}", warning)
    if problem:
        (me := lab / "me").mkdir()
        me.chmod(0o777)
        assert [folder for folder, _ in find_unsafe_ancestors(me / "tiny")] == [me, lab]


def test_a_group_of_ones_own_is_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems give each user such a group, and the umask 002."""
    group = grp.struct_group(("ann", "x", 1500, []))
    monkeypatch.setattr(os, "geteuid", lambda: 1500)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: pwd.struct_passwd(("ann", "x", uid, 1500, "", "/", "")))
    monkeypatch.setattr("grp.getgrgid", lambda gid: group)
    (home := tmp_path / "ann").mkdir()
    home.chmod(0o775)
    if os.getuid() != 0:
        skip_or_fail_in_ci("giving a folder to somebody else needs root")
    os.chown(home, 1500, 1500)
    assert home not in dict(find_unsafe_ancestors(home / "tiny"))
    group = grp.struct_group(("ann", "x", 1500, ["ann", "bob"]))
    assert home in dict(find_unsafe_ancestors(home / "tiny"))


# -- a run that is replaced while its job waits ---------------------------------------------------------------


def foreign(path: Path) -> None:
    if os.geteuid() != 0:
        skip_or_fail_in_ci("giving a run to somebody else needs root")
    os.chown(path, NOBODY, NOBODY)


def replaced_by_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


def replaced_by_file(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.write_text("")


def removed(path: Path) -> None:
    path.rename(path.with_name("moved"))


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "nothing": (lambda path: None, ""),
    "the run is somebody else's": (foreign, "."),
    "its code is somebody else's": (foreign, "code"),
    "others may write the run": (others_may_write, "."),
    "others may write the code": (others_may_write, "code"),
    "a link instead of the run": (replaced_by_link, "."),
    "a link instead of the code": (replaced_by_link, "code"),
    "a file instead of the code": (replaced_by_file, "code"),
    "no run": (removed, "."),
    "no code": (removed, "code"),
}


@pytest.mark.parametrize(
    ("change", "sharing"), [*((change, "all") for change in CHANGES), ("others may write the code", "private")]
)
def test_a_job_starts_no_python_where_the_run_was_replaced(tmp_path: Path, change: str, sharing: str) -> None:
    """The script that Slurm keeps looks, since what it starts would be theirs."""
    started = "echo $PYTHONPATH $closed $folder $found"
    (python := tmp_path / "python3").write_text(f"#!/bin/sh\n{started} > {tmp_path}/started\n")
    python.chmod(0o755)
    (tmp_path / "my runs").mkdir()
    run = Run.create(load_config(write_config(tmp_path), [f"run.root={tmp_path}/my runs", f"run.sharing={sharing}"]))
    site = {"python": python, "setup": ["export closed=mine folder=mine found=mine"]}
    config = run.config.model_copy(update={"site": run.config.site.model_copy(update=site)})
    job = render_batch_script(run, config, "train")
    alter, place = CHANGES[change]
    alter(run.path / place)
    done = subprocess.run(["bash", "-s"], input=job, capture_output=True, text=True, timeout=60)
    is_harmless = change == "nothing" or sharing == "private"  # a closed run may have any modes inside
    assert (tmp_path / "started").exists() == is_harmless, done.stderr
    if not is_harmless:
        assert done.returncode == ExitCode.USER_ERROR and str(run.path / place) in done.stderr
    else:
        assert done.returncode == 0 and not done.stderr
        assert re.search(rf"{run.code_dir}\S* mine mine mine$", (tmp_path / "started").read_text().rstrip())


def test_the_code_of_a_point_is_that_of_its_sweep(tmp_path: Path) -> None:
    (python := tmp_path / "python3").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    python.chmod(0o755)
    grid = "sweep={grid: {optimizer.lr: [1.0e-3, 2.0e-3]}}"
    sweep = Run.create(load_config(write_config(tmp_path), [grid, "run.sharing=all", f"site.python={python}"]))
    point = create_points(sweep)[1]
    assert point.code_dir.is_symlink()
    job = render_batch_script(point, point.config, "train")

    def start() -> int:
        return subprocess.run(["bash", "-s"], input=job, capture_output=True, text=True, timeout=60).returncode

    assert start() == 0
    (tmp_path / "started").unlink()
    for path in (sweep.path, sweep.code_dir, point.path):
        mode = path.stat().st_mode
        path.chmod(0o777)
        assert start() == ExitCode.USER_ERROR and not (tmp_path / "started").exists(), path
        path.chmod(mode)


@pytest.mark.parametrize("name", ["train", "mpirun", "torchrun"])
def test_a_template_starts_no_python_where_the_run_was_replaced(tmp_path: Path, name: str) -> None:
    run = Run.create(load_config(write_config(tmp_path), ["run.sharing=all"]))
    for program in ("python", "srun", "mpirun", "scontrol"):
        (file := tmp_path / "bin" / program).parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
        file.chmod(0o755)
    variables = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_JOB_NODELIST": "a", "SLURM_JOB_NUM_NODES": "1"}
    environment = {**os.environ, **variables, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    environment.pop("PYTHON", None)
    template = CODE_ROOT / f"slurm/templates/{name}.sbatch"

    def start() -> subprocess.CompletedProcess[str]:
        command = ["bash", str(template), "runs/tiny"]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    assert start().returncode == 0 and (tmp_path / "started").exists()
    (tmp_path / "started").unlink()
    others_may_write(run.code_dir)
    done = start()
    assert done.returncode == ExitCode.USER_ERROR and f"{run.code_dir} must be a folder of your own" in done.stderr
    run.code_dir.chmod(0o755)
    foreign(run.path)
    done = start()
    assert done.returncode == ExitCode.USER_ERROR and f"{run.path} must be a folder of your own" in done.stderr
    assert not (tmp_path / "started").exists()
    assert make_ownership_script(['"$home"', '"$home/code"', '"$run"']) in template.read_text(), (
        "as the jobs of submit.py"
    )


def test_submit_and_doctor_warn_of_a_folder_where_a_run_can_be_replaced(tmp_path: Path) -> None:
    (lab := tmp_path / "lab").mkdir()
    lab.chmod(0o2777)
    write_config(tmp_path)
    tools = {"scontrol": "echo Slurmctld is UP", "squeue": "exit 1", "sinfo": "exit 1"}
    tools["sbatch"] = "echo sbatch: error: invalid partition specified >&2; exit 1"
    for name, line in tools.items():
        (file := tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{line}\n")
        file.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "COLUMNS": "1000"}
    for words in (
        ["tiny.yaml", f"run.root={lab}", "--executor=slurm", "--dry-run"],
        ["tiny.yaml", f"run.root={lab}", "--executor=slurm"],
        ["doctor", str(lab)],
    ):
        command = [*SUBMIT, *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert f"{lab} may be written by everybody and has no sticky bit" in done.stdout, (words, done.stderr)
        lab.chmod(0o3777)
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert "sticky" not in done.stdout + done.stderr, words
        lab.chmod(0o2777)

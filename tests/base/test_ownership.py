"""Tests that Sluice may read, but never executes or overwrites, files that another user may have changed."""

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
from tests.checkpoint.test_checkpoint import save_on_rank
from tests.support.errors import raises_error
from tests.support.ranks import run_ranks
from tests.support.requirements import skip_or_fail_in_ci
from tests.support.tiny import write_config

NOBODY = 65534
"""The user ID and group ID of the user `nobody`."""
SUBMIT = [sys.executable, str(CODE_ROOT / "submit.py")]
AS_NOBODY = [
    "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups",
    "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
    # with dac_read_search, `nobody` can read the Python installation, which may be in the home folder of root
]  # fmt: skip


@pytest.fixture
def run_with_detector(tmp_path: Path) -> Run:
    """Return a run with a checkpoint. The run's code creates the file `executed` when any part of it is executed."""
    run = Run.create(load_config(write_config(tmp_path), ["run.sharing=all"]))
    run_ranks(1, save_on_rank, run.checkpoints_dir, False)  # False: not in the background
    for entry in ("pipeline/__init__.py", "slurm/__init__.py", "submit.py"):
        (run.code_dir / entry).write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    return run


def run_command(folder: Path, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`; fail if it executes the run's code or prints a traceback."""
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert not (folder / "executed").exists(), f"{command} executed the run's code"
    assert "Traceback" not in result.stderr, result.stderr
    return result


def assert_run_is_readable(folder: Path, prefix: Sequence[str] = ()) -> None:
    """Check that the commands that only read a run work. `prefix` is put in front of each command."""
    result = run_command(folder, [*prefix, *SUBMIT, "verify", "runs/tiny"])
    assert result.returncode == 0 and re.search(r"^digest [0-9a-f]{64}$", result.stdout, re.M), result.stderr
    for name in ("status", "report"):
        result = run_command(folder, [*prefix, *SUBMIT, name, "runs/tiny"])
        assert result.returncode == 0 and "runs/tiny" in result.stdout, result.stderr


def change_owner(path: Path, uid: int) -> None:
    """Change the owner of a file or folder, not recursively, to `uid`. Skip the test if this process is not root."""
    if os.geteuid() != 0:
        skip_or_fail_in_ci("changing the owner of a file needs root")
    os.chown(path, uid, uid)


def change_owner_of_run(run: Run, uid: int) -> None:
    """Change the owner of the run directory and of everything in it to `uid`."""
    for path in (run.path, *run.path.rglob("*")):
        change_owner(path, uid)


@pytest.mark.story
def test_run_of_another_user_is_not_executed_even_by_root(tmp_path: Path, run_with_detector: Run) -> None:
    change_owner_of_run(run_with_detector, NOBODY)
    events_before = run_with_detector.events_file.read_bytes()
    for command in (
        [*SUBMIT, "tiny.yaml", "run.sharing=all", "--executor=local"],
        [*SUBMIT, "resume", "runs/tiny", "--executor=local"],
        [*SUBMIT, "resume", "runs/tiny", "--update-code"],
        [sys.executable, "-m", "slurm", "prepare", str(run_with_detector.path)],
        [sys.executable, "-m", "pipeline", "prepare", str(run_with_detector.path)],
        [sys.executable, "-m", "pipeline", "prepare", "tiny.yaml", "run.sharing=all"],
    ):
        environment = {**os.environ, "PYTHONPATH": str(CODE_ROOT)}
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert result.returncode == ExitCode.USER_ERROR, command
        for expected_text in ("error[run.foreign_owner]", "runs/tiny", f"uid {NOBODY}", "run.name"):
            assert expected_text in result.stderr, result.stderr
        assert not (tmp_path / "executed").exists(), command
    assert run_with_detector.events_file.read_bytes() == events_before
    assert not list(run_with_detector.jobs_dir.iterdir())
    assert_run_is_readable(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "config.yaml", "changes.jsonl", "jobs/train/1_submitted.pkl", "data/filter.py", "data/prepare.json",
        "data/chat.json", "data/code/filter.py", "data/code/prepare.json", "data",
    ],
)  # fmt: skip
def test_check_owner_fails_if_one_file_belongs_to_another_user(tmp_path: Path, name: str) -> None:
    run = Run.create(load_config(write_config(tmp_path)))
    run.stage_dir("train")
    (run.data_dir / "code").mkdir()  # the folder of a source `code` of a mixture
    (run.path / name).touch()
    run.check_owner()
    change_owner(run.path / name, NOBODY)
    with raises_error("run.foreign_owner", run.path / name, f"uid {NOBODY}"):
        run.check_owner()


@pytest.mark.story
def test_another_user_can_read_but_not_resume_a_run(tmp_path: Path, run_with_detector: Run) -> None:
    change_owner_of_run(run_with_detector, 0)
    assert_run_is_readable(tmp_path, AS_NOBODY)
    result = run_command(tmp_path, [*AS_NOBODY, *SUBMIT, "resume", "runs/tiny"])
    assert result.returncode == ExitCode.USER_ERROR
    for expected_text in ("error[run.foreign_owner]", "runs/tiny", "root (uid 0)"):
        assert expected_text in result.stderr, result.stderr


def make_group_writable(path: Path) -> None:
    """Allow the group to write to a file or folder."""
    path.chmod(path.stat().st_mode | 0o020)


CHECKED_PATHS: dict[str, Callable[[Run], Path]] = {
    "run directory": lambda run: run.path,
    "code": lambda run: run.code_dir,
    "file of the code": lambda run: run.code_dir / "pipeline/run/directory.py",
    "jobs": lambda run: run.jobs_dir,
    "folder of a stage's pickles": lambda run: run.stage_dir("train"),
    "pickle": lambda run: run.stage_dir("train") / "1_submitted.pkl",
    "batch script": lambda run: run.stage_dir("train") / "submission_file_1.sh",
    "config, which contains shell lines": lambda run: run.config_file,
    "changes of the config": lambda run: run.changes_file,
    "data": lambda run: run.data_dir,
    "filter that prepare copied": lambda run: run.data_dir / "filter.py",
    "results of prepare": lambda run: run.data_dir / "prepare.json",
    "chat template": lambda run: run.data_dir / "chat.json",
}


@pytest.mark.parametrize("path_name", CHECKED_PATHS)
def test_check_owner_fails_on_a_path_writable_by_others_until_the_printed_command_is_run(
    tmp_path: Path, path_name: str
) -> None:
    run = Run.create(load_config(write_config(tmp_path), ["run.sharing=group"]))
    path = CHECKED_PATHS[path_name](run)
    if not path.exists():
        path.touch()
    run.check_owner()
    make_group_writable(path)
    with pytest.raises(UserError) as raised:
        Run.open(run.path).check_owner()
    assert raised.value.code == "run.writable_by_others" and f"{path} (" in str(raised.value)
    command = f"chmod -R go-w {run.path}"
    assert str(raised.value).endswith(command)
    subprocess.run(command, shell=True, check=True, timeout=10)
    run.check_owner()


def test_check_owner_ignores_modes_inside_a_private_run(tmp_path: Path) -> None:
    """Code that old versions copied may be group-writable. Other users still cannot enter the run directory."""
    run = Run.create(load_config(write_config(tmp_path)))
    for path in (run.code_dir, *run.code_dir.rglob("*"), run.jobs_dir):
        make_group_writable(path)
    run.check_owner()


def test_creating_a_run_fails_if_its_folder_exists_and_is_writable_by_others(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path))
    (tmp_path / "runs/tiny").mkdir(parents=True)
    (tmp_path / "runs/tiny").chmod(0o777)
    with raises_error("run.writable_by_others", "runs/tiny", "mode 777"):
        Run.create(config)
    assert not list((tmp_path / "runs/tiny").iterdir())


def test_locking_fails_if_the_lock_file_is_a_link_and_keeps_the_target(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path))
    target = tmp_path / "file outside the run"
    target.write_text("content")
    (tmp_path / "runs/tiny").mkdir(parents=True)
    (tmp_path / "runs/tiny/.creating").symlink_to(target)
    with raises_error("run.foreign_file", "runs/tiny/.creating", "symbolic link"):
        Run.create(config)
    (tmp_path / "runs/tiny/.creating").unlink()
    run = Run.create(config)
    (run.stage_dir("train") / "lock").symlink_to(target)
    with raises_error("run.foreign_file", "train/lock", "symbolic link"):
        run.lock_stage("train")
    with raises_error("run.foreign_file", "train/lock", "symbolic link"):
        run.lock_holder("train")
    assert target.read_text() == "content"


@pytest.mark.parametrize(("sharing", "folder_mode", "file_mode"), [("private", 0o700, 0o600), ("group", 0o750, 0o640)])
def test_modes_of_the_copied_code_do_not_depend_on_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharing: str, folder_mode: int, file_mode: int
) -> None:
    checkout = tmp_path / "checkout"
    for name in ("cli", "slurm", "tracking", "planning", "pipeline", "data_prep"):
        shutil.copytree(CODE_ROOT / name, checkout / name)
    shutil.copy(CODE_ROOT / "submit.py", checkout)
    for path in (checkout, *checkout.rglob("*")):
        path.chmod(0o777 if path.is_dir() or path == checkout / "submit.py" else 0o666)
    monkeypatch.setattr(run_module, "CODE_ROOT", checkout)
    run = Run.create(load_config(write_config(tmp_path), [f"run.sharing={sharing}"]))
    os.umask(0)  # a umask must not be necessary to get the modes that run.sharing requires
    run.copy_code()
    os.umask(0o022)
    modes = {path: path.stat().st_mode & 0o7777 for path in (run.code_dir, *run.code_dir.rglob("*"))}
    assert modes.pop(run.code_dir / "submit.py") == folder_mode, "the copy of submit.py must stay executable"
    assert {mode for path, mode in modes.items() if path.is_dir()} == {folder_mode}
    assert {mode for path, mode in modes.items() if not path.is_dir()} == {file_mode}


def test_the_path_of_an_open_folder_stays_valid_if_the_folder_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with open_own_folder(folder) as fd_path:
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        (fd_path / "file").write_text("content")
    assert (tmp_path / "moved/file").read_text() == "content" and not list(folder.iterdir())


def test_errors_in_an_open_folder_name_the_original_path(tmp_path: Path) -> None:
    """Inside the block, paths lead through a descriptor in /proc/self/fd. Errors must not name these paths."""
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(FileNotFoundError) as raised, open_own_folder(folder) as fd_path:
        (fd_path / "missing").read_text()
    assert raised.value.filename == str(folder / "missing")
    with raises_error("run.foreign_file", folder / "link", "symbolic link"), open_own_folder(folder) as fd_path:
        (fd_path / "link").symlink_to(tmp_path)
        check_own_folder(fd_path / "link")


def test_check_own_folder_fails_for_a_file_and_for_a_missing_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises_error("run.foreign_file", tmp_path / "file", "not a folder"):
        check_own_folder(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        check_own_folder(tmp_path / "missing")


def test_open_own_file_fails_for_a_link_a_pipe_a_folder_and_files_of_others(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    with open_own_file(path) as file:
        assert file.read() == b"text"
    link = tmp_path / "link"
    link.symlink_to(path)
    with raises_error("run.foreign_file", link):
        open_own_file(link)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for not_a_file in (pipe, tmp_path):
        with raises_error("storage.not_a_file", not_a_file):
            open_own_file(not_a_file)
    path.chmod(0o620)
    with raises_error("run.writable_by_others", path, "mode 620"):
        open_own_file(path)
    path.chmod(0o600)
    change_owner(path, NOBODY)
    with raises_error("run.foreign_owner", path, f"uid {NOBODY}"):
        open_own_file(path)


@pytest.mark.parametrize(
    ("mode", "uid", "problem"),
    [
        (0o2775, 0, r"group .*no sticky bit \(mode 2775\)"),
        (0o777, 0, r"all users .*no sticky bit \(mode 777\)"),
        (0o1777, 0, None),
        (0o3775, 0, None),
        (0o2755, 0, None),
        (0o755, NOBODY, rf"belongs to \w+ \(uid {NOBODY}\)"),
        (0o1777, NOBODY, rf"belongs to \w+ \(uid {NOBODY}\)"),
    ],
)
def test_parent_folder_in_which_others_can_replace_a_run_is_reported(
    tmp_path: Path, mode: int, uid: int, problem: str | None
) -> None:
    """`problem` is None if a parent folder with this mode and owner is safe.

    All parents are checked, also those behind a symbolic link. The run itself need not exist.
    """
    lab = tmp_path / "lab"
    lab.mkdir()
    if uid:
        change_owner(lab, uid)
    elif os.geteuid() == 0:
        os.chown(lab, 0, 1)  # a group that is not the private group of root
    lab.chmod(mode)
    (tmp_path / "link").symlink_to(lab)
    for run_path in ("lab/tiny", "lab/me/runs/tiny", "link/me/tiny"):
        unsafe_folders = find_unsafe_ancestors(tmp_path / run_path)
        assert [folder for folder, _ in unsafe_folders] == ([lab] if problem else []), unsafe_folders
        warning = describe_replacement_risk(tmp_path / run_path)
        assert (warning is None) == (problem is None)
        assert warning is None or re.search(f"{lab} .*{problem}", warning)
    if problem:
        personal_folder = lab / "me"
        personal_folder.mkdir()
        personal_folder.chmod(0o777)
        assert [folder for folder, _ in find_unsafe_ancestors(personal_folder / "tiny")] == [personal_folder, lab]


def test_folder_writable_by_a_private_group_is_safe_unless_the_group_has_another_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On many systems, each user has a private group and the umask 002, so that all folders are group-writable."""
    ann_id = 1500  # the user ID of ann and the group ID of her private group
    group = grp.struct_group(("ann", "x", ann_id, []))
    monkeypatch.setattr(os, "geteuid", lambda: ann_id)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: pwd.struct_passwd(("ann", "x", uid, ann_id, "", "/", "")))
    monkeypatch.setattr("grp.getgrgid", lambda gid: group)
    home = tmp_path / "ann"
    home.mkdir()
    home.chmod(0o775)
    if os.getuid() != 0:
        skip_or_fail_in_ci("changing the owner of a file needs root")
    os.chown(home, ann_id, ann_id)
    assert home not in dict(find_unsafe_ancestors(home / "tiny"))
    group = grp.struct_group(("ann", "x", ann_id, ["ann", "bob"]))
    assert home in dict(find_unsafe_ancestors(home / "tiny"))


# -- a run that is changed while its job is pending ------------------------------------------------------------


def give_to_nobody(path: Path) -> None:
    """Change the owner of a file or folder to the user `nobody`."""
    change_owner(path, NOBODY)


def replace_with_link(path: Path) -> None:
    """Move a folder to the name `moved`, and put a symbolic link to it in its place."""
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


def replace_with_file(path: Path) -> None:
    """Move a folder to the name `moved`, and put an empty file in its place."""
    path.rename(path.with_name("moved"))
    path.write_text("")


def move_away(path: Path) -> None:
    """Move a folder to the name `moved`."""
    path.rename(path.with_name("moved"))


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no change": (lambda path: None, ""),
    "run belongs to another user": (give_to_nobody, "."),
    "code belongs to another user": (give_to_nobody, "code"),
    "run is writable by others": (make_group_writable, "."),
    "code is writable by others": (make_group_writable, "code"),
    "run is a link": (replace_with_link, "."),
    "code is a link": (replace_with_link, "code"),
    "code is a file": (replace_with_file, "code"),
    "run is missing": (move_away, "."),
    "code is missing": (move_away, "code"),
}
"""Changes of a run while its job is pending: a function that changes a path, and this path in the run directory."""


@pytest.mark.parametrize(
    ("change", "sharing"), [*((change, "all") for change in CHANGES), ("code is writable by others", "private")]
)
def test_batch_script_starts_python_only_if_no_other_user_can_have_changed_the_run(
    tmp_path: Path, change: str, sharing: str
) -> None:
    """The batch script checks owners and modes before it starts Python.

    The code of the run cannot check them, because it may have been replaced. Slurm has its own copy of the script.
    """
    # The check uses the shell variables closed, folder and found. It must not change variables of these names that
    # site.setup exports.
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\necho $PYTHONPATH $closed $folder $found > {tmp_path}/started\n")
    python.chmod(0o755)
    (tmp_path / "my runs").mkdir()
    run = Run.create(load_config(write_config(tmp_path), [f"run.root={tmp_path}/my runs", f"run.sharing={sharing}"]))
    site = {"python": python, "setup": ["export closed=a folder=b found=c"]}
    config = run.config.model_copy(update={"site": run.config.site.model_copy(update=site)})
    script = render_batch_script(run, config, "train")
    apply_change, changed_path = CHANGES[change]
    apply_change(run.path / changed_path)
    result = subprocess.run(["bash", "-s"], input=script, capture_output=True, text=True, timeout=60)
    # other users cannot enter a private run, so they cannot write to its code even if its mode allows it
    is_harmless = change == "no change" or sharing == "private"
    assert (tmp_path / "started").exists() == is_harmless, result.stderr
    if not is_harmless:
        assert result.returncode == ExitCode.USER_ERROR and str(run.path / changed_path) in result.stderr
    else:
        assert result.returncode == 0 and not result.stderr
        assert re.search(rf"{run.code_dir}\S* a b c$", (tmp_path / "started").read_text().rstrip())


def test_job_of_a_sweep_point_checks_the_sweep_and_the_point(tmp_path: Path) -> None:
    """A point has no code of its own. Its job executes the code of the sweep."""
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    python.chmod(0o755)
    grid = "sweep={grid: {optimizer.lr: [1.0e-3, 2.0e-3]}}"
    sweep = Run.create(load_config(write_config(tmp_path), [grid, "run.sharing=all", f"site.python={python}"]))
    point = create_points(sweep)[1]
    assert point.code_dir.is_symlink()
    script = render_batch_script(point, point.config, "train")

    def run_script() -> int:
        """Run the batch script and return its exit code."""
        return subprocess.run(["bash", "-s"], input=script, capture_output=True, text=True, timeout=60).returncode

    assert run_script() == 0
    (tmp_path / "started").unlink()
    for path in (sweep.path, sweep.code_dir, point.path):
        mode = path.stat().st_mode
        path.chmod(0o777)
        assert run_script() == ExitCode.USER_ERROR and not (tmp_path / "started").exists(), path
        path.chmod(mode)


@pytest.mark.parametrize("name", ["train", "mpirun", "torchrun"])
def test_sbatch_template_starts_no_python_if_another_user_can_change_the_run(tmp_path: Path, name: str) -> None:
    run = Run.create(load_config(write_config(tmp_path), ["run.sharing=all"]))
    for program in ("python", "srun", "mpirun", "scontrol"):
        write_program(tmp_path / "bin" / program, f"touch {tmp_path}/started")
    slurm_variables = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_JOB_NODELIST": "a", "SLURM_JOB_NUM_NODES": "1"}
    environment = {**os.environ, **slurm_variables, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    environment.pop("PYTHON", None)
    template = CODE_ROOT / f"slurm/templates/{name}.sbatch"

    def run_template() -> subprocess.CompletedProcess[str]:
        """Run the template as a batch script."""
        command = ["bash", str(template), "runs/tiny"]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    assert run_template().returncode == 0 and (tmp_path / "started").exists()
    (tmp_path / "started").unlink()
    make_group_writable(run.code_dir)
    result = run_template()
    assert result.returncode == ExitCode.USER_ERROR and f" {run.code_dir} " in result.stderr
    run.code_dir.chmod(0o755)
    give_to_nobody(run.path)
    result = run_template()
    assert result.returncode == ExitCode.USER_ERROR and f" {run.path} " in result.stderr
    assert not (tmp_path / "started").exists()
    script = make_ownership_script(['"$home"', '"$home/code"', '"$run"'])
    assert script in template.read_text(), "the template must contain the same check as the jobs of submit.py"


def write_program(file: Path, line: str) -> None:
    """Write an executable shell script of one line."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/sh\n{line}\n")
    file.chmod(0o755)


@pytest.mark.story
def test_submit_and_doctor_warn_if_others_can_replace_a_run(tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    lab.mkdir()
    lab.chmod(0o2777)  # all users may write, and there is no sticky bit
    write_config(tmp_path)
    # a Slurm that responds and rejects every job
    shell_lines = {"scontrol": "echo Slurmctld is UP", "squeue": "exit 1", "sinfo": "exit 1"}
    shell_lines["sbatch"] = "echo sbatch: error: invalid partition specified >&2; exit 1"
    for name, line in shell_lines.items():
        write_program(tmp_path / "bin" / name, line)
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "COLUMNS": "1000"}
    for arguments in (
        ["tiny.yaml", f"run.root={lab}", "--executor=slurm", "--dry-run"],
        ["tiny.yaml", f"run.root={lab}", "--executor=slurm"],
        ["doctor", str(lab)],
    ):
        command = [*SUBMIT, *arguments]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert re.search(rf"{lab} .*no sticky bit", result.stdout), (arguments, result.stderr)
        lab.chmod(0o3777)  # with a sticky bit
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert "sticky" not in result.stdout + result.stderr, arguments
        lab.chmod(0o2777)

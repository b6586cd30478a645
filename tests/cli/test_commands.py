"""Test the command line: how submit.py starts, the commands that it prints, its help, and its imports."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from configparser import ConfigParser
from pathlib import Path

import pytest
from typer.main import get_command

from cli import VERSION
from cli.main import COMMANDS, CommandGroup, app
from cli.resume import resume
from pipeline.__main__ import parse_arguments
from pipeline.base.command import format_command
from pipeline.base.errors import ExitCode, UserError
from pipeline.run.changes import changeable_keys
from pipeline.run.code import CODE_ROOT
from tests.support.tiny import write_config

CLEAN_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
PYTHON_WITHOUT_PACKAGES = [sys.executable, "-S"]
SLOW_PACKAGES = {"torch", "numpy", "h5py", "tokenizers", "safetensors", "pyarrow", "mpi4py"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder like a checkout: submit.py, and links to the packages and to a `.venv`."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    shutil.copy(CODE_ROOT / "submit.py", folder)
    for name in ("cli", "slurm", "tracking", "planning", "pipeline", "data_prep"):
        (folder / name).symlink_to(CODE_ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.fixture
def sluice(tmp_path: Path) -> Path:
    """Write the command `sluice` as pip would write it from the entry point in setup.cfg. Return its path."""
    setup = ConfigParser()
    setup.read(CODE_ROOT / "setup.cfg")
    name, _, target = setup["options.entry_points"]["console_scripts"].strip().partition(" = ")
    module, _, function = target.partition(":")
    script = tmp_path / "bin" / name
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    script.chmod(0o755)
    return script


@pytest.fixture
def group() -> CommandGroup:
    """Return the typer group of all commands."""
    command_group = get_command(app)
    assert isinstance(command_group, CommandGroup)
    return command_group


def run_command(
    arguments: list[str], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder` and return its result."""
    return subprocess.run(
        arguments, cwd=folder, env=environment or CLEAN_ENVIRONMENT, capture_output=True, text=True, timeout=60
    )


def test_submit_continues_in_the_venv_of_its_checkout(checkout: Path, tmp_path: Path) -> None:
    """A Python without the packages starts submit.py, which starts the Python of `.venv`. Without `.venv`, it fails."""
    result = run_command([*PYTHON_WITHOUT_PACKAGES, "checkout/submit.py", "status"], tmp_path)
    assert result.returncode == 0 and "no runs below runs" in result.stdout, result.stderr
    (checkout / ".venv").unlink()
    result = run_command([*PYTHON_WITHOUT_PACKAGES, "checkout/submit.py", "status"], tmp_path)
    assert result.returncode == ExitCode.USER_ERROR and "Traceback" not in result.stderr
    assert "typer" in result.stderr and "make install" in result.stderr and f"{checkout}/.venv" in result.stderr


def test_a_venv_python_that_is_a_wrapper_script_is_started_once(checkout: Path, tmp_path: Path) -> None:
    """The wrapper starts an interpreter without the packages, like the first one. It must not be started again."""
    (checkout / ".venv").unlink()
    script = checkout / ".venv/bin/python"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/sh\necho started >>{tmp_path}/starts\nexec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    result = run_command([*PYTHON_WITHOUT_PACKAGES, "checkout/submit.py", "status"], tmp_path)
    assert result.returncode == ExitCode.USER_ERROR and "typer" in result.stderr and "Traceback" not in result.stderr
    assert (tmp_path / "starts").read_text().split() == ["started"]


@pytest.mark.parametrize("entry_point", ["in the checkout", "from another folder", "sluice", "sluice by its path"])
def test_a_printed_command_works_in_the_same_folder(
    checkout: Path, sluice: Path, tmp_path: Path, entry_point: str
) -> None:
    """`status` in a folder without runs prints a command that creates a run. The test runs it with `--version`."""
    folder = tmp_path
    command = [*PYTHON_WITHOUT_PACKAGES, "checkout/submit.py"]
    environment = CLEAN_ENVIRONMENT
    if entry_point == "in the checkout":
        folder = checkout
        command = [*PYTHON_WITHOUT_PACKAGES, "submit.py"]
    elif entry_point.startswith("sluice"):
        command = [str(sluice)]
        environment = {**CLEAN_ENVIRONMENT, "PYTHONPATH": str(CODE_ROOT)}
    if entry_point == "sluice":
        command = ["sluice"]
        environment = environment | {"PATH": f"{sluice.parent}{os.pathsep}{environment['PATH']}"}
    # use `env`, because subprocess would search for the program in the PATH of this process
    output = run_command(["env", *command, "status"], folder, environment).stdout
    printed_command = output.replace("\n", " ").partition("to make one: ")[2].removesuffix(" CONFIG.yaml ")
    assert printed_command.split()[-1] == command[-1], output
    result = run_command(["bash", "-c", f"{printed_command} --version"], folder, environment)
    assert result.stdout == f"sluice {VERSION}\n", result.stderr


def test_a_printed_command_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/code/slurm/__main__.py", "train"])  # a process that submit.py did not start
    assert shlex.split(format_command("resume", "runs/it's")) == ["python", "submit.py", "resume", "runs/it's"]
    monkeypatch.setattr(sys, "argv", ["/my code/submit.py"])
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    # the command names this Python, because another Python may lack the packages
    assert shlex.split(format_command("status")) == [sys.executable, "/my code/submit.py", "status"]


@pytest.mark.parametrize(("command", "similar_command"), [("statuss", "status"), ("canel", "cancel"), ("xyzzy", None)])
def test_the_error_for_an_unknown_command_names_the_most_similar_command(
    command: str, similar_command: str | None
) -> None:
    """If no command is similar, the error lists all commands."""
    with pytest.raises(UserError) as error:
        app([command, "runs/tiny"])
    assert error.value.code == "cli.unknown_command" and str(error.value).startswith(f"{command}: ")
    for name in [similar_command] if similar_command else COMMANDS:
        assert name in str(error.value).partition(";")[2]


def test_an_existing_file_or_a_path_is_not_reported_as_an_unknown_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "statuss").write_text("run: {}")
    for arguments in (["statuss"], ["missing.yaml"], ["--executor", "local", "missing.yaml"], ["configs/missing"]):
        with pytest.raises(UserError) as error:
            app(arguments)
        assert error.value.code != "cli.unknown_command"


def test_the_shell_completes_commands(sluice: Path, tmp_path: Path) -> None:
    """The variables are those with which bash requests completions of the word "re"."""
    completion_request = {"PYTHONPATH": str(CODE_ROOT), "_SLUICE_COMPLETE": "complete_bash", "COMP_WORDS": "sluice re"}
    result = run_command([str(sluice)], tmp_path, {**CLEAN_ENVIRONMENT, **completion_request, "COMP_CWORD": "1"})
    assert result.stdout.split() == ["resume", "report"], result.stderr


def test_the_help_lists_every_command_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as exit_info:
        app(["--help"])
    output = capsys.readouterr().out
    assert exit_info.value.code == 0 and max(map(len, output.splitlines())) <= 80
    assert "..." not in output.split("Options:")[1]
    listed_names = re.findall(r"^      (\w+) .*  [a-z]", output.split("Run\n")[1], re.M)
    # `submit` has no name on the command line; its argument CONFIG is listed instead
    assert sorted(listed_names) == sorted(["CONFIG", *({*COMMANDS} - {"submit"})])
    assert "my_text.yaml --dry-run" in output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_its_arguments_have_help(name: str, group: CommandGroup) -> None:
    command = group.get_command(None, name)
    assert command is not None and command.help
    assert [parameter.name for parameter in command.params if not getattr(parameter, "help", "")] == []


def test_every_command_has_a_module() -> None:
    modules = {path.stem for path in (CODE_ROOT / "cli").glob("*.py")}
    assert {*COMMANDS} <= modules
    assert modules - {*COMMANDS} == {"__init__", "main", "common", "api"}


def test_the_readme_lists_every_command() -> None:
    block = (CODE_ROOT / "README.md").read_text().split("## The commands")[1].split("```")[1]
    assert {*re.findall(r"^python submit\.py ([a-z]+) ", block, re.M)} == {*COMMANDS} - {"submit"}


def test_help_and_docs_list_the_keys_that_resume_may_change() -> None:
    section = (CODE_ROOT / "docs/changing.md").read_text().split("## What `resume` may change")[1]
    first_table = section.split("| --- | --- |\n")[1].split("\n\n")[0]
    key_cells = [line.split("|")[1] for line in first_table.splitlines()]
    assert sorted(re.findall(r"`([^`]*)`", "".join(key_cells))) == sorted(changeable_keys())
    for key in changeable_keys():
        assert key in (resume.__doc__ or "")


COMMANDS_WITHOUT_TORCH = {
    "submit": ["tiny.yaml", "--dry-run", "--executor", "local"],
    "resume": ["runs/none"],
    "status": [],
    "report": ["runs/none"],
    "logs": ["runs/none", "train"],
    "cancel": ["runs/none"],
    "profile": ["runs/none"],
    "track": ["runs/none"],
    "doctor": ["--help"],
    "drill": ["runs/none"],
    "init": [],
    "schema": [],
}
"""Commands that must not import a slow package in their process, and arguments for each."""


@pytest.mark.parametrize("name", COMMANDS_WITHOUT_TORCH)
def test_a_command_that_needs_no_torch_imports_no_slow_package(name: str, tmp_path: Path) -> None:
    write_config(tmp_path)
    program = (
        "import json, sys\n"
        f"sys.argv = ['submit.py', {name!r}, *{COMMANDS_WITHOUT_TORCH[name]!r}]\n"
        "from cli.main import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    pass\n"
        "print(json.dumps([*sys.modules]))\n"
    )
    result = run_command([sys.executable, "-c", program], tmp_path, {**CLEAN_ENVIRONMENT, "PYTHONPATH": str(CODE_ROOT)})
    imported = {module.split(".")[0] for module in json.loads(result.stdout.splitlines()[-1])}
    assert f"cli.{name}" in result.stdout and SLOW_PACKAGES & imported == set(), result.stderr


def test_help_imports_neither_pydantic_nor_command_modules(tmp_path: Path) -> None:
    result = run_command([sys.executable, "-X", "importtime", str(CODE_ROOT / "submit.py"), "--help"], tmp_path)
    imported = set(re.findall(r"\| +([\w.]+)$", result.stderr, re.M))
    assert result.returncode == 0 and "cli.main" in imported
    assert {f"cli.{name}" for name in COMMANDS} & imported == set() and "pydantic" not in imported


def test_a_command_that_imports_torch_prefers_the_packages_of_sluice(tmp_path: Path) -> None:
    """A folder on PYTHONPATH contains another package `planning`. Processes that torch starts must not import it."""
    (tmp_path / "planning").mkdir()
    (tmp_path / "planning/__init__.py").write_text("raise ImportError('a package of the user')\n")
    program = (
        "import os, sys\n"
        "import cli.common\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "cli.common.prepare_for_torch()\n"
        "import planning.machine\n"
        "import subprocess\n"
        "subprocess.run([sys.executable, '-c', 'import planning.machine'], check=True)\n"
    )
    environment = {**CLEAN_ENVIRONMENT, "PYTHONPATH": f"{CODE_ROOT}{os.pathsep}{tmp_path}"}
    result = run_command([sys.executable, "-c", program], tmp_path, environment)
    assert result.returncode == 0, result.stderr


def test_a_command_that_imports_torch_exits_silently_if_its_pipe_is_closed(tmp_path: Path) -> None:
    program = "import cli.common, sys\ncli.common.prepare_for_torch()\nwhile True:\n    print('line', flush=True)\n"
    environment = {**CLEAN_ENVIRONMENT, "PYTHONPATH": str(CODE_ROOT)}
    writer = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert writer.stdout is not None and writer.stderr is not None
    writer.stdout.readline()
    writer.stdout.close()
    assert writer.wait(60) == -signal.SIGPIPE and writer.stderr.read() == b""


def test_ctrl_c_ends_a_command_that_imports_torch_without_a_traceback(tmp_path: Path) -> None:
    program = "import cli.common, time\ncli.common.prepare_for_torch()\nprint('ready', flush=True)\ntime.sleep(60)\n"
    environment = {**CLEAN_ENVIRONMENT, "PYTHONPATH": str(CODE_ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT and process.stderr.read() == b""


def test_the_help_of_the_rank_command_explains_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse_arguments(["--help"])
    assert exit_info.value.code == 0 and "evaluate RUN --step 100" in capsys.readouterr().out


def test_a_missing_argument_and_an_unknown_option_are_user_errors() -> None:
    submit = [sys.executable, str(CODE_ROOT / "submit.py")]
    missing_argument = run_command([*submit, "verify"], CODE_ROOT)
    unknown_option = run_command([*submit, "verify", "--stp=3", "x"], CODE_ROOT)
    assert missing_argument.returncode == unknown_option.returncode == ExitCode.USER_ERROR
    assert "Traceback" not in missing_argument.stderr + unknown_option.stderr
    assert "RUN" in missing_argument.stderr and "--stp" in unknown_option.stderr


def test_a_rank_raises_its_limit_of_open_files_to_the_hard_limit() -> None:
    """Otherwise, a job would keep the soft limit of the login node, which Slurm copies to jobs."""
    program = (
        "from resource import *; from pipeline.__main__ import main; main(['train', 'nowhere.yaml']); "
        "print(getrlimit(RLIMIT_NOFILE))"
    )
    command_with_limits = [
        "sh",
        "-c",
        'ulimit -Sn 256 && ulimit -Hn 2000 && exec "$@"',
        "sh",
        sys.executable,
        "-c",
        program,
    ]
    result = run_command(command_with_limits, CODE_ROOT)
    assert result.stdout.endswith("(2000, 2000)\n"), result.stderr

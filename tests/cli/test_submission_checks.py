"""Test the errors that submit.py and `--dry-run` report before a run is created or a job is submitted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

from cli.main import main
from cli.submit import check_submission
from examples import make_images
from pipeline.base.errors import ExitCode, UserError
from pipeline.config.read import load_config
from pipeline.run.code import CODE_ROOT
from slurm.query import capacity
from tests.support.other_user import as_other_user
from tests.support.requirements import skip_or_fail_in_ci
from tests.support.tiny import make_run, write_config

CUSTOM_CONFIG = """\
run: {name: images}
data: {source: images.h5, held_out: 0.1}
model: {target: image_model}
train: {steps: 2}
"""
MODEL_SOURCE = """\
import torch
ARRAYS = INPUTS = ('images',)
def build(options, layers): return torch.nn.Linear(2, 2)
def loss(outputs, batch): ...
"""
SWEEP = "sweep={grid: {model.options.width: [4, wide, 16]}}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with a tiny config. Return its path."""
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path)
    return tmp_path


def get_error(*overrides: str, on_slurm: bool = False, config: str = "tiny.yaml") -> str:
    """Return the message of the error that `check_submission` raises. Check that it creates no file."""
    files_before = sorted(Path.cwd().rglob("*"))
    with pytest.raises(UserError) as error:
        check_submission(load_config(Path(config), overrides), on_slurm)
    assert sorted(Path.cwd().rglob("*")) == files_before
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "expected_text"),
    [
        ("data.source=none/*.jsonl", "none/*.jsonl' matches no file; name .txt, .jsonl"),
        ("data.source=[corpus.jsonl, tiny.yaml]", "tiny.yaml: text"),
        ("data.tokenizer={kind: file, path: none.json}", "data.tokenizer.path: there is no file"),
        ("data.tokenizer={kind: file, path: corpus.jsonl}", "corpus.jsonl is not a readable tokenizer.json"),
        ("run.root=tiny.yaml", "cannot use {}/tiny.yaml/tiny: a part of the path is a file"),
        ("run.root=/proc", "run.root: cannot make /proc/tiny"),
    ],
)
def test_unusable_inputs_and_folders_are_errors_before_anything_is_created(
    folder: Path, override: str, expected_text: str
) -> None:
    """`{}` in the expected text is the path of the folder."""
    assert expected_text.replace("{}", str(folder)) in get_error(override)


def test_invalid_job_options_are_errors_on_slurm_only(folder: Path) -> None:
    conflicting_options = ("site.mem_gb=4", "stages.train.sbatch={mem-per-cpu: 1G}")
    check_submission(load_config(Path("tiny.yaml"), conflicting_options), on_slurm=False)
    assert "train: mem_gb and sbatch.mem-per-cpu exclude each other" in get_error(*conflicting_options, on_slurm=True)
    assert "site.pass: UNSET_VARIABLE not set" in get_error("site.pass=[UNSET_VARIABLE]", on_slurm=True)


def test_jobs_that_no_node_can_run_are_rejected_on_slurm_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes of the partition have four CPUs."""
    monkeypatch.setattr(capacity, "run_slurm_command", lambda *command, timeout_s: "low*|4|4|65536|(null)|(null)\n")
    monkeypatch.setattr(capacity, "read_slurm_config", lambda timeout_s: {})
    assert "site.cpus_per_task: 8" in get_error("site.partition=low", "site.cpus_per_task=8", on_slurm=True)
    check_submission(load_config(Path("tiny.yaml"), ("site.partition=low", "site.cpus_per_task=8")), on_slurm=False)
    check_submission(load_config(Path("tiny.yaml"), ("site.partition=low", "site.cpus_per_task=2")), on_slurm=True)


def test_an_unwritable_run_folder_is_rejected(folder: Path) -> None:
    """The check runs as another user, because root may write to all folders."""
    if os.geteuid() != 0:
        skip_or_fail_in_ci("changing the user requires root")
    config = load_config(Path("tiny.yaml"), ["run.root=/usr/none"])
    os.seteuid(1234)
    try:
        with pytest.raises(UserError) as error:
            check_submission(config, on_slurm=False)
        assert "/usr/none/tiny" in str(error.value) and "permission denied" in str(error.value)
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("source", ["texts/*.jsonl", "texts/corpus.jsonl", "texts"])
def test_an_unreadable_text_folder_is_rejected(folder: Path, source: str) -> None:
    """Root can read the folder, the other user cannot."""
    (folder / "texts").mkdir()
    (folder / "corpus.jsonl").rename(folder / "texts/corpus.jsonl")
    config = load_config(Path("tiny.yaml"), [f"data.source={folder}/{source}", "run.root=/tmp"])
    check_submission(config, on_slurm=False)
    (folder / "texts").chmod(0o700)
    with as_other_user(folder), pytest.raises(UserError, match=r"texts.*ermission denied"):
        check_submission(config, on_slurm=False)


@pytest.mark.story
def test_files_without_the_arrays_of_the_model_are_rejected(folder: Path) -> None:
    """With a container, the module is not imported and the files are not checked.

    The module and the files may exist only in the container.
    """
    (folder / "image_model.yaml").write_text(CUSTOM_CONFIG)
    (folder / "image_model.py").write_text(MODEL_SOURCE)
    assert "images.h5' matches no file; name .h5, .hdf5 files" in get_error(config="image_model.yaml")
    (folder / "images.h5").write_text("no HDF5 at all")
    assert f"cannot read {folder}/images.h5: " in get_error(config="image_model.yaml")
    with h5py.File(folder / "images.h5", "w") as file:
        file["tokens"] = [1, 2]
    message = get_error(config="image_model.yaml")
    assert f"{folder}/images.h5" in message and "'images'" in message and "tokens" in message
    make_images.main(folder / "images.h5", 20)
    check_submission(load_config(folder / "image_model.yaml"), on_slurm=False)
    (folder / "image_model.py").write_text(f"{MODEL_SOURCE}import missing_package\n")
    assert "image_model cannot be imported or built here" in get_error(config="image_model.yaml")
    container = "site.container={runtime: apptainer, image: /x.sif}"
    overrides = [container, "data.source=/path/in/container/*.h5"]
    check_submission(load_config(folder / "image_model.yaml", overrides), on_slurm=False)


def test_each_input_file_is_checked(folder: Path) -> None:
    """All files must have arrays of the same type and shape."""
    (folder / "image_model.py").write_text(MODEL_SOURCE)
    make_images.main(folder / "images-a.h5", 20)
    two_files = "data.source=images-*.h5"
    (folder / "image_model.yaml").write_text(CUSTOM_CONFIG)
    (folder / "images-b.h5").write_text("no HDF5 at all")
    assert f"cannot read {folder}/images-b.h5: " in get_error(two_files, config="image_model.yaml")
    with h5py.File(folder / "images-b.h5", "w") as file:
        file["images"] = [1, 2]
    message = get_error(two_files, config="image_model.yaml")
    assert f"{folder}/images-b.h5" in message and f"{folder}/images-a.h5" in message and "int64 (2,)" in message


@pytest.mark.story
def test_each_model_of_a_sweep_is_built(folder: Path) -> None:
    """The width "wide" of the second point makes `build` fail, or return None."""
    (folder / "image_model.yaml").write_text(CUSTOM_CONFIG)
    make_images.main(folder / "images.h5", 20)
    (folder / "image_model.py").write_text(MODEL_SOURCE.replace("2, 2", "2, options['width']"))
    message = get_error(SWEEP, config="image_model.yaml")
    assert "image_model cannot be imported or built here" in message
    assert "with model.options {'width': 'wide', " in message
    return_none = "return None if options['width'] == 'wide' else "
    (folder / "image_model.py").write_text(MODEL_SOURCE.replace("return ", return_none))
    message = get_error(SWEEP, config="image_model.yaml")
    assert "must return a torch.nn.Module; it returns None\nwith model.options {'width': 'wide', " in message


def test_modules_of_the_user_for_another_python_are_compiled_but_not_imported(folder: Path) -> None:
    """With `site.python`, the packages that a module imports may exist only for that Python.

    A syntax error must still be found. The error names the file of the user, not the copy in the run directory.
    """
    other_python = "site.python=/usr/bin/python3"
    (folder / "image_model.yaml").write_text(CUSTOM_CONFIG)
    make_images.main(folder / "images.h5", 20)
    (folder / "image_model.py").write_text(f"{MODEL_SOURCE}import helper, missing_package\n")
    (folder / "helper.py").write_text("x = 1\ndef broken(:\n")
    message = get_error(other_python, config="image_model.yaml")
    assert f'File "{folder}/helper.py", line 2' in message and "code/helper.py" not in message
    (folder / "helper.py").write_text("x = 1\n")
    check_submission(load_config(Path("image_model.yaml"), [other_python]), on_slurm=False)


def test_only_the_remaining_stages_of_an_existing_run_are_checked(folder: Path) -> None:
    """If the shards are complete, the input files may be missing. The config may change until the first checkpoint."""
    run = make_run(folder)
    (folder / "corpus.jsonl").unlink()
    check_submission(load_config(Path("tiny.yaml")), on_slurm=False)
    assert check_submission(load_config(Path("tiny.yaml"), ["optimizer.lr=0.5"]), on_slurm=False).corrections
    (run.checkpoints_dir / "step-00000007").mkdir()
    assert "exists with another config:\n  optimizer.lr: 0.01 → 0.5" in get_error("optimizer.lr=0.5")
    (run.data_dir / "prepare.json").unlink()
    assert "corpus.jsonl' matches no file" in get_error()
    run.write_request(run.cancelled_file)
    assert "runs/tiny was cancelled" in get_error()
    run.path.chmod(0o777)
    assert "mode 777" in get_error()


@pytest.mark.parametrize(
    ("overrides", "expected_text"),
    [
        (
            ["site.mem_gb=4", "stages.train.sbatch={mem-per-cpu: 1G}"],
            "mem_gb and sbatch.mem-per-cpu exclude each other",
        ),
        (["data.source=none/*.jsonl"], "matches no file"),
    ],
)
def test_submit_and_its_dry_run_report_the_same_error_and_submit_nothing(
    folder: Path, overrides: list[str], expected_text: str
) -> None:
    """The dry run reports the error also on a machine without Slurm."""
    commands = {"scontrol": "echo Slurmctld is UP", "sbatch": f"touch {folder}/submitted; exit 1", "squeue": "exit 1"}
    (folder / "bin").mkdir()
    for name, line in commands.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / "bin" / name).chmod(0o755)
    command = [sys.executable, str(CODE_ROOT / "submit.py"), "tiny.yaml", "--executor=slurm", *overrides]
    results = []
    for options, has_slurm in (([], True), (["--dry-run"], True), (["--dry-run"], False)):
        path = f"{folder}/bin:{os.environ['PATH']}" if has_slurm else "/nowhere"
        result = subprocess.run(
            [*command, *options], env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=240
        )
        results.append((result.returncode, result.stdout, result.stderr))
    assert results[0] == results[1] == results[2] and results[0][0] == ExitCode.USER_ERROR, results
    assert expected_text in results[0][2]
    assert not (folder / "runs").exists() and not (folder / "submitted").exists()


def test_a_dry_run_outside_an_allocation_fails_as_submit_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for options in ([], ["--dry-run"]):
        monkeypatch.setattr(sys, "argv", ["submit.py", "tiny.yaml", "--executor=allocation", *options])
        with pytest.raises(SystemExit, match=str(int(ExitCode.USER_ERROR))):
            main()
        assert "error[slurm.no_allocation]" in capsys.readouterr().err
    assert not (folder / "runs").exists()

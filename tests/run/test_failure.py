"""Test the remedy and the command that Sluice prints after a failure, for each cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.read import ConfigError, load_config
from pipeline.run.directory import Run
from pipeline.run.failure import describe_remedy, retry_command
from tests.support.tiny import write_config
from tests.support.user_mistakes import CUSTOM_CONFIG, CUSTOM_MODULE

RESUME = "python submit.py resume runs/tiny"
"""The command that continues the run of the fixture `run`."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a new run of the built-in decoder in a new working directory."""
    monkeypatch.chdir(tmp_path)
    return Run.create(load_config(write_config(tmp_path)))


@pytest.fixture
def custom_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a new run with a custom model in a new working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "classifier.yaml").write_text(CUSTOM_CONFIG)
    (tmp_path / "classifier.py").write_text(CUSTOM_MODULE)
    return Run.create(load_config(tmp_path / "classifier.yaml"))


def create_checkpoint(run: Run) -> None:
    """Create an empty directory with the name of a checkpoint of step 7."""
    (run.checkpoints_dir / "step-00000007").mkdir()


@pytest.mark.parametrize(
    ("message", "overrides"),
    [
        ("train.global_batch=7 is not a multiple of 2", "train.global_batch=…"),
        ("train.global_batch: 7 is not a multiple of 2", "train.global_batch=…"),
        ("no field 'body'; there are 'text'. Fix the files, or set data.text_field ('body')", "data.text_field=text"),
        ("no field 'body'; there are 'text', 'more'. Set data.text_field ('body')", "data.text_field=…"),
        ("/a/b.parquet: no column 'x' (data.text_field); there are a, b", "data.text_field=…"),
        ("data.source: it is one line: set data.text_documents: line, where a line is one", "data.text_documents=line"),
        ("where the site forbids it, set site.requeue: false", "site.requeue=false"),
        ("lower data.sequence_length or raise train.micro_batch", "data.sequence_length=… train.micro_batch=…"),
        ("add text or lower data.sequence_length", "data.sequence_length=…"),
        ("set a larger recovery.hang_s", "recovery.hang_s=…"),
        ("cannot make x: choose another run.root", ""),
        ("see data.text or /data.source/x", ""),
        ("another problem", ""),
    ],
)
def test_the_command_after_a_user_error_sets_the_key_that_the_message_names(
    run: Run, message: str, overrides: str
) -> None:
    """If the message does not say the correct value, the command contains the placeholder `…`."""
    command = f"{RESUME} {overrides}".strip()
    assert retry_command(run, "user_error", message) == command
    remedy = describe_remedy(run, "user_error", message)
    assert f": {command}\n" in remedy


def test_the_command_omits_keys_that_resume_cannot_change(run: Run) -> None:
    """After the first checkpoint, `resume` cannot change train.global_batch."""
    create_checkpoint(run)
    remedy = describe_remedy(run, "user_error", "lower train.global_batch, or set stages.train.time")
    assert f"{RESUME} stages.train.time=…" in remedy and "global_batch=" not in remedy
    remedy = describe_remedy(run, "user_error", "lower train.global_batch")
    assert f"{RESUME}\n" in remedy and "under another run.name" in remedy


def test_resume_rejects_the_placeholder_of_the_command_as_a_value(run: Run) -> None:
    with pytest.raises(ConfigError) as error:
        run.apply_overrides(["data.text_field=…"])
    assert "data.text_field" in str(error.value)


@pytest.mark.parametrize(
    ("message", "folder"),
    [
        ("error: cannot use {run}/checkpoints/x: no space is left on the device: free some", "{run}/checkpoints"),
        ("error: cannot use {run}/data: the disk quota is used up: free some", "{run}/data"),
        ("error: cannot use {run}/checkpoints/.tmp-7/x: no space is left on the device", "{run}/checkpoints"),
        ("error: cannot use /not/here/shard.h5: no space is left on the device: free some", "/not/here"),
        ("rank 1 on n1:\nerror: cannot use a file of the run: no space is left on the device", "{run}"),
        ("error: cannot write {run}/checkpoints: no space is left, it seems (5 bytes are free)", "{run}/checkpoints"),
    ],
)
def test_the_remedy_for_a_full_disk_names_the_directory(run: Run, message: str, folder: str) -> None:
    remedy = describe_remedy(run, "storage", message.format(run=run.path))
    assert remedy == f"free space in {folder.format(run=run.path)}, then: {RESUME}"


@pytest.mark.parametrize(
    ("cause", "hint"),
    [
        ("storage", "file system"),
        ("bad_checkpoint", "bring an intact checkpoint back into"),
        ("bad_input", "files"),
        ("hang", "to try again"),
        ("node_failure", "to try again"),
        ("non_finite", "to try again"),
    ],
)
def test_the_remedy_for_other_causes_is_resume_without_a_change(run: Run, cause: str, hint: str) -> None:
    create_checkpoint(run)
    remedy = describe_remedy(run, cause, "error: something")
    assert hint in remedy and remedy.endswith(f": {RESUME}") and "config" not in remedy


def test_the_remedy_for_an_error_in_a_filter_names_the_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keep.py").write_text("def keep(document):\n    return document['lang'] == 'en'\n")
    run = Run.create(load_config(write_config(tmp_path), ["data.filter=keep.py:keep"]))
    for prefix in ("error[data.filter_failed]: ", "error: ", ""):  # older code wrote no error code
        message = f"rank 0 on n1:\n{prefix}data.filter: /c.jsonl, record 1: it raised KeyError: 'lang'"
        remedy = describe_remedy(run, "user_error", message)
        assert "correct the function" in remedy and "keep.py:keep" in remedy and remedy.endswith(f": {RESUME}")


def test_the_command_after_a_time_limit_that_is_too_short_sets_its_key(run: Run) -> None:
    message = "It takes longer to start and to save than stages.train.time allows (recovery.time_limit: 3)"
    assert retry_command(run, "time_limit", message) == f"{RESUME} stages.train.time=…"


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_the_remedy_for_an_exception_in_the_users_module_names_file_and_line(
    custom_run: Run, has_checkpoint: bool
) -> None:
    """The line is that of the last frame in the module of the user."""
    if has_checkpoint:
        create_checkpoint(custom_run)
    module = custom_run.code_dir / "classifier.py"
    traceback = (
        f'Traceback\n  File "/x/torch/nn.py", line 3, in f\n  File "{module}", line 9, in loss\n'
        f'  File "{module}", line 10, in inner\n  File "/x/torch/nn.py", line 4, in g\nIndexError: target'
    )
    remedy = describe_remedy(custom_run, "crashed", f"rank 0 on n1:\n{traceback}")
    assert "classifier.py, line 10, then: python submit.py resume runs/classifier --update-code\n" in remedy
    assert str(custom_run.code_dir) in remedy and ("checkpoints/step-00000007" in remedy) == has_checkpoint


def test_the_remedy_for_a_crash_outside_the_users_module_names_no_line(custom_run: Run, run: Run) -> None:
    kill_message = "rank 1 on n1 was killed by SIGKILL (out of memory, or another process); its log: x"
    assert describe_remedy(custom_run, "crashed", kill_message).startswith(
        "to try again: python submit.py resume runs/classifier\n"
    )
    assert describe_remedy(run, "crashed", kill_message).startswith(f"to try again: {RESUME}\n")
    remedy = describe_remedy(custom_run, "crashed", 'Traceback\n  File "/x/torch/nn.py", line 3, in f\nIndexError')
    assert "module classifier," in remedy and "--update-code" in remedy


def test_the_command_updates_the_code_if_a_user_error_names_no_key(custom_run: Run) -> None:
    """The user must then correct the module of the model."""
    remedy = describe_remedy(custom_run, "user_error", "classifier: loss is a mean. Do not average it")
    assert "resume runs/classifier --update-code" in remedy
    remedy = describe_remedy(custom_run, "user_error", "labels go up to 2: set model.options.classes")
    assert "resume runs/classifier model.options.classes=…" in remedy and "--update-code" not in remedy

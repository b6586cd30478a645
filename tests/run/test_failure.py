"""What a user is told to do after a failure: the endings differ by what failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.read import ConfigError, load_config
from pipeline.run.directory import Run
from pipeline.run.failure import describe_remedy, retry_command
from tests.support.tiny import write_config
from tests.support.user_mistakes import CUSTOM_CONFIG, CUSTOM_MODULE

RESUME = "python submit.py resume runs/tiny"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return Run.create(load_config(write_config(tmp_path)))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run with a module of the user's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(CUSTOM_CONFIG)
    (tmp_path / "own.py").write_text(CUSTOM_MODULE)
    return Run.create(load_config(tmp_path / "own.yaml"))


def save_step(run: Run) -> None:
    (run.checkpoints_dir / "step-00000007").mkdir()


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("train.global_batch=7 is no multiple of 2", "train.global_batch=…"),
        ("train.global_batch: 7 is no multiple of 2", "train.global_batch=…"),
        ("no field 'body'; there are 'text'. Mend the files, or set data.text_field ('body')", "data.text_field=text"),
        ("no field 'body'; there are 'text', 'more'. Set data.text_field ('body')", "data.text_field=…"),
        ("/a/b.parquet: no column 'x' (data.text_field); there are a, b", "data.text_field=…"),
        ("data.source: it is one line: set data.text_documents: line, where a line is one", "data.text_documents=line"),
        ("where the site forbids it, set site.requeue: false", "site.requeue=false"),
        ("lower data.sequence_length or raise train.micro_batch", "data.sequence_length=… train.micro_batch=…"),
        ("add text or lower data.sequence_length", "data.sequence_length=…"),
        ("set a larger recovery.hang_s", "recovery.hang_s=…"),
        ("cannot make x: choose another run.root", ""),
        ("see data.text or /data.source/x", ""),
        ("something else", ""),
    ],
)
def test_the_command_after_a_user_error_has_the_key_that_the_message_names(
    run: Run, message: str, changes: str
) -> None:
    command = f"{RESUME} {changes}".strip()
    assert retry_command(run, "user_error", message) == command
    ending = describe_remedy(run, "user_error", message)
    assert f": {command}\n" in ending and "give the same command again" in ending


def test_a_key_that_resume_no_longer_takes_is_not_offered(run: Run) -> None:
    save_step(run)
    ending = describe_remedy(run, "user_error", "lower train.global_batch, or set stages.train.time")
    assert f"{RESUME} stages.train.time=…" in ending and "global_batch=" not in ending
    ending = describe_remedy(run, "user_error", "lower train.global_batch")
    assert f"{RESUME}\n" in ending and "under another run.name" in ending


def test_what_stands_for_a_value_is_no_value(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"data\.text_field: write a value"):
        run.apply_overrides(["data.text_field=…"])


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ("error: cannot use {run}/checkpoints/x: no space is left on the device: free some", "{run}/checkpoints"),
        ("error: cannot use {run}/data: the disk quota is used up: free some", "{run}/data"),
        ("error: cannot use {run}/checkpoints/.tmp-7/x: no space is left on the device", "{run}/checkpoints"),
        ("error: cannot use /not/here/shard.h5: no space is left on the device: free some", "/not/here"),
        ("rank 1 on n1:\nerror: cannot use a file of the run: no space is left on the device", "{run}"),
        ("error: cannot write {run}/checkpoints: no space is left, it seems (5 bytes are free)", "{run}/checkpoints"),
    ],
)
def test_after_a_full_disk_the_folder_to_free_space_in_is_named(run: Run, message: str, place: str) -> None:
    ending = describe_remedy(run, "storage", message.format(run=run.path))
    assert ending == f"free space in {place.format(run=run.path)}, then: {RESUME}"


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("storage", "file system"),
        ("bad_checkpoint", "bring an intact checkpoint back into"),
        ("bad_input", "files"),
        ("hang", "to try again"),
        ("node_failure", "to try again"),
        ("non_finite", "to try again"),
    ],
)
def test_what_is_no_fault_of_the_config_does_not_blame_it(run: Run, cause: str, words: str) -> None:
    save_step(run)
    ending = describe_remedy(run, cause, "error: something")
    assert words in ending and ending.endswith(f": {RESUME}") and "config" not in ending


def test_a_bug_in_a_filter_asks_to_correct_the_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keep.py").write_text("def keep(document):\n    return document['lang'] == 'en'\n")
    run = Run.create(load_config(write_config(tmp_path), ["data.filter=keep.py:keep"]))
    message = "rank 0 on n1:\nerror: data.filter: /c.jsonl, record 1: it raised KeyError: 'lang'"
    ending = describe_remedy(run, "user_error", message)
    assert "correct the function" in ending and "keep.py:keep" in ending and ending.endswith(f": {RESUME}")


def test_a_time_limit_that_is_too_short_is_named(run: Run) -> None:
    message = "It takes longer to start and to save than stages.train.time allows (recovery.time_limit: 3)"
    assert retry_command(run, "time_limit", message) == f"{RESUME} stages.train.time=…"


@pytest.mark.parametrize("saved", [False, True])
def test_a_bug_in_the_users_module_is_named_with_its_line(own: Run, saved: bool) -> None:
    if saved:
        save_step(own)
    trace = (
        f'Traceback\n  File "/x/torch/nn.py", line 3, in f\n  File "{own.code_dir}/own.py", line 9, in loss\n'
        f'  File "{own.code_dir}/own.py", line 10, in inner\n  File "/x/torch/nn.py", line 4, in g\nIndexError: target'
    )
    ending = describe_remedy(own, "crashed", f"rank 0 on n1:\n{trace}")
    assert "correct own.py, line 10, then: python submit.py resume runs/own --update-code\n" in ending
    assert str(own.code_dir) in ending and ("continues from checkpoints/step-00000007" in ending) == saved
    assert ("give the same command again" in ending) != saved


def test_a_crash_that_is_not_the_modules_does_not_ask_to_correct_it(own: Run, run: Run) -> None:
    killed = "rank 1 on n1 was killed by SIGKILL (out of memory, or somebody's kill); its log: x"
    assert describe_remedy(own, "crashed", killed).startswith("to try again: python submit.py resume runs/own\n")
    assert describe_remedy(run, "crashed", killed).startswith(f"to try again: {RESUME}\n")
    elsewhere = describe_remedy(own, "crashed", 'Traceback\n  File "/x/torch/nn.py", line 3, in f\nIndexError')
    assert (
        elsewhere.startswith("if the fault is in the module own, correct it, then: ") and "--update-code" in elsewhere
    )


def test_an_error_of_the_module_that_names_no_key_takes_the_corrected_module(own: Run) -> None:
    ending = describe_remedy(own, "user_error", "own: loss is a mean. Leave the mean out")
    assert "resume runs/own --update-code" in ending
    ending = describe_remedy(own, "user_error", "labels go up to 2: set model.options.classes")
    assert "resume runs/own model.options.classes=…" in ending and "--update-code" not in ending

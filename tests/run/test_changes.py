"""Test what happens if a config differs from that of an existing run, and how changes of a config are shown."""

from __future__ import annotations

import io
import shlex
from pathlib import Path

import pytest

from pipeline.base.console import PlainConsole
from pipeline.base.errors import UserError
from pipeline.config.read import load_config
from pipeline.run.changes import describe_changes
from pipeline.run.directory import Run
from pipeline.train import train_stage
from slurm.query import status
from slurm.submit import local_runner
from tests.support.tiny import write_config
from tracking.report import print_report


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a new run of 30 steps with an (empty) checkpoint of step 7, without a copy of the code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Run, "copy_code", lambda self, **options: None)
    run = Run.create(load_config(write_config(tmp_path)))
    (run.checkpoints_dir / "step-00000007").mkdir()
    return run


def get_error_lines(*overrides: str) -> list[str]:
    """Create the run again with overrides. Return the lines of the error message about the existing run."""
    with pytest.raises(UserError) as error:
        Run.create(load_config(Path("tiny.yaml"), overrides))
    assert error.value.code == "run.other_config"
    return str(error.value).splitlines()


def parse_resume_overrides(lines: list[str]) -> list[str]:
    """Return the overrides in the printed `resume` command. The command is split as in a shell."""
    (line,) = [line for line in lines if " resume runs/tiny" in line]
    command = shlex.split(line.split(": ", 1)[1])
    return command[command.index("runs/tiny") + 1 :]


CHANGEABLE_OVERRIDES = (
    "checkpoint.every_steps=5", "train.log_every=2", "evaluate.every=checkpoint", "train.steps=40",
    "parallel.data={replicate: 1, shard: 2}", "parallel.zero=1", "site.setup=[module load cuda]",
    "site.local_disk='/a \"b c'", "publish={to: /x}", "data.verify=sizes", "stages.train.sbatch={exclusive: true}",
)  # fmt: skip
"""Overrides of keys that `resume` may change, with values that need different quotes in a shell."""


def test_the_printed_resume_command_has_all_changes_that_resume_accepts(run: Run) -> None:
    lines = get_error_lines(*CHANGEABLE_OVERRIDES, "model.dim=64", "optimizer.lr=0.5")
    run.apply_overrides(parse_resume_overrides(lines))
    expected_config = load_config(Path("tiny.yaml"), CHANGEABLE_OVERRIDES)
    assert not describe_changes(Run.open(run.path).config, expected_config)
    (line,) = [line for line in lines if line.startswith("resume does not accept: ")]
    assert line.split(": ")[1].split(", ") == ["model.dim", "optimizer.lr"]


def test_keys_that_the_printed_command_cannot_contain_are_listed_separately(run: Run) -> None:
    """The command must contain no secrets, and an override cannot remove a key from a mapping such as `sbatch`."""
    run.apply_overrides(["stages.train.sbatch={exclusive: true}"])
    lines = get_error_lines("model.dim=64", "site.sbatch={spank-token: hunter2}", "train.log_every=3")
    assert parse_resume_overrides(lines) == ["train.log_every=3"] and "hunter2" not in str(lines)
    (line,) = [line for line in lines if line.startswith("add yourself")]
    assert "site.sbatch.spank-token" in line and "stages.train.sbatch.exclusive" in line


def test_the_printed_command_has_no_change_that_would_be_invalid(run: Run) -> None:
    """`parallel.tensor=4` is only valid with model.kv_heads=4, which `resume` cannot change."""
    lines = get_error_lines("parallel.tensor=4", "stages.train.tasks_per_node=4", "model.kv_heads=4")
    assert parse_resume_overrides(lines) == []
    assert any("parallel.tensor" in line and "invalid without the other changes" in line for line in lines)


def test_a_long_list_of_changes_is_truncated_but_not_the_command(run: Run) -> None:
    lines = get_error_lines(*(f"site.sbatch.k{number}=1" for number in range(50)), "model.dim=64")
    assert "  and 31 more" in lines and len(lines) < 30, "20 of 51 changes must be listed"
    assert len(parse_resume_overrides(lines)) == 50


def test_a_long_value_is_truncated(run: Run) -> None:
    lines = get_error_lines(f"site.setup=[{', '.join(['module load cuda'] * 5000)}]", "model.dim=64")
    assert max(len(line) for line in lines if line.startswith("  ")) < 300


def test_mixture_weights_may_change_only_for_steps_after_the_newest_checkpoint(tmp_path: Path, run: Run) -> None:
    """The newest checkpoint is that of step 7. A change from step 9 is accepted, a change from step 5 is not."""

    def make_overrides(weights: str) -> tuple[str, ...]:
        sources = "{a: {source: corpus.jsonl}, b: {source: corpus.jsonl}}"
        tokenizer = "data.tokenizer={kind: file, path: tokenizer.json}"
        return (
            "run.name=mix",
            "data.source=python-stdlib",
            tokenizer,
            f"data.mixture={{sources: {sources}, weights: {weights}}}",
        )

    same_weights = "[{weights: {a: 1, b: 1}}]"
    mixture_run = Run.create(load_config(Path("tiny.yaml"), make_overrides(same_weights)))
    (mixture_run.checkpoints_dir / "step-00000007").mkdir()
    changed_weights = "[{weights: {a: 1, b: 1}}, {from_step: 9, weights: {a: 1, b: 0}}]"
    assert Run.create(load_config(Path("tiny.yaml"), make_overrides(changed_weights))).corrections
    with pytest.raises(UserError, match=r"resume does not accept: data\.mixture\.weights"):
        Run.create(load_config(Path("tiny.yaml"), make_overrides(changed_weights.replace("9", "5"))))


def run_status_and_report(run: Run) -> tuple[str, str, str]:
    """Return the output of `status`, the output of `report`, and the page report.html, which `report` writes."""
    status_output = io.StringIO()
    report_output = io.StringIO()
    status.print_status(run, PlainConsole(file=status_output, width=200))
    print_report(run, PlainConsole(file=report_output, width=200))
    return status_output.getvalue(), report_output.getvalue(), (run.path / "report.html").read_text()


def test_status_and_report_show_changed_values(run: Run) -> None:
    """config.yaml keeps the original values."""
    assert not any("changes.jsonl" in text for text in run_status_and_report(run))
    run.apply_overrides(["train.steps=40", "checkpoint.every_steps=5", "site.sbatch={spank-token: hunter2}"])
    for text in run_status_and_report(Run.open(run.path)):
        assert "train.steps: 30 → 40" in text and "checkpoint.every_steps: 7 → 5" in text and "hunter2" not in text
    assert "steps: 30" in run.config_file.read_text()


def test_processes_that_follow_a_run_notice_a_change_by_another_process(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`status --watch`, and submit.py while it follows the train stage, read the config again after the change."""
    run.metrics_file.write_text('{"step": 31, "loss": 1.0, "step_time_s": 0.5, "tokens_per_s": 10.0}\n')
    poller = status.StatusPoller(run)
    output = io.StringIO()
    monkeypatch.setattr(local_runner, "PLAIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(local_runner, "POLL_S", 0.0)
    assert [row.cells["step"] for row in poller.poll() if row.stage == "train"] == ["31/30"]
    Run.open(run.path).apply_overrides(["train.steps=40"])
    assert [row.cells["step"] for row in poller.poll() if row.stage == "train"] == ["31/40"]
    Run.open(run.path).apply_overrides(["train.steps=50"])
    is_running = iter([True, True, False])
    local_runner.follow_stage(run, "train", lambda: next(is_running), PlainConsole(file=output, width=200))
    text = output.getvalue()
    # before `run` was followed, the poller had updated its config to 40 steps
    assert "train.steps: 40 → 50" in text and "step 31/50" in text, text


def test_a_stage_that_was_done_is_checked_again_after_a_change(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 30 steps are done. Then another process changes train.steps to 40."""
    monkeypatch.setattr(train_stage, "find_newest_step", lambda folder: 30)
    poller = status.StatusPoller(run)
    states_before = {row.stage: row.state for row in poller.poll()}
    Run.open(run.path).apply_overrides(["train.steps=40"])
    states_after = {row.stage: row.state for row in poller.poll()}
    assert states_before["train"] == "done" and states_after["train"] != "done"


def test_a_negative_duration_is_formatted_as_zero() -> None:
    from pipeline.base.text import format_duration

    assert format_duration(-40.0) == "00:00"

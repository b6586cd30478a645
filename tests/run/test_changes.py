"""What the message for an existing run offers, and who learns that a run's config was changed."""

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
    """A run of 30 steps with a checkpoint, made without a copy of the code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Run, "copy_code", lambda self, **more: None)
    made = Run.create(load_config(write_config(tmp_path)))
    (made.checkpoints_dir / "step-00000007").mkdir()
    return made


def refusal(*overrides: str) -> list[str]:
    """Return the lines of the message for the existing run, whose config would be changed so."""
    with pytest.raises(UserError, match="exists with another config") as refused:
        Run.create(load_config(Path("tiny.yaml"), overrides))
    return str(refused.value).splitlines()


def offered(lines: list[str]) -> list[str]:
    """Return the overrides of the printed `resume` command, as a shell reads them."""
    (line,) = [line for line in lines if " resume runs/tiny" in line]
    words = shlex.split(line.split(": ", 1)[1])
    return words[words.index("runs/tiny") + 1 :]


EVERY_KIND = (
    "checkpoint.every_steps=5", "train.log_every=2", "evaluate.every=checkpoint", "train.steps=40",
    "parallel.data={replicate: 1, shard: 2}", "parallel.zero=1", "site.setup=[module load cuda]",
    "site.local_disk='/a \"b c'", "publish={to: /x}", "data.verify=sizes", "stages.train.sbatch={exclusive: true}",
)  # fmt: skip


def test_the_offered_command_changes_all_that_resume_accepts(run: Run) -> None:
    lines = refusal(*EVERY_KIND, "model.dim=64", "optimizer.lr=0.5")
    run.apply_overrides(offered(lines))
    wanted = load_config(Path("tiny.yaml"), EVERY_KIND)
    assert not describe_changes(Run.open(run.path).config, wanted)
    (refused,) = [line for line in lines if line.startswith("resume does not accept: ")]
    assert refused.split(": ")[1].split(", ") == ["model.dim", "optimizer.lr"]


def test_what_no_command_can_say_is_named(run: Run) -> None:
    """A secret is not printed, and no key=value removes a key from a mapping."""
    run.apply_overrides(["stages.train.sbatch={exclusive: true}"])
    lines = refusal("model.dim=64", "site.sbatch={spank-token: hunter2}", "train.log_every=3")
    assert offered(lines) == ["train.log_every=3"] and "hunter2" not in str(lines)
    (line,) = [line for line in lines if line.startswith("add yourself")]
    assert "site.sbatch.spank-token" in line and "stages.train.sbatch.exclusive" in line


def test_a_command_that_would_be_refused_is_not_offered(run: Run) -> None:
    """`parallel.tensor` 4 needs other heads, which resume cannot change."""
    lines = refusal("parallel.tensor=4", "stages.train.tasks_per_node=4", "model.kv_heads=4")
    assert offered(lines) == []
    assert any("parallel.tensor" in line and "only together with the rest" in line for line in lines)


def test_a_long_message_is_cut(run: Run) -> None:
    """But not the command."""
    lines = refusal(*(f"site.sbatch.k{number}=1" for number in range(50)), "model.dim=64")
    assert "  and 31 more" in lines and len(lines) < 30
    assert len(offered(lines)) == 50


def test_a_long_value_is_cut(run: Run) -> None:
    lines = refusal(f"site.setup=[{', '.join(['module load cuda'] * 5000)}]", "model.dim=64")
    assert max(len(line) for line in lines if line.startswith("  ")) < 300


def test_weights_of_steps_that_are_trained_are_no_correction(tmp_path: Path, run: Run) -> None:
    def mixed(weights: str) -> tuple[str, ...]:
        sources = "{a: {source: corpus.jsonl}, b: {source: corpus.jsonl}}"
        tokenizer = "data.tokenizer={kind: file, path: tokenizer.json}"
        return (
            "run.name=mix",
            "data.source=python-stdlib",
            tokenizer,
            f"data.mixture={{sources: {sources}, weights: {weights}}}",
        )

    one = "[{weights: {a: 1, b: 1}}]"
    (Run.create(load_config(Path("tiny.yaml"), mixed(one))).checkpoints_dir / "step-00000007").mkdir()
    later = "[{weights: {a: 1, b: 1}}, {from_step: 9, weights: {a: 1, b: 0}}]"
    assert Run.create(load_config(Path("tiny.yaml"), mixed(later))).corrections
    with pytest.raises(UserError, match=r"resume does not accept: data\.mixture\.weights"):
        Run.create(load_config(Path("tiny.yaml"), mixed(later.replace("9", "5"))))


def shown(run: Run) -> tuple[str, str, str]:
    """Return what `status` and `report` print, and the page."""
    out = [io.StringIO(), io.StringIO()]
    status.print_status(run, PlainConsole(file=out[0], width=200))
    print_report(run, PlainConsole(file=out[1], width=200))
    return out[0].getvalue(), out[1].getvalue(), (run.path / "report.html").read_text()


def test_status_and_report_show_the_values_in_effect(run: Run) -> None:
    assert not any("changes.jsonl" in text for text in shown(run))
    run.apply_overrides(["train.steps=40", "checkpoint.every_steps=5", "site.sbatch={spank-token: hunter2}"])
    for text in shown(Run.open(run.path)):
        assert "train.steps: 30 → 40" in text and "checkpoint.every_steps: 7 → 5" in text and "hunter2" not in text
    assert "steps: 30" in run.config_file.read_text()


def test_followers_notice_a_change_from_another_process(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that had read the config before: a table that is watched, and the line of the stage that trains."""
    run.metrics_file.write_text('{"step": 31, "loss": 1.0, "step_time_s": 0.5, "tokens_per_s": 10.0}\n')
    poller, out = status.StatusPoller(run), io.StringIO()
    monkeypatch.setattr(local_runner, "PLAIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(local_runner, "POLL_S", 0.0)
    assert [row.cells["step"] for row in poller.poll() if row.stage == "train"] == ["31/30"]
    Run.open(run.path).apply_overrides(["train.steps=40"])
    turns = iter([True, True, False])
    console = PlainConsole(file=io.StringIO(), width=200)
    local_runner.follow_stage(Run.open(run.path), "train", lambda: next(turns), console)
    assert [row.cells["step"] for row in poller.poll() if row.stage == "train"] == ["31/40"]
    Run.open(run.path).apply_overrides(["train.steps=50"])
    turns = iter([True, True, False])
    local_runner.follow_stage(run, "train", lambda: next(turns), PlainConsole(file=out, width=200))
    assert "train.steps: 40 → 50" in out.getvalue() and "step 31/50" in out.getvalue(), out.getvalue()


def test_a_stage_that_was_done_is_asked_again_after_a_change(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_stage, "find_newest_step", lambda folder: 30)
    poller = status.StatusPoller(run)
    before = {row.stage: row.state for row in poller.poll()}
    Run.open(run.path).apply_overrides(["train.steps=40"])
    assert before["train"] == "done" != {row.stage: row.state for row in poller.poll()}["train"]


def test_no_time_left_is_never_negative() -> None:
    from pipeline.base.text import format_duration

    assert format_duration(-40.0) == "00:00"

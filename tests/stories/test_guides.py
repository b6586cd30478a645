"""Test that the commands in docs/guides and in the README work and print the documented output.

The tests write the files that a guide shows, run its commands in a shell, and compare the output with the guide line by
line. `…` in a guide matches anything. Numbers of steps and exported sizes must be equal. Losses and similar numbers may
differ by 20 %. Times and amounts of text may have any value: the first guide trains on a package of the Python standard
library, which depends on the version of Python. No virtual environment is active, so `python` has no required package.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.support.events import read_event_lines

pytestmark = pytest.mark.timeout(900)
cluster = cluster_fixture(accounting=True)
_BLOCK = re.compile(r"(?:^`([\w./]+)`:\n\n)?^```(\w*)\n(.*?)^```$", re.M | re.S)

_NUMBER = re.compile(r"\d(?:[\d.,:]*\d)?")
_EQUAL_IF_FOLLOWED_BY = re.compile(r"/\d+ steps| (steps|tensors|bytes in fp32|weights)\b")
_EQUAL_IF_END_OF = re.compile(r"(step[ -]|\d/)\d+$")
_SIMILAR_IF_FOLLOWED_BY = re.compile(r" (bits per byte|× the unigram)")
_SIMILAR_IF_END_OF = re.compile(r"(loss|accuracy|bits per byte|unigram) [\d.]+$")
"""A number in the expected output must be equal or similar if the text around it matches one of these patterns."""
ERROR_CODES_ON_DONE_RUN = {"track": "track.no_tracker", "profile": "run.not_training"}
"""Commands in the README that fail on the finished quickstart run, and their error codes."""
_PROGRESS = re.compile(r"^(prepare|shard|train|evaluate) +(running|starting|step |[\d,]+/).*\n", re.M)


@dataclass(frozen=True)
class Step:
    """A file to write, or a command to run with its expected output."""

    file: str
    """The path of the file; "" for a command."""
    command: str
    """The command; "" for a file."""
    text: str
    """The content of the file, or the expected output of the command."""


def read_steps(document: Path) -> Iterator[Step]:
    """Yield the files and commands of a Markdown document in order."""
    for name, language, text in _BLOCK.findall(document.read_text()):
        if name:
            yield Step(name, "", text)
        for part in re.split(r"^\$ ", text, flags=re.M)[1:] if not language else ():
            command, _, output = part.partition("\n")
            yield Step("", command, output)


def has_expected_output(expected: str, output: str) -> bool:
    """Return True if `output` matches `expected`.

    In `expected`, `…` matches anything within a line, or any number of lines if a line contains nothing else. Lines
    that show progress are ignored, because their number depends on the machine.
    """
    similar_numbers: list[float] = []

    def make_pattern(text: str) -> str:
        """Return a regular expression for text with numbers. A number that must only be similar becomes a group."""
        pattern = ""
        position = 0
        for number in _NUMBER.finditer(text):
            pattern += re.escape(text[position : number.start()])
            position = number.end()
            equal = _EQUAL_IF_END_OF.search(text, 0, position)
            similar = _SIMILAR_IF_END_OF.search(text, 0, position)
            if _EQUAL_IF_FOLLOWED_BY.match(text, position) or (equal and equal.end() == position):
                pattern += re.escape(number[0])
            elif _SIMILAR_IF_FOLLOWED_BY.match(text, position) or (similar and similar.end() == position):
                similar_numbers.append(float(number[0]))
                pattern += "([0-9.]+)"
            else:
                pattern += _NUMBER.pattern
        return pattern + re.escape(text[position:])

    expected, output = (_PROGRESS.sub("", text) for text in (expected, output))
    pattern = ""
    for line in expected.splitlines():
        parts = map(make_pattern, line.split("…"))
        pattern += r"(?:.*\n)?" if line == "…" else r"[^\n]*".join(parts) + r"\n"
    match = re.fullmatch(re.sub(r"(\\ )+", r"\\s+", pattern), output, re.S)
    return match is not None and all(
        abs(float(actual) - number) <= 0.2 * number
        for actual, number in zip(match.groups(), similar_numbers, strict=True)
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a checkout as `git clone` and `make install` create it.

    The folder `bin` next to it contains a `python` without the required packages.
    """
    folder = tmp_path_factory.mktemp("clone") / "sluice"
    not_tracked = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", ".*_cache", "*.egg-info")
    shutil.copytree(CODE_ROOT, folder, ignore=not_tracked)
    git = ["git", "-c", "user.name=user", "-c", "user.email=user@example.org"]
    for command in ("init -q", "add -A", "commit -q -m all"):
        subprocess.run([*git, *command.split()], cwd=folder, check=True, timeout=60)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder.parent / "bin").mkdir()
    (folder.parent / "bin/python").symlink_to(os.path.realpath(sys.executable))
    return folder


def run_in_shell(checkout: Path, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a shell in which the virtual environment is not activated."""
    env = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH", "SLURM_CONF")}
    path = [folder for folder in env["PATH"].split(":") if Path(folder) != Path(sys.executable).parent]
    env |= {"PATH": ":".join([str(checkout.parent / "bin"), *path]), "COLUMNS": "120", **variables}
    return subprocess.run(["bash", "-c", command], cwd=checkout, env=env, capture_output=True, text=True, timeout=1800)


def run_document(checkout: Path, document: str, **variables: str) -> int:
    """Write the files and run the commands of a document. Check their output. Return the number of commands."""
    count = 0
    for step in read_steps(checkout / document):
        if step.file:
            (checkout / step.file).write_text(step.text)
            continue
        if " report runs/my-job" in step.command:
            wait_for_evaluation(checkout / "runs/my-job")
        result = run_in_shell(checkout, step.command, **variables)
        assert result.returncode == 0, f"{step.command}\n{result.stdout}{result.stderr}"
        assert has_expected_output(step.text, result.stdout), (
            f"{step.command} should print\n{step.text}\nbut printed\n{result.stdout}"
        )
        count += 1
    return count


def wait_for_evaluation(run: Path) -> None:
    """Wait until the evaluate stage of the run at this path is done."""
    deadline = time.monotonic() + 240
    while not any(event["event"] == "done" for event in read_event_lines(Run.open(run), "evaluate")):
        assert time.monotonic() < deadline, (run / "events.jsonl").read_text()
        time.sleep(0.5)


@pytest.mark.short
def test_outputs_match_if_only_times_and_similar_numbers_differ() -> None:
    """4.79 and 0.90 are within 20 % of the expected numbers, 4.81 and 0.71 are not."""
    matches = has_expected_output
    assert matches("a 1.5 b\n…\nlast … 2\n", "a 27 b\nx\ny\nlast one 33\n") and matches("…\nb\n", "b\n")
    output = "3/3 steps, loss 4.00 in 00:03\n21 tensors, 9,000 bytes in fp32, of step-00003\n0.90 × the unigram 3.0\n"
    assert matches(output, output)
    assert matches(output, output.replace("4.00", "4.79").replace("00:03", "17:00:01"))
    changes = {"3/3": "3/4", "4.00": "4.81", "21": "39", "9,0": "9,1", "-00003": "-00004", "0.90": "0.71"}
    for old, new in changes.items():
        assert not matches(output, output.replace(old, new)), old
    assert not matches("a\nb\n", "a\nc\nb\n")
    assert not matches("…\nb 1\n", "b one\n")
    assert not matches("a\n", "a\nb\n")


@pytest.mark.story
def test_the_guides_to_text_models_and_weights_work(checkout: Path) -> None:
    """The guides run one after the other, because the third guide uses the runs of the first two."""
    for guide, command_count in ("your-text", 8), ("your-model", 4), ("weights-elsewhere", 5):
        assert run_document(checkout, f"docs/guides/{guide}.md") == command_count, guide


def test_the_guide_to_the_cluster_works(checkout: Path, cluster: Cluster) -> None:
    """The guide uses the config that the first guide writes. If it is missing, run the first commands of that guide."""
    if not (checkout / "my_text.yaml").exists():
        commands = [step.command for step in read_steps(checkout / "docs/guides/your-text.md")]
        for command in commands[: commands.index("python submit.py init") + 1]:
            assert run_in_shell(checkout, command).returncode == 0, command
    assert run_document(checkout, "docs/guides/to-the-cluster.md", **cluster.environment()) == 5


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_the_commands_of_the_readme_work(checkout: Path) -> None:
    """Run the quickstart, and then each command in the list of commands of the README with real arguments."""
    text = (checkout / "README.md").read_text()
    (step,) = (step for step in read_steps(checkout / "README.md") if step.command == "make run")
    result = run_in_shell(checkout, step.command)
    assert result.returncode == 0, result.stdout + result.stderr
    assert has_expected_output("…\n" + step.text, result.stdout), result.stdout
    listed_commands = re.findall(r"^(python submit\.py .*?)(?: {4}.*)?$", text, re.M)
    assert len(listed_commands) == 17
    (checkout / "my_text.yaml").unlink(missing_ok=True)  # `init` does not overwrite the file of the first guide
    for line in listed_commands:
        command = re.sub(r" \[.*?\]", "", line).replace("RUN", "runs/quickstart").replace("STAGE", "train")
        command = command.replace(" DIR", " runs/exported")
        command = command.replace("inspect|verify|import PATH…", "inspect runs/quickstart/data/shards")
        result = run_in_shell(checkout, re.sub(r"CONFIG(\.yaml)?", "configs/quickstart.yaml", command))
        error_code = ERROR_CODES_ON_DONE_RUN.get(command.split()[2])
        assert (result.returncode == 0) == (error_code is None), f"{command}\n{result.stdout}{result.stderr}"
        assert error_code is None or f"error[{error_code}]" in result.stderr, f"{command}\n{result.stderr}"
    mistake = next(step for step in read_steps(checkout / "README.md") if "global_bach" in step.command)
    result = run_in_shell(checkout, mistake.command)
    assert result.returncode == 2 and has_expected_output(mistake.text, result.stderr), result.stderr

"""The commands of docs/guides and of the README, read from these files, in a fresh copy of the checkout.

Files that a guide shows are written, commands are run by a shell, and what is printed is compared with what the guide
prints: every line of it, in its order; `…` stands for anything. Of its numbers, steps and what is exported must be the
same, how good a model is the same within 20 %: times, and amounts of text, which is our own documentation, may be
others.
Nothing is activated: `python` is one without our packages.
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

pytestmark = pytest.mark.timeout(900)
cluster = cluster_fixture(accounting=True)
_BLOCK = re.compile(r"(?:^`([\w./]+)`:\n\n)?^```(\w*)\n(.*?)^```$", re.M | re.S)

_NUMBER = re.compile(r"\d(?:[\d.,:]*\d)?")
_COUNTED = re.compile(r"/\d+ steps| (steps|tensors|bytes in fp32|weights)\b")
_SAME = re.compile(r"(step[ -]|\d/)\d+$")
_RATED = re.compile(r" (bits per byte|× the unigram)")
_NEAR = re.compile(r"(loss|accuracy|bits per byte|unigram) [\d.]+$")
_PROGRESS = re.compile(r"^(prepare|shard|train|evaluate) +(running|starting|step |[\d,]+/).*\n", re.M)


@dataclass(frozen=True)
class Step:
    """A file to write, or a command with what it should print."""

    file: str
    command: str
    text: str


def steps(document: Path) -> Iterator[Step]:
    """What a document says to do, in its order."""
    for name, language, text in _BLOCK.findall(document.read_text()):
        if name:
            yield Step(name, "", text)
        for part in re.split(r"^\$ ", text, flags=re.M)[1:] if not language else ():
            command, _, printed = part.partition("\n")
            yield Step("", command, printed)


def agree(expected: str, printed: str) -> bool:
    """Whether `printed` has all lines of `expected`: `…` is anything, also whole lines.

    How often a stage tells how far it is depends on the machine: no such line counts.
    """
    wanted: list[float] = []

    def like(text: str) -> str:
        """A pattern of text with numbers; those that are compared afterwards are groups."""
        pattern, done = "", 0
        for found in _NUMBER.finditer(text):
            same, near = (_SAME.search(text, 0, found.end()), _NEAR.search(text, 0, found.end()))
            pattern += re.escape(text[done : found.start()])
            done = found.end()
            if _COUNTED.match(text, done) or (same and same.end() == done):
                pattern += re.escape(found[0])
            elif _RATED.match(text, done) or (near and near.end() == done):
                wanted.append(float(found[0]))
                pattern += "([0-9.]+)"
            else:
                pattern += _NUMBER.pattern
        return pattern + re.escape(text[done:])

    expected, printed = (_PROGRESS.sub("", text) for text in (expected, printed))
    pattern = ""
    for line in expected.splitlines():
        pieces = map(like, line.split("…"))
        pattern += r"(?:.*\n)?" if line == "…" else r"[^\n]*".join(pieces) + r"\n"
    matched = re.fullmatch(re.sub(r"(\\ )+", r"\\s+", pattern), printed, re.S)
    return matched is not None and all(
        abs(float(found) - figure) <= 0.2 * figure for found, figure in zip(matched.groups(), wanted, strict=True)
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `git clone` and `make install` leave it."""
    folder = tmp_path_factory.mktemp("fresh") / "sluice"
    left_out = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", ".*_cache", "*.egg-info")
    shutil.copytree(CODE_ROOT, folder, ignore=left_out)
    git = ["git", "-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    for command in ("init -q", "add -A", "commit -q -m all"):
        subprocess.run([*git, *command.split()], cwd=folder, check=True, timeout=60)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder.parent / "bin").mkdir()
    (folder.parent / "bin/python").symlink_to(os.path.realpath(sys.executable))
    return folder


def shell(checkout: Path, command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """What a person's shell makes of a command."""
    env = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH", "SLURM_CONF")}
    outside = [folder for folder in env["PATH"].split(":") if Path(folder) != Path(sys.executable).parent]
    env |= {"PATH": ":".join([str(checkout.parent / "bin"), *outside]), "COLUMNS": "120", **more}
    return subprocess.run(["bash", "-c", command], cwd=checkout, env=env, capture_output=True, text=True, timeout=600)


def follow(checkout: Path, document: str, **environment: str) -> int:
    """Do what a document says; how many commands that were."""
    count = 0
    for step in steps(checkout / document):
        if step.file:
            (checkout / step.file).write_text(step.text)
            continue
        if " report runs/my-job" in step.command:
            wait_for_the_end(checkout / "runs/my-job")
        done = shell(checkout, step.command, **environment)
        assert done.returncode == 0, f"{step.command}\n{done.stdout}{done.stderr}"
        assert agree(step.text, done.stdout), f"{step.command} should print\n{step.text}\nand printed\n{done.stdout}"
        count += 1
    return count


def wait_for_the_end(run: Path) -> None:
    deadline = time.monotonic() + 240
    while not any(event["event"] == "done" for event in Run.open(run).read_events("evaluate")):
        assert time.monotonic() < deadline, (run / "events.jsonl").read_text()
        time.sleep(0.5)


@pytest.mark.short
def test_what_is_compared() -> None:
    assert agree("a 1.5 b\n…\nlast … 2\n", "a 27 b\nx\ny\nlast one 33\n") and agree("…\nb\n", "b\n")
    said = "3/3 steps, loss 4.00 in 00:03\n21 tensors, 9,000 bytes in fp32, of step-00003\n0.90 × the unigram 3.0\n"
    assert agree(said, said) and agree(said, said.replace("4.00", "4.79").replace("00:03", "17:00:01"))
    others = {"3/3": "3/4", "4.00": "4.81", "21": "39", "9,0": "9,1", "-00003": "-00004", "0.90": "0.71"}
    for old, new in others.items():
        assert not agree(said, said.replace(old, new)), old
    assert not agree("a\nb\n", "a\nc\nb\n") and not agree("…\nb 1\n", "b one\n") and not agree("a\n", "a\nb\n")


@pytest.mark.story
def test_text_model_and_weights(checkout: Path) -> None:
    """One after the other, as the third uses the runs of the first two."""
    for guide, commands in ("your-text", 8), ("your-model", 4), ("weights-elsewhere", 5):
        assert follow(checkout, f"docs/guides/{guide}.md") == commands, guide


def test_to_the_cluster(checkout: Path, cluster: Cluster) -> None:
    if not (checkout / "my_text.yaml").exists():
        subprocess.run([sys.executable, "submit.py", "init"], cwd=checkout, check=True, capture_output=True, timeout=60)
        (checkout / "texts").mkdir()
        for file in (checkout / "docs").glob("*.md"):  # as the first guide does
            shutil.copy(file, checkout / f"texts/{file.stem}.txt")
    assert follow(checkout, "docs/guides/to-the-cluster.md", **cluster.environment()) == 5


@pytest.mark.long
def test_the_commands_of_the_readme(checkout: Path) -> None:
    """The quickstart, then each line of the list of commands, with what must be filled in."""
    text = (checkout / "README.md").read_text()
    (run,) = (step for step in steps(checkout / "README.md") if step.command == "make run")
    made = shell(checkout, run.command)
    assert made.returncode == 0, made.stdout + made.stderr
    assert agree("…\n" + run.text, made.stdout), made.stdout
    listed = re.findall(r"^(python submit\.py .*?)(?: {4}.*)?$", text, re.M)
    assert len(listed) == 14
    for line in listed:
        command = re.sub(r" \[.*?\]", "", line).replace("RUN", "runs/quickstart").replace("STAGE", "train")
        command = command.replace(" DIR", " runs/exported")
        done = shell(checkout, re.sub(r"CONFIG(\.yaml)?", "configs/quickstart.yaml", command))
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    mistake = next(step for step in steps(checkout / "README.md") if "global_bach" in step.command)
    done = shell(checkout, mistake.command)
    assert done.returncode == 2 and agree(mistake.text, done.stderr), done.stderr

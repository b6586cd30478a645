"""Real configs, altered in all the ways that hands, editors and enemies alter them, through what --dry-run does.

Each is a config, and then the one that its frozen copy says, or is refused in words: no traceback, no hang. A case is
made from its number, so one that fails can be run again alone.
"""

from __future__ import annotations

import copy
import io
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.submit import print_plan
from pipeline.base.console import PlainConsole
from pipeline.base.errors import UserError, find_storage_error
from pipeline.config.read import dump_config, load_config
from pipeline.run.code import CODE_ROOT

SEEDS = [*sorted((CODE_ROOT / "configs").glob("*.yaml")), CODE_ROOT / "examples/vit.yaml"]
SWEEP = "run: {name: s}\ntrain: {steps: 4}\nsweep: {grid: {optimizer.lr: [1.0e-3, 2.0e-3]}}\n"
LONGEST_S = 5.0
"""CPU time of a case."""
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 3, 7, 2**31, 2**40, 2**63, 2**64, 10**400, 0.5, -0.0, 1e-320, 1e308, float("nan"),
    float("inf"), "", " ", "auto", "null", "1e3", "0x10", "[", "[/]", ":x:", "\x1b[2J", "\0", "\u202e", "é" * 300,
    "x" * 70_000, "../..", "/", "/dev/zero", "/proc/self/mem", "~", "$(reboot)", "%", "'", "00:20:00", "1-00",
    "99999999-0",
    [], [[]], [None], list(range(50)), {}, {"a": {}}, {"min": 4, "max": 2}, {"min": 1, "max": 2**40},
    {"low": 1, "high": 2}, {"replicate": 2, "shard": 2}, {"extends": "/dev/zero"}, {"extends": "seed.yaml"},
    {"extends": ["."]}, {"x": [float("nan")]}, {"x": [1] * 3000}, {"kind": "file", "path": "/dev/zero"},
    ["python-stdlib", 3],
]  # fmt: skip
KEYS = [
    "extends",
    "options",
    "target",
    "",
    "0",
    "null",
    "__class__",
    "model",
    "path",
    "a.b",
    "[red]",
    "\x1b",
    "nodes",
    "data",
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """All containers in a value, with each of their keys."""
    found: list[tuple[Any, Any]] = []
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += [(value, key), *places(inner)]
    return found


def alter_values(source: random.Random, values: Any) -> Any:
    """Replace, remove, add, move, nest or multiply some values."""
    for _ in range(source.choice((1, 1, 1, 2, 4))):
        spots = places(values)
        if not spots:
            break
        inside, key = source.choice(spots)
        what, other = source.randrange(6), source.choice(spots)
        if what == 0:
            del inside[key]
        elif what == 1 and isinstance(inside, dict):
            inside[source.choice(KEYS)] = copy.deepcopy(source.choice(ODD))
        elif what == 2:
            inside[key] = yaml.safe_load(yaml.safe_dump(other[0].get(other[1]) if isinstance(other[0], dict) else None))
        elif what == 3 and isinstance(inside[key], int | float):
            inside[key] = source.choice(
                (inside[key] * 2, -inside[key], inside[key] + 1, str(inside[key]), inside[key] * 2**33)
            )
        elif what == 4:
            for _ in range(source.choice((1, 3, 40))):
                inside[key] = {"x": inside[key]} if source.random() < 0.5 else [inside[key]]
        else:
            inside[key] = copy.deepcopy(source.choice(ODD))
    return values


def swapped(source: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    one, other = source.randrange(len(lines)), source.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return "".join(lines)


def inserted(source: random.Random, text: str) -> str:
    at = source.randrange(len(text))
    return text[:at] + source.choice(INSERTS) + text[at:]


INSERTS = [
    "!!python/object/apply:os.system [id] ", "!!binary ", "!!int ", "!!float ", "!x ", "&a ", "*a ", "<<: *a\n",
    "? ", "- ",
    "---\n", "...\n", "%YAML 1.1\n", "{", "}", "[", "]", "'", '"', "\t", "\r", "\0", "\x85", "\ud7ff", "|\n", ">\n",
    "@", "`",
    "#", ": ", "[" * 3000, "{a: " * 3000, "&a [*a, *a]", "1" * 6000, "\\", '"\\UFFFFFFFF"', "train: {steps: 1}\n",
    "extends: other.yaml\n", "extends: /dev/zero\n", "extends: pipe\n", "extends: loop.yaml\n",
    "x: " + "y" * 10_000 + "\n",
]  # fmt: skip
TEXT_WAYS: list[Callable[[random.Random, str], str]] = [
    inserted,
    inserted,
    inserted,
    swapped,
    lambda source, text: text[: source.randrange(len(text))],
    lambda source, text: text[source.randrange(len(text)) :],
    lambda source, text: text + text,
    lambda source, text: text.replace(source.choice("01:{}[]\n -"), source.choice(INSERTS), 3),
]


def make(number: int) -> tuple[bytes, list[str]]:
    """The config of a case, and the overrides of its command line."""
    source = random.Random(number)
    text = source.choice([*(path.read_text() for path in SEEDS), SWEEP])
    if source.random() < 0.6:
        text = yaml.safe_dump(alter_values(source, yaml.safe_load(text)), sort_keys=False, allow_unicode=True)
    if source.random() < 0.5:
        text = source.choice(TEXT_WAYS)(source, text)
    content = text.encode("utf-8", "surrogatepass")
    if source.random() < 0.1 and content:
        at = source.randrange(len(content))
        content = content[:at] + source.randbytes(source.choice((1, 3, 50))) + content[at + 1 :]
    overrides = []
    if source.random() < 0.3:
        value = (
            yaml.safe_dump(copy.deepcopy(source.choice(ODD)), default_flow_style=True, width=10**9)
            .removesuffix("...\n")
            .strip()
        )
        overrides = [f"{source.choice(KEYS_OF_CONFIGS)}={value}"]
    return content, overrides


KEYS_OF_CONFIGS = [
    "train.steps", "train.global_batch", "train.micro_batch", "model.layers", "model.options", "model.dim",
    "model.target",
    "run.root", "run.name", "stages.train.nodes", "stages.train.tasks_per_node", "stages.shard.tasks", "sweep.grid",
    "sweep.samples", "parallel.pipeline", "parallel.tensor", "parallel.virtual_stages", "parallel.data", "site.sbatch",
    "data.tokenizer", "data.source", "site.setup", "stages.train.time", "optimizer.betas", "data.sequence_length",
]  # fmt: skip


def too_long(*_: object) -> None:
    raise AssertionError("it hangs")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the inserted `extends` name: a file, a pipe nobody writes to, a circle of links; and where paths lead."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.yaml").write_text("train: {steps: 3}\n")
    (tmp_path / "seed.yaml").write_text(SWEEP)
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "vit.py").write_text((CODE_ROOT / "examples/vit.py").read_text())
    return tmp_path


def refused_or_kept(folder: Path, number: int) -> bool:
    """Dry-run a case. Whether it is a config; then its frozen copy is the same one."""
    path, (content, overrides) = folder / "case.yaml", make(number)
    path.write_bytes(content)
    before, signalled = time.process_time(), signal.signal(signal.SIGALRM, too_long)
    signal.alarm(120)
    try:
        config = load_config(path, overrides)
        print_plan(config, "slurm", PlainConsole(file=io.StringIO(), width=100), scripts=True)
        path.write_text(dump_config(config))
        assert load_config(path) == config, "the frozen config is another one"
        return True
    except (UserError, OSError) as error:
        found = error if isinstance(error, UserError) else find_storage_error(error)
        assert found is not None and str(found) and len(str(found)) < 200_000, repr(error)
        return False
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signalled)
        assert time.process_time() - before < LONGEST_S, f"case {number} takes too long"


@pytest.mark.parametrize("cases", [range(100), pytest.param(range(100, 2100), marks=pytest.mark.long)], ids=str)
def test_any_altered_config_is_one_or_is_refused_in_words(folder: Path, cases: range) -> None:
    configs, wrong = 0, []
    for number in cases:
        try:
            configs += refused_or_kept(folder, number)
        except Exception as error:
            wrong.append(f"case {number}: {type(error).__name__}: {error}"[:2000])
    assert not wrong, "\n".join(wrong)
    assert len(cases) // 50 < configs < len(cases), "altered enough, and not too much"

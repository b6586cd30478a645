"""Tests that randomly changed configs are valid or rejected with an error message, without a traceback or a hang.

The changes resemble those of users, editors and attackers. A valid config must equal its frozen copy. The number of a
case is its random seed, so that you can repeat a failed case alone.
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

ORIGINAL_CONFIGS = [*sorted((CODE_ROOT / "configs").glob("*.yaml")), CODE_ROOT / "examples/vit.yaml"]
SWEEP = "run: {name: s}\ntrain: {steps: 4}\nsweep: {grid: {optimizer.lr: [1.0e-3, 2.0e-3]}}\n"
MAX_CPU_S = 5.0
"""Maximum CPU time of a case in seconds."""
UNUSUAL_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 7, 2**31, 2**40, 2**63, 2**64, 10**400, 0.5, -0.0, 1e-320, 1e308, float("nan"),
    float("inf"), "", " ", "auto", "null", "1e3", "0x10", "[", "[/]", ":x:", "\x1b[2J", "\0", "\u202e", "é" * 300,
    "x" * 70_000, "../..", "/", "/dev/zero", "/proc/self/mem", "~", "$(reboot)", "%", "'", "00:20:00", "1-00",
    "99999999-0",
    [], [[]], [None], list(range(50)), {}, {"a": {}}, {"min": 4, "max": 2}, {"min": 1, "max": 2**40},
    {"low": 1, "high": 2}, {"replicate": 2, "shard": 2}, {"extends": "/dev/zero"}, {"extends": "seed.yaml"},
    {"extends": ["."]}, {"x": [float("nan")]}, {"x": [1] * 3000}, {"kind": "file", "path": "/dev/zero"},
    ["python-stdlib", 3],
]  # fmt: skip
UNUSUAL_KEYS = [
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


def list_positions(value: Any) -> list[tuple[Any, Any]]:
    """Return the container and the key, or index, of each entry of the nested containers in a value."""
    positions: list[tuple[Any, Any]] = []
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        positions += [(value, key), *list_positions(inner)]
    return positions


def alter_values(generator: random.Random, values: Any) -> Any:
    """Change some values at random: remove, add, copy, scale, nest or replace them. Return the changed `values`."""
    for _ in range(generator.choice((1, 1, 1, 2, 4))):
        positions = list_positions(values)
        if not positions:
            break
        container, key = generator.choice(positions)
        action = generator.randrange(6)
        other_container, other_key = generator.choice(positions)
        if action == 0:
            del container[key]
        elif action == 1 and isinstance(container, dict):
            container[generator.choice(UNUSUAL_KEYS)] = copy.deepcopy(generator.choice(UNUSUAL_VALUES))
        elif action == 2:
            other_value = other_container.get(other_key) if isinstance(other_container, dict) else None
            container[key] = yaml.safe_load(yaml.safe_dump(other_value))
        elif action == 3 and isinstance(container[key], int | float):
            value = container[key]
            container[key] = generator.choice((value * 2, -value, value + 1, str(value), value * 2**33))
        elif action == 4:
            for _ in range(generator.choice((1, 3, 40))):
                container[key] = {"x": container[key]} if generator.random() < 0.5 else [container[key]]
        else:
            container[key] = copy.deepcopy(generator.choice(UNUSUAL_VALUES))
    return values


def swap_lines(generator: random.Random, text: str) -> str:
    """Return `text` with two random lines swapped."""
    lines = text.splitlines(keepends=True)
    first = generator.randrange(len(lines))
    second = generator.randrange(len(lines))
    swapped_lines = {first: lines[second], second: lines[first]}
    return "".join(swapped_lines.get(number, line) for number, line in enumerate(lines))


def insert_text(generator: random.Random, text: str) -> str:
    """Return `text` with a random entry of INSERTED_TEXTS at a random position."""
    position = generator.randrange(len(text))
    return text[:position] + generator.choice(INSERTED_TEXTS) + text[position:]


INSERTED_TEXTS = [
    "!!python/object/apply:os.system [id] ", "!!binary ", "!!int ", "!!float ", "!x ", "&a ", "*a ", "<<: *a\n",
    "? ", "- ",
    "---\n", "...\n", "%YAML 1.1\n", "{", "}", "[", "]", "'", '"', "\t", "\r", "\0", "\x85", "\ud7ff", "|\n", ">\n",
    "@", "`",
    "#", ": ", "[" * 3000, "{a: " * 3000, "&a [*a, *a]", "1" * 6000, "\\", '"\\UFFFFFFFF"', "train: {steps: 1}\n",
    "extends: other.yaml\n", "extends: /dev/zero\n", "extends: pipe\n", "extends: loop.yaml\n",
    "x: " + "y" * 10_000 + "\n",
]  # fmt: skip
TEXT_CHANGES: list[Callable[[random.Random, str], str]] = [
    insert_text,
    insert_text,
    insert_text,
    swap_lines,
    lambda generator, text: text[: generator.randrange(len(text))],
    lambda generator, text: text[generator.randrange(len(text)) :],
    lambda generator, text: text + text,
    lambda generator, text: text.replace(generator.choice("01:{}[]\n -"), generator.choice(INSERTED_TEXTS), 3),
]


def make_case(number: int) -> tuple[bytes, list[str]]:
    """Return the content of the config file of a case, and its command-line overrides."""
    generator = random.Random(number)
    text = generator.choice([*(path.read_text() for path in ORIGINAL_CONFIGS), SWEEP])
    if generator.random() < 0.6:
        text = yaml.safe_dump(alter_values(generator, yaml.safe_load(text)), sort_keys=False, allow_unicode=True)
    if generator.random() < 0.5:
        text = generator.choice(TEXT_CHANGES)(generator, text)
    content = text.encode("utf-8", "surrogatepass")
    if generator.random() < 0.1 and content:
        position = generator.randrange(len(content))
        content = content[:position] + generator.randbytes(generator.choice((1, 3, 50))) + content[position + 1 :]
    overrides = []
    if generator.random() < 0.3:
        value = (
            yaml.safe_dump(copy.deepcopy(generator.choice(UNUSUAL_VALUES)), default_flow_style=True, width=10**9)
            .removesuffix("...\n")
            .strip()
        )
        overrides = [f"{generator.choice(OVERRIDE_KEYS)}={value}"]
    return content, overrides


OVERRIDE_KEYS = [
    "train.steps", "train.global_batch", "train.micro_batch", "model.layers", "model.options", "model.dim",
    "model.target",
    "run.root", "run.name", "stages.train.nodes", "stages.train.tasks_per_node", "stages.shard.tasks", "sweep.grid",
    "sweep.samples", "parallel.pipeline", "parallel.tensor", "parallel.virtual_stages", "parallel.data", "site.sbatch",
    "data.tokenizer", "data.source", "site.setup", "stages.train.time", "optimizer.betas", "data.sequence_length",
]  # fmt: skip


def raise_on_alarm(*_: object) -> None:
    """Handle SIGALRM: raise an error because the case took too long."""
    raise AssertionError("the case hangs")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory of the cases. It contains all files that `extends` names in changed configs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.yaml").write_text("train: {steps: 3}\n")
    (tmp_path / "seed.yaml").write_text(SWEEP)
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "vit.py").write_text((CODE_ROOT / "examples/vit.py").read_text())
    return tmp_path


def is_valid_config(folder: Path, number: int) -> bool:
    """Dry-run a case and check its frozen copy. Return False if the config is rejected with an error message."""
    path = folder / "case.yaml"
    content, overrides = make_case(number)
    path.write_bytes(content)
    cpu_start = time.process_time()
    previous_handler = signal.signal(signal.SIGALRM, raise_on_alarm)
    signal.alarm(120)
    try:
        config = load_config(path, overrides)
        print_plan(config, "slurm", PlainConsole(file=io.StringIO(), width=100), scripts=True)
        path.write_text(dump_config(config))
        assert load_config(path) == config, "the frozen config must be the same"
        return True
    except (UserError, OSError) as error:
        user_error = error if isinstance(error, UserError) else find_storage_error(error)
        assert user_error is not None and str(user_error) and len(str(user_error)) < 200_000, repr(error)
        return False
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous_handler)
        assert time.process_time() - cpu_start < MAX_CPU_S, f"case {number} took too long"


@pytest.mark.parametrize("cases", [range(100), pytest.param(range(100, 2100), marks=pytest.mark.long)], ids=str)
def test_a_changed_config_is_valid_or_rejected_with_a_message(folder: Path, cases: range) -> None:
    valid_count = 0
    failures = []
    for number in cases:
        try:
            valid_count += is_valid_config(folder, number)
        except Exception as error:
            failures.append(f"case {number}: {type(error).__name__}: {error}"[:2000])
    assert not failures, "\n".join(failures)
    assert len(cases) // 50 < valid_count < len(cases), "both valid and rejected configs must be tested"

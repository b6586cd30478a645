"""Tests of configs with stages that run a command."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.base.errors import ConfigError
from pipeline.base.yaml12 import parse_yaml
from pipeline.config.read import dump_config, dump_values, load_config, make_point_configs, parse_config
from pipeline.config.sections import Config
from pipeline.config.stages import fill_placeholders, find_placeholders

EXAMPLE = """
run: {name: mnist}
stages:
  test: {command: python test.py, needs: [train]}
  fetch: {command: python fetch.py --to $SLUICE_RUN/data}
  train: {command: python train.py, needs: [fetch], nodes: 2, tasks_per_node: 4, time: "12:00:00",
          outputs: [out/last.ckpt], progress: checkpoints/*.ckpt}
"""


def parse(text: str) -> Config:
    """Return the config in a YAML text."""
    return parse_config(parse_yaml(text, "test.yaml"), "test.yaml")


def test_stages_run_in_the_order_of_their_needs() -> None:
    config = parse(EXAMPLE)
    assert list(config.active_stages) == ["fetch", "train", "test"]
    train = config.get_stage("train")
    assert train.depends_on == ("fetch",) and train.is_distributed and not train.is_training
    assert config.stages.get_resources("train").ranks == 8
    assert config.metrics_stage == "train", "its progress is visible"


def test_a_config_of_commands_survives_a_round_trip() -> None:
    config = parse(EXAMPLE)
    assert parse_config(dump_values(config), "copy") == config
    written = parse_yaml(dump_config(config), "copy")
    assert written.keys().isdisjoint({"train", "model", "data"}) and list(written["stages"]) == [
        "train",
        "test",
        "fetch",
    ]


def test_a_stage_may_have_the_name_of_a_former_section() -> None:
    assert list(parse("run: {name: x}\nstages: {measure: {command: ls}}").active_stages) == ["measure"]


def test_commands_can_be_added_to_the_stages_of_the_pipeline() -> None:
    config = parse(
        """
        run: {name: mixed}
        train: {steps: 10}
        stages:
          download: {command: ./download.sh}
          prepare: {needs: [download]}
          compare: {command: python compare.py, needs: [evaluate]}
        """
    )
    order = list(config.active_stages)
    assert order == ["download", "prepare", "shard", "train", "evaluate", "compare"]
    assert config.metrics_stage == "train" and config.get_stage("train").is_training


@pytest.mark.parametrize(
    ("text", "code", "facts"),
    [
        ("stages: {a: {command: x, needs: [b]}}", "config.conflict", ["stages.a.needs", "b"]),
        ("stages: {a: {command: x, needs: [b]}, b: {command: y, needs: [a]}}", "config.conflict", ["a", "b", "needs"]),
        ("stages: {a: {command: 'x {lr}'}}", "config.conflict", ["stages.a.command", "parameters.lr"]),
        ("stages: {a: {command: ''}}", "config.invalid_value", ["stages.a.command"]),
        ("stages: {a: {nodes: 2}}", "config.missing_key", ["stages.a.command"]),
        ("stages: {a: {command: x, node: 2}}", "config.unknown_key", ["stages.a.node", "nodes"]),
        ("stages: {a: {command: x, tasks: 3, nodes: 2}}", "config.conflict", ["stages.a", "tasks", "nodes"]),
        ("stages: {a-b: {command: x}}", "config.conflict", ["stages", "a-b"]),
        ("stages: {a: {command: x}}\nmodel: {dim: 64}", "config.conflict", ["model", "train.steps"]),
        ("stages: {a: {command: x}, shard: {tasks: 3}}", "config.conflict", ["stages.shard", "command"]),
        ("stages: {train: {command: x}}\ntrain: {steps: 3}", "config.conflict", ["stages.train.command"]),
        ("stages: {train: {nodes: 2}}", "config.conflict", ["train.steps", "stages.NAME.command"]),
        ("stages: {train: {command: x, nods: 2}}", "config.unknown_key", ["stages.train.nods", "nodes"]),
        (
            "stages: {a: {command: x, mpi: true, nodes: {min: 1, max: 2, spares: 1}}}",
            "config.conflict",
            ["stages.a.nodes.spares"],
        ),
    ],
)
def test_a_mistake_is_an_error_that_names_the_key(text: str, code: str, facts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"run: {{name: x}}\n{text}")
    assert caught.value.problems[0].code == code
    assert all(fact in str(caught.value) for fact in facts), str(caught.value)


def test_the_points_of_a_sweep_have_their_own_commands(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        """
run: {name: lrs}
parameters: {lr: 0.1, name: a b}
stages:
  fetch: {command: ./fetch.sh}
  train: {command: "python train.py --lr {lr} --name {name}", needs: [fetch]}
  test: {command: python test.py, needs: [train]}
sweep: {grid: {parameters.lr: [0.1, 0.3]}}
"""
    )
    config = load_config(file)
    per_point = {name: stage.is_per_point for name, stage in config.active_stages.items()}
    assert per_point == {"fetch": False, "train": True, "test": True}
    commands = [
        fill_placeholders(point.stages.commands["train"].command, point.parameters)
        for point in make_point_configs(config)
    ]
    assert commands == [f"python train.py --lr {lr} --name 'a b'" for lr in (0.1, 0.3)]


@given(st.text(st.characters(exclude_characters="\0", codec="utf-8")))
def test_a_value_reaches_the_command_unchanged(value: str) -> None:
    command = fill_placeholders("printf %s {value}", {"value": value})
    result = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60)
    assert result.stdout == value.encode()


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("a {b} {c_2}", ["b", "c_2"]),
        ("echo ${HOME} $HOME", []),
        ("awk '{print $1}' {file}", ["file"]),
        ("echo {{a}", []),
        ("for i in {1..3}; do x; done", []),
        ("cp a.{txt,md} .", []),
    ],
)
def test_only_names_in_braces_are_placeholders(command: str, names: list[str]) -> None:
    assert find_placeholders(command) == names


def test_a_doubled_brace_is_a_brace() -> None:
    assert fill_placeholders("echo {{x} {x}", {"x": 1}) == "echo {x} 1"

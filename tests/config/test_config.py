"""Tests of reading, extending, overriding and writing configs, and of the code, key and location of each problem."""

from __future__ import annotations

import json
import os
import pickle
import re
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from pipeline.base.errors import ConfigProblem
from pipeline.config.read import (
    COMMAND_LINE,
    ConfigError,
    dump_config,
    load_config,
    merge_values,
    parse_config,
    parse_overrides,
)
from pipeline.config.schema import OTHER_NAMES, list_keys
from pipeline.config.sections import (
    RENAMED_KEYS,
    Config,
    DataParallel,
    SiteConfig,
    TrainConfig,
    has_policy,
    list_keys_with,
)
from pipeline.config.types import Policy, parse_time_limit
from pipeline.run.code import CODE_ROOT as ROOT
from tests.publish.test_open_weights import save_random_model

CONFIGS = ROOT / "configs"
SCHEMA = json.loads((CONFIGS / "schema.json").read_text())
MINIMAL_CONFIG = "run: {name: small}\ntrain: {steps: 10}\n"
RANDOM_INPUT = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write_config(folder: Path, text: str, name: str = "run.yaml") -> Path:
    """Write a file below `folder` and return its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def load_text(folder: Path, text: str, *overrides: str) -> Config:
    """Write `text` to run.yaml in `folder`, and load it with the overrides."""
    return load_config(write_config(folder, text), overrides)


def find_problems(folder: Path, text: str, *overrides: str) -> tuple[ConfigProblem, ...]:
    """Return the problems of a config."""
    with pytest.raises(ConfigError) as caught:
        load_text(folder, text, *overrides)
    assert caught.value.code == caught.value.problems[0].code
    return caught.value.problems


def find_problem(folder: Path, text: str, *overrides: str) -> ConfigProblem:
    """Return the only problem of a config."""
    (problem,) = find_problems(folder, text, *overrides)
    return problem


def list_models(model: type[BaseModel] = Config) -> Iterator[type[BaseModel]]:
    """Yield `model` and all models of its fields."""
    yield model
    for field in model.model_fields.values():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from list_models(kind)


# -- what YAML means -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((word, True) for word in ("true", "True", "TRUE")),
        *((word, False) for word in ("false", "False", "FALSE")),
        *((word, None) for word in ("", "~", "null", "Null", "NULL")),
        *(
            (word, word)
            for word in ("no", "on", "Off", "yes", "y", "tRUE", "1f1b", "00:20:00", "1:00:00", "2024-01-01")
        ),
        *((word, float(word)) for word in ("1e-3", "3e-3", "3.0e-3", "1E5", "-.5", "5.", "+1.5e+2")),
        *(("2_000_000", 2_000_000), ("017", 17), ("0x1F", 31), ("0o17", 15), ("-3", -3), ("1_000.5", 1000.5)),
        *((".inf", float("inf")), ("-.INF", -float("inf")), ("1_", "1_"), ("0b1", "0b1"), ("=", "="), ("<<", "<<")),
        *(("'5'", "5"), ("!!str 5", "5"), ("[a, 1]", ["a", 1]), ("{a: {b: 1}}", {"a": {"b": 1}}), ("&x a", "a")),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    result = parse_overrides([f"key={text}"])["key"]
    assert result == value and type(result) is type(value)


def test_the_quickstart_config_loads() -> None:
    config = load_config(CONFIGS / "quickstart.yaml")
    assert config.optimizer.lr == 3e-3 and config.data.shard_tokens == 2_000_000
    assert config.stages.train.time == "00:20:00" and config.parallel.schedule == "1f1b"


def test_yaml_aliases_are_resolved(tmp_path: Path) -> None:
    text = MINIMAL_CONFIG + "stages: {prepare: &t {time: 5:00}, shard: *t}\n"
    assert load_text(tmp_path, text).stages.shard.time == "5:00"


# -- extends and overrides -----------------------------------------------------------------------------------


def test_extended_files_are_merged_in_order(tmp_path: Path) -> None:
    """A value is read from the first of these files that contains the key.

    The order is: the file itself, a file that its section extends, and the files that the whole file extends, beginning
    with the last one.
    """
    write_config(tmp_path, "partition: low\naccount: a\nsetup: [module load x, b]\n", "sites/one.yaml")
    write_config(tmp_path, "extends: one.yaml\naccount: b\n", "sites/two.yaml")
    write_config(
        tmp_path, "train: {steps: 5, micro_batch: 2}\nsite: {gpus_per_node: 4, account: base}\n", "base/b.yaml"
    )
    write_config(tmp_path, "train: {steps: 6, threads: 3}\n", "base/c.yaml")
    config = load_text(
        tmp_path,
        "extends: [base/b.yaml, base/c.yaml]\nrun: {name: x}\ntrain: {threads: 4}\n"
        "site: {extends: sites/two.yaml, setup: [only]}\n",
    )
    assert (config.train.steps, config.train.micro_batch, config.train.threads) == (6, 2, 4)
    assert config.site == SiteConfig(partition="low", account="b", gpus_per_node=4, setup=["only"])


def test_a_problem_names_the_file_that_contains_the_key(tmp_path: Path) -> None:
    write_config(tmp_path, "steps: 0\nmicro_batch: 0\nglobal_batch: 0\n", "t.yaml")
    text = "run: {name: x}\ntrain:\n  extends: t.yaml\n  micro_batch: -1\n"
    problems = find_problems(tmp_path, text, "train.global_batch=-2")
    assert [(problem.code, problem.where, problem.line, problem.key, problem.value) for problem in problems] == [
        ("config.out_of_range", f"{tmp_path}/t.yaml:1", 1, "train.steps", 0),
        ("config.out_of_range", COMMAND_LINE, None, "train.global_batch", -2),
        ("config.out_of_range", f"{tmp_path}/run.yaml:4", 4, "train.micro_batch", -1),
    ]


@pytest.mark.parametrize(
    ("section", "code", "expected_texts"),
    [
        ("site: {extends: sub/none.yaml}", "config.unreadable_file", ["run.yaml:3", "sub/none.yaml"]),
        ("data: {extends: sub/empty.yaml}", "config.wrong_type", ["run.yaml:3", "sub/empty.yaml", "nothing"]),
        ("model: {extends: 5}", "config.wrong_type", ["run.yaml:3", "5"]),
        ("extends: a.yaml", "config.circular_extends", ["run.yaml:3", "a.yaml:2", "b.yaml:1"]),
        ("extends:\n- sub/incomplete.yaml", "config.invalid_yaml", ["run.yaml:3", "sub/incomplete.yaml:2:1"]),
    ],
)
def test_a_problem_of_an_extended_file_names_both_files(
    tmp_path: Path, section: str, code: str, expected_texts: list[str]
) -> None:
    write_config(tmp_path, "extends: a.yaml\n", "b.yaml")
    write_config(tmp_path, "\nextends: sub/../b.yaml\n", "a.yaml")
    write_config(tmp_path, "", "sub/empty.yaml")
    write_config(tmp_path, "a: [\n", "sub/incomplete.yaml")
    problem = find_problem(tmp_path, MINIMAL_CONFIG + section)
    assert (problem.code, problem.key, problem.line) == (code, "extends", 3)
    assert all(expected_text in problem.message for expected_text in expected_texts)


def test_a_very_long_chain_of_extended_files_is_an_error(tmp_path: Path) -> None:
    for number in range(100):
        write_config(tmp_path, f"extends: {number + 1}.yaml\n", f"{number}.yaml")
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "0.yaml")
    assert raised.value.code == "config.circular_extends"
    assert "/21.yaml" in str(raised.value), "at most 20 files may extend each other"


def test_overrides_replace_values_of_the_file(tmp_path: Path) -> None:
    config = load_text(
        tmp_path,
        MINIMAL_CONFIG + "site: {account: a}\n",
        "train.steps=400",
        "site.account=",
        "site.setup=[a b]",
        "train.steps=7",
    )
    assert config.train.steps == 7 and config.site.account is None and config.site.setup == ["a b"]
    assert parse_overrides(["a={b: 1}", "a.c=2", "a={d: x=y}"]) == {"a": {"b": 1, "c": 2, "d": "x=y"}}
    assert parse_overrides(["a=1", "a.b=2"]) == {"a": {"b": 2}}
    # `data: auto` may become a mapping
    assert (
        load_text(tmp_path, MINIMAL_CONFIG + "parallel: {data: auto}\n", "parallel.data.replicate=1").parallel.data
        == DataParallel()
    )


def test_a_swept_path_is_relative_to_the_file_that_contains_it(tmp_path: Path) -> None:
    write_config(tmp_path, "grid: {evaluate.tasks: [a.jsonl, [b.jsonl, /c.jsonl]]}\n", "sweeps/tasks.yaml")
    config = load_text(tmp_path, MINIMAL_CONFIG + "sweep: {extends: sweeps/tasks.yaml}\n")
    assert config.sweep is not None
    assert config.sweep.grid["evaluate.tasks"] == [
        f"{tmp_path}/sweeps/a.jsonl", [f"{tmp_path}/sweeps/b.jsonl", "/c.jsonl"],
    ]  # fmt: skip


def test_a_path_is_relative_to_the_file_that_contains_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path in an extended file is relative to the extended file.

    Paths on the command line and defaults are relative to the working directory.
    """
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", "/home/me")
    write_config(
        tmp_path,
        "source: [a/*.txt, python-stdlib, /abs.txt, ~/own.txt]\ntokenizer: {extends: t/t.yaml}\n",
        "b/data.yaml",
    )
    write_config(tmp_path, "kind: file\npath: t.json\n", "b/t/t.yaml")
    text = "run: {name: x, root: runs}\ndata: {extends: ../b/data.yaml}\ntrain: {steps: 1}\n"
    write_config(tmp_path, text, "conf/x.yaml")
    config = load_config(Path("../conf/x.yaml"))
    assert config.data.source == [f"{tmp_path}/b/a/*.txt", "python-stdlib", "/abs.txt", "/home/me/own.txt"]
    assert config.data.tokenizer.path == tmp_path / "b/t/t.json" and config.run.root == tmp_path / "conf/runs"
    overridden = load_config(
        Path("../conf/x.yaml"), ["data.source=b.txt", "run.root=r", "data.tokenizer.path=../t.json"]
    )
    assert overridden.data.source == f"{tmp_path}/here/b.txt" and overridden.run.root == tmp_path / "here/r"
    assert overridden.data.tokenizer.path == tmp_path / "t.json"
    assert load_config(write_config(tmp_path, MINIMAL_CONFIG, "conf/y.yaml")).run.root == tmp_path / "here/runs"
    assert load_config(CONFIGS / "quickstart.yaml").run.root == tmp_path / "here/runs"
    assert load_config(CONFIGS / "lm-1b.yaml").data.source == str(ROOT / "text/*.jsonl.zst")


@pytest.mark.parametrize(
    ("override", "code", "expected_text"),
    [
        *((text, "config.invalid_override", f'"{text}"') for text in ("steps", "=1", "a..b=1", ".=")),
        ("c=[1", "config.invalid_yaml", "c: "),
        ("d={x: 1, x: 2}", "config.invalid_yaml", '"x"'),
    ],
)
def test_a_malformed_override_is_an_error(tmp_path: Path, override: str, code: str, expected_text: str) -> None:
    problem = find_problem(tmp_path, MINIMAL_CONFIG, "train.steps=5", override)
    assert problem.code == code
    assert problem.message.startswith(f"{COMMAND_LINE}: ") and expected_text in problem.message


def test_an_override_below_a_number_is_an_error(tmp_path: Path) -> None:
    problem = find_problem(tmp_path, MINIMAL_CONFIG, "train.steps=5", "train.steps.x=2")
    assert (problem.code, problem.key, problem.value) == ("config.wrong_type", "train.steps", {"x": 2})


# -- renamed keys --------------------------------------------------------------------------------------------


@pytest.fixture
def forget_reported_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which former keys this process has reported."""
    monkeypatch.setattr("pipeline.config.read._reported_names", set())


@pytest.mark.usefixtures("forget_reported_keys")
def test_a_former_key_is_accepted_and_its_new_name_is_printed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = MINIMAL_CONFIG + "recovery: {crash: 7, fruitless: 9, hang_s: 60}\n"
    for _ in range(2):
        recovery = load_text(tmp_path, text).recovery
        assert (recovery.budgets.crash, recovery.max_restarts_without_progress, recovery.hang_s) == (7, 9, 60)
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "run.yaml") in line
    assert "recovery.budgets.crash" in line and "recovery.max_restarts_without_progress" in line


@pytest.mark.usefixtures("forget_reported_keys")
@pytest.mark.parametrize(("former", "present"), [("split", "cut"), ("truncate", "truncate"), ("drop", "drop")])
def test_former_values_of_a_former_key_are_accepted(
    tmp_path: Path, former: str, present: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = MINIMAL_CONFIG + f"data: {{source: a.jsonl, records: prompts, long_dialogues: {former}}}\n"
    assert load_text(tmp_path, text).data.long_documents == present
    assert "data.long_dialogues is now data.long_documents" in capsys.readouterr().err
    override = f"data.long_dialogues={former}"
    assert (
        load_text(tmp_path, MINIMAL_CONFIG, "data.source=a.jsonl", "data.records=prompts", override).data.long_documents
        == present
    )
    both = text.replace("long_dialogues", "long_documents: drop, long_dialogues")
    assert "data.long_dialogues is the former name of data.long_documents" in find_problem(tmp_path, both).message


def test_packing_and_long_documents_must_fit_the_records(tmp_path: Path) -> None:
    def make_text(keys: str) -> str:
        return MINIMAL_CONFIG + f"data: {{source: a.jsonl, tokenizer: {{kind: file, path: t.json}}, {keys}}}\n"

    def find_message(keys: str) -> str:
        return find_problem(tmp_path, make_text(keys)).message

    assert "packing: best_fit copies documents" in find_message("records: tokens, packing: best_fit")
    message = find_message("records: text, long_documents: drop")
    assert "long_documents (drop)" in message and "packing: cut" in message
    message = find_message("packing: best_fit, sequence_length: 2048, shard_tokens: 2048")
    assert "shard_tokens (2048) must be more than sequence_length (2048)" in message
    data = load_text(tmp_path, make_text("packing: best_fit, long_documents: truncate")).data
    assert data.has_training_mask and not data.has_loss_mask
    assert not load_text(tmp_path, make_text("sequence_length: 2048, shard_tokens: 2048")).data.has_training_mask


def test_packing_applies_to_all_sources_of_a_mixture(tmp_path: Path) -> None:
    text = MINIMAL_CONFIG + (
        "data: {packing: best_fit, tokenizer: {kind: file, path: t.json}, mixture: {sources: {web: {source: a.jsonl}, "
        "code: {source: b.bin, records: text}}, weights: [{weights: {web: 1, code: 1}}]}}\n"
    )
    data = load_text(tmp_path, text).data
    assert {data.for_source(name).packing for name in ("web", "code")} == {"best_fit"}
    assert (
        "packing: best_fit copies documents"
        in find_problem(tmp_path, text.replace("records: text", "records: tokens")).message
    )


def test_former_and_new_names_have_the_same_precedence(tmp_path: Path) -> None:
    write_config(tmp_path, "crash: 5\nhang: 5\nbudgets: {non_finite: 5}\n", "recovery.yaml")
    text = MINIMAL_CONFIG + "recovery: {extends: recovery.yaml, budgets: {crash: 6}, non_finite: 6}\n"
    budgets = load_text(tmp_path, text).recovery.budgets
    assert (budgets.crash, budgets.hang, budgets.non_finite) == (6, 5, 6)
    budgets = load_text(tmp_path, text, "recovery.crash=8", "recovery.budgets.hang=9").recovery.budgets
    assert (budgets.crash, budgets.hang) == (8, 9)
    assert load_text(tmp_path, text, "recovery.crash=8", "recovery.budgets.crash=9").recovery.budgets.crash == 9


def test_a_wrong_value_of_a_former_key_is_reported_by_the_new_name(tmp_path: Path) -> None:
    problem = find_problem(tmp_path, MINIMAL_CONFIG + "recovery:\n  crash: -1\n")
    assert (problem.code, problem.key, problem.value, problem.line) == (
        "config.out_of_range", "recovery.budgets.crash", -1, 4,
    )  # fmt: skip


def test_a_key_that_is_set_by_both_names_is_an_error(tmp_path: Path) -> None:
    problem = find_problem(tmp_path, MINIMAL_CONFIG + "recovery:\n  crash: 1\n  budgets: {crash: 2}\n")
    assert (problem.code, problem.key, problem.line) == ("config.conflict", "recovery.crash", 4)
    assert "recovery.budgets.crash" in problem.message


NESTED_VALUES = st.recursive(
    st.integers(0, 3) | st.lists(st.integers(), max_size=2),
    lambda values: st.dictionaries(st.sampled_from("abc"), values),
)
NESTED_MAPPINGS = st.dictionaries(st.sampled_from("abc"), NESTED_VALUES)


@given(NESTED_MAPPINGS, NESTED_MAPPINGS, NESTED_MAPPINGS)
def test_merging_is_idempotent_and_prefers_the_second_mapping(
    first: dict[str, Any], second: dict[str, Any], third: dict[str, Any]
) -> None:
    before = repr((first, second))
    assert merge_values(first, {}) == first and merge_values({}, first) == first and merge_values(first, first) == first
    assert merge_values(merge_values(first, second), second) == merge_values(first, second)
    assert repr((first, second)) == before
    merged = merge_values(first, second)
    assert set(merged) == set(first) | set(second)
    for key, value in second.items():
        if isinstance(value, dict) and isinstance(first.get(key), dict):
            assert merged[key] == merge_values(first[key], value)
        else:
            assert merged[key] == value

    def remove_leaves(value: Any) -> Any:
        """Return nested mappings in which each value that is not a mapping is replaced by None."""
        return {key: remove_leaves(inner) for key, inner in value.items()} if isinstance(value, dict) else None

    if remove_leaves(first) == remove_leaves(second) == remove_leaves(third):
        assert (
            merge_values(merge_values(first, second), third)
            == merge_values(first, merge_values(second, third))
            == third
        )


# -- problems ------------------------------------------------------------------------------------------------


def test_one_error_lists_all_problems(tmp_path: Path) -> None:
    text = """\
run: {name: a b, seed: -1}
data: {source: 5, held_out: 1}
train:
  stepps: 3
  micro_batch: "4"
  precision:
    fp4
  deterministic: no
optimizer: {betas: [0.9], lr: .inf, schedule: [1]}
site: {account: 0123, color: red}
stages: {train: {time: 00:00:00}, evaluate: {time: 20}}
parallel: {data: {replicat: 2}}
modle: {}
"""
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    problems = caught.value.problems
    assert {(problem.line, problem.code, problem.key, repr(problem.value)) for problem in problems} == {
        (1, "config.invalid_value", "run.name", "'a b'"),
        (1, "config.out_of_range", "run.seed", "-1"),
        (2, "config.wrong_type", "data.source", "5"),
        (2, "config.out_of_range", "data.held_out", "1"),
        (4, "config.unknown_key", "train.stepps", "3"),
        (5, "config.wrong_type", "train.micro_batch", "'4'"),
        (7, "config.invalid_value", "train.precision", "'fp4'"),
        (8, "config.wrong_type", "train.deterministic", "'no'"),
        (9, "config.missing_key", "optimizer.betas.1", "None"),
        (9, "config.out_of_range", "optimizer.lr", "inf"),
        (9, "config.wrong_type", "optimizer.schedule", "[1]"),
        (10, "config.wrong_type", "site.account", "123"),
        (10, "config.unknown_key", "site.color", "'red'"),
        (11, "config.invalid_value", "stages.train.time", "'00:00:00'"),
        (11, "config.invalid_value", "stages.evaluate.time", "20"),
        (12, "config.unknown_key", "parallel.data.replicat", "2"),
        (13, "config.unknown_key", "modle", "{}"),
    }
    assert str(caught.value).split("\n") == [problem.message for problem in problems]
    for problem in problems:
        assert problem.where == f"{tmp_path}/run.yaml:{problem.line}"
        assert problem.message.startswith(f"{problem.where}: {problem.key}")


def test_a_message_names_the_allowed_values(tmp_path: Path) -> None:
    site_keys = ", ".join(field.alias or key for key, field in SiteConfig.model_fields.items())
    for text, expected_texts in {
        "data: {source: 5}": ["text", "list", "quotes"],
        "train: {stepps: 3}": ["did you mean steps or epochs?", ", ".join(TrainConfig.model_fields)],
        "train: {precision: fp4}": ["fp32, bf16, fp16, fp8"],
        "train: {micro_batch: 0}": ["a whole number greater than 0"],
        "optimizer: {betas: [0.9]}": ["at least 0 and less than 1"],
        "stages: {evaluate: {time: 20}}": ["00:20:00"],
        "parallel: {data: {replicat: 2}}": ["did you mean replicate?", "replicate, shard"],
        "parallel: {data: many}": ["auto", "replicate, shard"],
        "modle: {}": ["did you mean model?", ", ".join(Config.model_fields)],
        "site:": [site_keys],
    }.items():
        start = "run: {name: small}\n" if text.startswith("train") else MINIMAL_CONFIG
        message = "\n".join(problem.message for problem in find_problems(tmp_path, start + text))
        assert all(expected_text in message for expected_text in expected_texts), message


@pytest.mark.parametrize(
    ("text", "code", "key", "where"),
    [
        ("train: {steps: 1}", "config.missing_key", "run", "run.yaml"),
        (MINIMAL_CONFIG + "site:", "config.wrong_type", "site", "run.yaml:3"),
        (MINIMAL_CONFIG + "parallel: {data: many}", "config.invalid_value", "parallel.data", "run.yaml:3"),
        (MINIMAL_CONFIG + "data: {source: []}", "config.out_of_range", "data.source", "run.yaml:3"),
        (MINIMAL_CONFIG + "data: {source: [a, 5]}", "config.wrong_type", "data.source.1", "run.yaml:3"),
        (MINIMAL_CONFIG + "train: {steps: 1, micro_batch: 3}", "config.invalid_yaml", "", "run.yaml:3:1"),
        (MINIMAL_CONFIG + "data: !!python/name:os.system {}", "config.invalid_yaml", "", "run.yaml:3:7"),
        (MINIMAL_CONFIG + "data: !secret x", "config.invalid_yaml", "", "run.yaml:3:7"),
        (MINIMAL_CONFIG + "data: !!int 1.5", "config.invalid_yaml", "", "run.yaml:3:7"),
        (MINIMAL_CONFIG + r'data: "\ud800"', "config.invalid_yaml", "", "run.yaml:3:7"),
        (MINIMAL_CONFIG + "? [a]\n: b", "config.invalid_yaml", "", "run.yaml:3:3"),
        (MINIMAL_CONFIG + f"data: {2**64}", "config.invalid_yaml", "", "run.yaml:3:7"),
        (MINIMAL_CONFIG + "data: &a [*a]", "config.invalid_yaml", "", "run.yaml:3:7"),
        (MINIMAL_CONFIG + "data: {a: [}", "config.invalid_yaml", "", "run.yaml:3:12"),
        (MINIMAL_CONFIG + "data: \a", "config.invalid_yaml", "", "run.yaml:3:7"),
        ("a: 1\n---\nb: 2", "config.invalid_yaml", "", "run.yaml:2:1"),
        ("- a", "config.wrong_type", "", "run.yaml"),
        ("# nothing\n", "config.wrong_type", "", "run.yaml"),
    ],
)
def test_a_problem_has_a_code_a_key_and_a_location(tmp_path: Path, text: str, code: str, key: str, where: str) -> None:
    problem = find_problem(tmp_path, text)
    assert (problem.code, problem.key) == (code, key)
    assert problem.message.startswith(f"{tmp_path}/{where}: ")


@pytest.mark.parametrize(
    ("override", "code", "key"),
    [
        ("model.options={a: {b: [.nan]}}", "config.conflict", "model"),
        ("model.options={a: 1e999}", "config.conflict", "model"),
        ("train.global_batch=1099511627776", "config.out_of_range", "train.global_batch"),
        ("run.root=/tmp/" + "x" * 5000, "config.invalid_value", "run.root"),
        ('run.root="a\\0b"', "config.invalid_value", "run.root"),
        ("train.callbacks=[a.b, c, a.b]", "config.invalid_value", "train.callbacks"),
        ("train.early_stopping={patience: 0}", "config.out_of_range", "train.early_stopping.patience"),
    ],
)
def test_a_value_out_of_bounds_is_an_error(tmp_path: Path, override: str, code: str, key: str) -> None:
    problem = find_problem(tmp_path, MINIMAL_CONFIG, override)
    assert (problem.code, problem.key) == (code, key)


def test_a_pipeline_accepts_a_bounded_number_of_micro_batches(tmp_path: Path) -> None:
    pipeline_overrides = ("parallel.pipeline=2", "stages.train.tasks_per_node=2", "train.micro_batch=1")
    load_text(tmp_path, MINIMAL_CONFIG, *pipeline_overrides, "train.global_batch=10000")
    problem = find_problem(tmp_path, MINIMAL_CONFIG, *pipeline_overrides, "train.global_batch=10001")
    assert "10,000" in problem.message and "10001" in problem.message


@pytest.mark.parametrize(
    ("overrides", "expected_texts"),
    [
        (["train.global_batch=10"], ["train: ", "global_batch (10)", "micro_batch (4)"]),
        (["train.epochs=2"], ["steps and epochs are both given"]),
        (["train.steps=null"], ["steps and epochs are both missing"]),
        (["train.evaluate_every=5", "data.held_out=0"], ["train.evaluate_every", "data.held_out is 0"]),
        (["train.early_stopping={}"], ["train.early_stopping", "train.evaluate_every"]),
        (
            ["train.early_stopping={metric: accuracy}", "train.evaluate_every=5", "train.ema={}"],
            ["train.early_stopping.metric", "accuracy", "loss, ema_loss"],
        ),
        (["train.early_stopping={metric: f1}", "train.evaluate_every=5"], ["train.early_stopping", "f1", "mode"]),
        (["train.callbacks=[mine]", "model.target=mine", "data.source=x.h5"], ["train.callbacks", "model.target"]),
        (["optimizer.name=sgd", "optimizer.eps=1"], ["eps (1.0)", "optimizer.name is sgd"]),
        (["optimizer.name=adamw", "optimizer.momentum=0.5"], ["momentum (0.5)", "optimizer.name is adamw"]),
        (["optimizer.name=own"], ["optimizer.name", "model.target"]),
        (
            ["optimizer.name=own", "model.target=mine", "data.source=x.h5", "parallel.zero=1", "parallel.offload=true"],
            ["optimizer.name own", "parallel.offload"],
        ),
        (["model.target=mine", "data.source=x.h5", "model.max_position_embeddings=9"], ["max_position_embeddings (9)"]),
        (["data.held_out=0", "evaluate.tasks=a.jsonl"], ["evaluate.tasks", "data.held_out 0"]),
        (["publish.to=here", "sweep={grid: {run.seed: [1]}}"], ["publish", "sweep"]),
        (["train.loss_chunk=8", "train.precision=fp16"], ["train.loss_chunk", "train.precision fp16"]),
        (["optimizer.state.master=none"], ["optimizer.state.master none", "fp32"]),
    ],
)  # fmt: skip
def test_keys_that_contradict_each_other_are_named(
    tmp_path: Path, overrides: list[str], expected_texts: list[str]
) -> None:
    problem = find_problem(tmp_path, MINIMAL_CONFIG, *overrides)
    assert problem.code == "config.conflict"
    assert all(expected_text in problem.message for expected_text in expected_texts), problem.message


def test_a_batch_that_does_not_fit_the_ranks_names_numbers_of_ranks_that_fit(tmp_path: Path) -> None:
    batch = ("train.global_batch=10", "train.micro_batch=5", "stages.train.nodes=4")
    problem = find_problem(tmp_path, MINIMAL_CONFIG, *batch)
    assert problem.code == "parallel.indivisible_batch"
    assert problem.where == f"{tmp_path}/run.yaml, {COMMAND_LINE}"
    assert all(
        expected_text in problem.message
        for expected_text in ("train.global_batch (10)", "train.micro_batch (5)", "1, 2")
    )


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("train.seed", "run.seed"),
        ("seed", "run.seed"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("train.learning_rate", "optimizer.lr"),
        ("optimizer.kind", "optimizer.name"),
        ("train.batch_size", "train.global_batch"),
        ("model.hidden_size", "model.dim"),
        ("train.vocab_size", "model.vocab_size"),
        ("train.nodes", "stages.train.nodes"),
        ("stages.evaluate.nodez", "nodes"),
        ("stages.evaluate.nnodes", "nodes"),
        ("train.nnodes", "stages.train.nodes"),
        ("train.checkpoint", "checkpoint"),
    ],
)
def test_the_problem_suggests_the_key_that_the_user_meant(tmp_path: Path, key: str, suggestion: str) -> None:
    problem = find_problem(tmp_path, MINIMAL_CONFIG, f"{key}=1")
    assert (problem.code, problem.key, problem.value) == ("config.unknown_key", key, 1)
    assert f"did you mean {suggestion}?" in problem.message


@pytest.mark.parametrize("foreign_key", OTHER_NAMES)
def test_the_error_for_a_key_of_another_framework_names_the_key_of_sluice(tmp_path: Path, foreign_key: str) -> None:
    """The foreign key may be at the top level, in a section of Sluice or in a section of the other framework."""
    counterpart = OTHER_NAMES[foreign_key]
    our_keys = set(list_keys(()))
    assert set(counterpart.keys) <= our_keys and (counterpart.keys or counterpart.note)
    for key in (f"train.{foreign_key}", foreign_key, f"trainer.args.{foreign_key}"):
        if key in our_keys:  # some foreign keys, such as `train.epochs`, are also keys of Sluice
            continue
        problem = find_problem(tmp_path, MINIMAL_CONFIG, f"{key}=1")
        assert problem.code == "config.unknown_key"
        assert all(text in problem.message for text in (*counterpart.keys, counterpart.note)), problem.message


def test_common_keys_of_other_frameworks_are_known() -> None:
    """The keys are from Trainer, Lightning, torchtitan, Megatron-LM, DeepSpeed and nanoGPT."""
    common_keys = """gradient_accumulation_steps per_device_train_batch_size max_steps num_train_epochs learning_rate
        warmup_ratio max_grad_norm lr_scheduler_type bf16 fp16 logging_steps save_steps save_total_limit eval_steps
        output_dir gradient_checkpointing report_to dataloader_num_workers deepspeed fsdp resume_from_checkpoint
        accumulate_grad_batches devices num_nodes strategy accelerator max_epochs gradient_clip_val val_check_interval
        log_every_n_steps tensor_parallel_degree pipeline_parallel_degree data_parallel_shard_degree local_batch_size
        seq_len tensor_model_parallel_size micro_batch_size train_iters lr_warmup_iters clip_grad sequence_parallel
        train_micro_batch_size_per_gpu train_batch_size zero_stage n_layer n_head n_embd block_size max_iters
        out_dir"""
    assert not set(re.findall(r"\w+", common_keys)) - OTHER_NAMES.keys()


def test_a_message_lists_twenty_problems_and_counts_the_others(tmp_path: Path) -> None:
    config_values = {
        "run": {"name": "x"},
        "train": {"steps": 1} | {f"unknown_{number}": number for number in range(3000)},
    }
    with pytest.raises(ConfigError) as caught:
        parse_config(config_values, "x")
    lines = str(caught.value).splitlines()
    assert len(lines) == 21 and "2,980" in lines[-1] and len(str(caught.value)) < 8000
    assert len(find_problem(tmp_path, MINIMAL_CONFIG, f"train.{'k' * 50_000}=1").message) < 1000


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    latin1_file = tmp_path / "latin.yaml"
    latin1_file.write_bytes(b"run: {name: caf\xe9}")
    for path, expected_text in (
        (tmp_path / "none.yaml", "none.yaml"),
        (tmp_path, "YAML file"),
        (write_config(tmp_path, "", "file") / "x.yaml", "x.yaml"),
        (tmp_path / "\0.yaml", ""),
        (Path("/dev/zero"), "/dev/zero"),
        (pipe, "pipe"),
        (write_config(tmp_path, "#" * 5_000_000, "long.yaml"), "4,194,304"),
        (write_config(tmp_path, "extends: /dev/zero", "zero.yaml"), "zero.yaml:1: extends: /dev/zero"),
        (latin1_file, "position 15"),
    ):
        with pytest.raises(ConfigError) as raised:
            load_config(path)
        assert raised.value.code == "config.unreadable_file"
        assert expected_text in str(raised.value)


def test_parse_config_returns_the_same_config_as_a_file() -> None:
    config = parse_config({"run": {"name": "x"}, "train": {"steps": 3}}, "config.yaml")
    assert config.train.steps == 3
    assert parse_config(config.model_dump(mode="json"), "config.yaml") == config
    with pytest.raises(ConfigError) as raised:
        parse_config({"run": {"name": "x"}, "train": {"steps": "many"}}, "config.yaml")
    (problem,) = raised.value.problems
    assert (problem.where, problem.key, problem.value) == ("config.yaml", "train.steps", "many")


def test_an_error_survives_pickling() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config({"run": {"name": "x"}, "train": {"steps": "many", "x": 1}}, "config.yaml")
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (copy.code, copy.problems, str(copy)) == (raised.value.code, raised.value.problems, str(raised.value))


KEYS = [(model, field.alias or key) for model in list_models() for key, field in model.model_fields.items()]


@settings(max_examples=300)
@given(st.sampled_from(KEYS), st.sampled_from(["drop", "swap", "replace", "insert"]), st.data())
def test_the_right_key_is_suggested_for_a_typo(
    field: tuple[type[BaseModel], str], edit: str, data: st.DataObject
) -> None:
    model, key = field
    position = data.draw(st.integers(0, len(key) - 1))
    letter = data.draw(st.sampled_from(string.ascii_lowercase + "_"))
    typo = {
        "drop": key[:position] + key[position + 1 :],
        "swap": key[:position] + key[position : position + 2][::-1] + key[position + 2 :],
        "replace": key[:position] + letter + key[position + 1 :],
        "insert": key[:position] + letter + key[position:],
    }[edit]
    if any(typo == other for _, other in KEYS):
        return  # the changed key is a key of this or another section
    values: dict[str, Any] = {typo: 1}
    for part in reversed(SECTION_PATHS[model]):
        values = {part: values} if isinstance(part, str) else [values]  # type: ignore[assignment]
    with pytest.raises(ConfigError) as caught:
        parse_config(values, "x")
    name = ".".join(map(str, (*SECTION_PATHS[model], typo)))
    problem = next(problem for problem in caught.value.problems if problem.key == name)
    suggested = re.search(r"did you mean (.*)\?", problem.message)
    assert problem.code == "config.unknown_key"
    assert suggested and key in suggested[1].split(" or ")


def list_model_paths(
    model: type[BaseModel] = Config, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[type[BaseModel], tuple[str | int, ...]]]:
    """Yield `model` and each model below it, with the key path of its section.

    In a mapping or list of sections, the path leads to the key `one` or the index 0.
    """
    yield model, path
    for key, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                inside: dict[Any, tuple[str | int, ...]] = {dict: ("one",), list: (0,)}
                yield from list_model_paths(kind, (*path, key, *inside.get(get_origin(field.annotation), ())))


SECTION_PATHS = dict(list_model_paths())


# -- random input -------------------------------------------------------------------------------------------

YAML_PIECES = st.sampled_from(
    [key for _, key in KEYS]
    + [
        "extends",
        "run.yaml",
        ": ",
        "{",
        "}",
        "[",
        "]",
        "\n",
        "\n  ",
        "- ",
        "&a ",
        "*a",
        "!!int ",
        "!",
        "|",
        ">",
        "%YAML 1.2",
    ]
    + [
        '"',
        "'",
        "\\U",
        "\\ud800",
        "#",
        "?",
        "---",
        "...",
        "~",
        "1",
        "0x",
        "1e999",
        ".nan",
        ",",
        "auto",
        "\t",
        "\x85",
        "é",
    ]
)
YAML_LIKE_TEXT = st.text() | st.lists(YAML_PIECES, max_size=25).map("".join)
ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["auto", "adamw", "1:00"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([k for _, k in KEYS]), inner, max_size=3)
    ),
)


@RANDOM_INPUT
@given(text=YAML_LIKE_TEXT | st.binary())
def test_a_random_file_is_rejected_with_a_message(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    with pytest.raises(ConfigError) as caught:  # a random file never has both run.name and train.steps
        load_config(path)
    assert str(caught.value)


@RANDOM_INPUT
@given(
    overrides=st.lists(
        YAML_LIKE_TEXT
        | st.tuples(YAML_PIECES, YAML_PIECES, YAML_LIKE_TEXT).map(
            lambda pieces: f"{pieces[0]}.{pieces[1]}={pieces[2]}"
        ),
        max_size=4,
    )
)
def test_random_overrides_are_accepted_or_rejected_with_a_message(tmp_path: Path, overrides: list[str]) -> None:
    try:
        load_text(tmp_path, MINIMAL_CONFIG, *overrides)
    except ConfigError as error:
        assert all(line.startswith(("command line: ", str(tmp_path))) for line in str(error).split("\n"))


@RANDOM_INPUT
@given(st.dictionaries(st.sampled_from(list(Config.model_fields)), ANY_VALUE))
def test_a_random_mapping_is_a_config_or_rejected_with_a_message(values: dict[str, Any]) -> None:
    try:
        config = parse_config(values, "x")
    except ConfigError as error:
        assert all(re.match(r"x: |and [\d,]+ more$", line) for line in str(error).split("\n"))
    else:
        assert isinstance(config, Config)


def test_deep_nesting_and_exploding_aliases_are_errors(tmp_path: Path) -> None:
    for depth in (90, 250, 5000):
        with pytest.raises(ConfigError):
            load_text(tmp_path, MINIMAL_CONFIG + "data: " + "[" * depth + "]" * depth)
        with pytest.raises(ConfigError):
            load_text(tmp_path, MINIMAL_CONFIG, "a." * depth + "b=1")
    exploding_aliases = "a0: &a0 [x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
    )
    assert find_problem(tmp_path, MINIMAL_CONFIG + exploding_aliases).code == "config.invalid_yaml"
    for depth in (20, 100, 150):  # each file is below the recursion limit of Python, but together they exceed it
        for number in range(20):
            write_config(tmp_path, "a: {" * depth + f"extends: {number + 1}.yaml" + "}" * depth, f"{number}.yaml")
        write_config(tmp_path, MINIMAL_CONFIG, "20.yaml")
        with pytest.raises(ConfigError):
            load_config(tmp_path / "0.yaml")
    unknown_keys = "".join(f"key{n}: 1\n" for n in range(3000))
    assert 1 < len(find_problems(tmp_path, MINIMAL_CONFIG + unknown_keys)) <= 1000


# -- round trip ----------------------------------------------------------------------------------------------

AMBIGUOUS_STRINGS = [
    "no",
    "1e-3",
    "1_000",
    "00:20:00",
    "0123",
    "0b1",
    "null",
    "~",
    "",
    " a ",
    "a: b",
    "- x",
    "#x",
    "=",
    "<<",
    "0x1",
]
AMBIGUOUS_STRINGS += [
    "2024-01-01",
    "'",
    '"',
    "a\nb\n",
    "\t",
    "\x85",
    "a\u2028b",
    "\ufeff",
    "\x00",
    "é",
    "x" * 200 + " y",
]
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(AMBIGUOUS_STRINGS)
PATH_TEXT = ANY_TEXT.map(lambda text: text.replace("\0", ""))
POSITIVE_INTEGER = st.integers(1, 2**40)
POSITIVE_FLOAT = st.floats(0, 1e300, exclude_min=True)
FRACTION = st.floats(0, 1, exclude_max=True)
TIME_LIMIT = st.sampled_from(["5", "5:30", "00:20:00", "1-0", "1-12:00:00"])


def generate_mappings(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for mappings that have a random subset of the fields."""
    return st.fixed_dictionaries({}, optional=fields)


@st.composite
def generate_configs(draw: st.DrawFn) -> Config:
    """Draw a valid config with random values."""
    nodes, tasks, micro_batch, accumulation_steps = (draw(st.integers(1, 4)) for _ in range(4))
    stage = st.fixed_dictionaries(
        {"nodes": st.just(nodes), "tasks_per_node": st.just(tasks)}, optional={"time": TIME_LIMIT}
    )
    train = generate_mappings(
        precision=st.sampled_from(["fp32", "bf16", "fp16", "fp8"]),
        threads=POSITIVE_INTEGER,
        deterministic=st.booleans(),
    )
    return Config.model_validate(
        {
            "run": {"name": draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True))}
            | draw(
                generate_mappings(
                    root=PATH_TEXT, seed=st.integers(0, 2**64 - 1), sharing=st.sampled_from(["private", "group", "all"])
                )
            ),
            "data": draw(
                generate_mappings(
                    source=ANY_TEXT | st.lists(ANY_TEXT, min_size=1),
                    text_field=ANY_TEXT,
                    held_out=FRACTION,
                    verify=st.sampled_from(["hashes", "sizes"]),
                )
            )
            | {
                "tokenizer": draw(
                    st.fixed_dictionaries(
                        {"kind": st.just("file"), "path": PATH_TEXT}, optional={"eos_token": ANY_TEXT}
                    )
                )
            },
            "model": draw(
                generate_mappings(
                    layers=POSITIVE_INTEGER, rope_theta=POSITIVE_FLOAT, rms_norm_eps=POSITIVE_FLOAT, dropout=FRACTION
                )
            ),
            "parallel": draw(
                generate_mappings(
                    data=st.sampled_from(["auto", {"replicate": nodes * tasks}]), bucket_mb=POSITIVE_INTEGER
                )
            ),
            "train": draw(train)
            | {
                "steps": 50,
                "micro_batch": micro_batch,
                "global_batch": nodes * tasks * micro_batch * accumulation_steps,
            },
            "optimizer": draw(
                generate_mappings(
                    lr=POSITIVE_FLOAT, betas=st.tuples(FRACTION, FRACTION), clip_norm=st.none() | POSITIVE_FLOAT
                )
            ),
            "site": draw(
                generate_mappings(
                    partition=st.none() | ANY_TEXT, account=st.none() | ANY_TEXT, setup=st.lists(ANY_TEXT)
                )
            ),
            "stages": {"train": draw(stage), "shard": draw(generate_mappings(tasks=POSITIVE_INTEGER, time=TIME_LIMIT))},
        }
    )


def test_dumped_config_keeps_strings_that_look_like_other_types(tmp_path: Path) -> None:
    config = parse_config({"run": {"name": "x"}, "train": {"steps": 1}, "site": {"setup": AMBIGUOUS_STRINGS}}, "x")
    assert load_text(tmp_path, dump_config(config)).site.setup == AMBIGUOUS_STRINGS
    assert yaml.safe_load(dump_config(config))["site"]["setup"] == AMBIGUOUS_STRINGS


@settings(RANDOM_INPUT, max_examples=60)
@given(config=generate_configs())
def test_dumped_config_loads_as_the_same_config(tmp_path: Path, config: Config) -> None:
    config = load_text(tmp_path, dump_config(config))  # loading makes the paths absolute
    text = dump_config(config)
    assert load_text(tmp_path / "elsewhere", text) == config
    assert dump_config(load_text(tmp_path, text)) == text
    assert yaml.safe_load(text) == config.model_dump(mode="json"), "a YAML 1.1 parser must read the same values"


# -- schema and examples -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", list(dict.fromkeys(list_models())))
def test_every_field_is_described(model: type[BaseModel]) -> None:
    assert model.__doc__
    described = SCHEMA if model is Config else SCHEMA["$defs"][model.__name__]
    for key in (field.alias or key for key, field in model.model_fields.items()):
        entry = described["properties"][key]
        if "$ref" in entry:  # the description of a section may be in its own definition
            entry = SCHEMA["$defs"][entry["$ref"].rpartition("/")[2]] | entry
        assert entry.get("description", "").strip(), f"{model.__name__}.{key} has no docstring"


def test_schema_is_up_to_date() -> None:
    command = [sys.executable, "submit.py", "schema"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    committed = (CONFIGS / "schema.json").read_text()
    assert committed == result.stdout, "run: make generated"


def test_schema_allows_extends_and_has_descriptions() -> None:
    assert SCHEMA["title"] and SCHEMA["additionalProperties"] is False
    for section in (SCHEMA, SCHEMA["$defs"]["SiteConfig"], SCHEMA["$defs"]["TrainConfig"]):
        assert "extends" in section["properties"] and "required" not in section
    assert SCHEMA["$defs"]["TrainConfig"]["properties"]["threads"]["description"]


def test_the_page_of_config_keys_is_up_to_date() -> None:
    environment = {**os.environ, "SLUICE_DOCSTRINGS": "1"}
    command = [sys.executable, "-m", "pipeline.config.schema"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=True)
    page = (ROOT / "docs/config.md").read_text()
    assert page == result.stdout, "run: make generated"
    assert "| `train.steps` | a whole number greater than 0 or null | `null` | larger |" in page
    assert "| `site.partition` | text or null | `null` | yes |" in page
    assert "| `model.dim` | a whole number greater than 0 | `256` | no |" in page
    assert {f"`{key}`" for key in RENAMED_KEYS} <= set(re.findall("`[^`]+`", page))


@pytest.mark.parametrize(
    "path",
    sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name not in ("machines", "planning")),
    ids=lambda path: str(path.relative_to(CONFIGS)),
)
def test_example_config_loads(path: Path, tmp_path: Path) -> None:
    """Each example is a whole config or the content of a section, and its first line names the schema for editors."""
    match = re.match(r"# yaml-language-server: \$schema=([^#\s]+)(?:#/\$defs/(\w+))?\n", path.read_text())
    assert match, f"{path}: the first line must name the schema"
    assert (path.parent / match[1]).resolve() == CONFIGS / "schema.json"
    if match[2] is None:
        overrides = []
        if path.name == "lora.yaml":  # It needs the directory of a model.
            save_random_model(tmp_path / "model", "llama")
            overrides = [f"model.init_from={tmp_path / 'model'}"]
        load_config(path, overrides)
    else:
        section = next(key_path for model, key_path in SECTION_PATHS.items() if model.__name__ == match[2])
        load_text(tmp_path, MINIMAL_CONFIG + f"{section[0]}: {{extends: {path}}}\n")


def test_the_site_template_has_every_key_with_its_default(tmp_path: Path) -> None:
    template = CONFIGS / "sites" / "template.yaml"
    assert set(yaml.safe_load(template.read_text())) == {
        field.alias or key for key, field in SiteConfig.model_fields.items()
    }
    assert load_text(tmp_path, MINIMAL_CONFIG + f"site: {{extends: {template}}}\n").site == SiteConfig()


def test_importing_the_config_does_not_import_torch_numpy_or_h5py() -> None:
    code = "import sys, pipeline.config.read; print([m for m in ('torch', 'numpy', 'h5py') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800), ("1440", 86_400), ("02:30", 150), ("00:20:00", 1200), ("1-0", 86_400), ("1-12", 129_600),
        ("1-12:30", 131_400), ("2-00:00:01", 172_801),
    ],
)  # fmt: skip
def test_time_limits_have_the_formats_of_slurm(text: str, seconds: int) -> None:
    """The formats are those of sbatch(1), --time."""
    assert parse_time_limit(text) == seconds


# -- policies of the keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (
            Policy.CHANGEABLE,
            "run.name run.root data.mixture.weights data.max_rejected data.workers data.verify parallel "
            "train.sequence_schedule train.balance train.log_every train.early_stopping train.callbacks "
            "train.profile_every checkpoint evaluate.every recovery site stages parameters publish track "
            "model.init_files",
        ),
        (
            Policy.PATH,
            "run.root data.mixture.sources.*.source data.source data.chat_template data.tokenizer.path data.filter "
            "model.init_from evaluate.tasks publish.to publish.no_worse_than track.prometheus.textfile "
            "track.jsonl",
        ),
        (
            Policy.NOT_IN_IDENTITY,
            "data.mixture.sources.*.source data.source data.max_rejected data.workers data.verify model.init_from "
            "train.steps train.epochs train.sequence_schedule train.balance train.log_every train.evaluate_every "
            "train.evaluate_sequences train.early_stopping train.callbacks train.profile_every model.init_files",
        ),
        (Policy.INCREASABLE, "train.steps train.epochs"),
        (Policy.KEEPS_SHARDS, "data.document_mask data.sequence_length data.max_rejected data.workers data.verify"),
        (Policy.SWEEPABLE, "run.seed model adapter train optimizer checkpoint evaluate parameters"),
        (Policy.NOT_SWEEPABLE, "model.target train.sequence_schedule train.threads train.callbacks"),
        (
            Policy.FIXED_IN_FORK,
            "model adapter train.global_batch train.ema optimizer.name optimizer.state sweep",
        ),
        (Policy.CHANGEABLE_IN_FORK, "model.rope_theta model.rope_scaling model.dropout adapter.dropout"),
        (Policy.SHELL, "site.setup"),
        (Policy.SECRET_VALUE, "track.webhook.url"),
    ],
)
def test_keys_keep_their_policies(policy: Policy, expected: str) -> None:
    assert list(list_keys_with(policy)) == expected.split()


def test_every_mapping_of_slurm_options_has_the_policy_options() -> None:
    options = {key for key in list_keys(()) if key.endswith((".sbatch", ".srun"))}
    assert {*list_keys_with(Policy.OPTIONS)} == {*options, "stages.*.sbatch"}


def test_a_policy_of_a_section_applies_to_its_keys() -> None:
    assert has_policy("site.partition", Policy.CHANGEABLE) and has_policy("publish", Policy.CHANGEABLE)
    assert not has_policy("sites", Policy.CHANGEABLE) and not has_policy("run", Policy.CHANGEABLE)

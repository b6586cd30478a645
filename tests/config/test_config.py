"""Configs: reading, extending, overriding, dumping, and above all what a mistake is answered with."""

from __future__ import annotations

import json
import os
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

from pipeline.config.other_names import OTHER_NAMES
from pipeline.config.parallel import DataParallel
from pipeline.config.read import (
    ConfigError,
    dump_config,
    load_config,
    merge_values,
    parse_config,
    parse_overrides,
)
from pipeline.config.schema import list_keys
from pipeline.config.sections import Config, SiteConfig, TrainConfig, has_policy, list_keys_with
from pipeline.config.types import Policy, parse_time_limit
from pipeline.run.code import CODE_ROOT as ROOT

CONFIGS = ROOT / "configs"
SCHEMA = json.loads((CONFIGS / "schema.json").read_text())
SMALL = "run: {name: small}\ntrain: {steps: 10}\n"
FUZZ = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def load(folder: Path, text: str, *overrides: str) -> Config:
    return load_config(write(folder, text), overrides)


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    """The lines of the error, without the folder's name."""
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return str(caught.value).replace(f"{folder}/", "").split("\n")


def models(model: type[BaseModel] = Config) -> Iterator[type[BaseModel]]:
    """`model` and all models of its fields."""
    yield model
    for field in model.model_fields.values():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from models(kind)


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
def test_scalars(text: str, value: Any) -> None:
    result = parse_overrides([f"key={text}"])["key"]
    assert result == value and type(result) is type(value)


def test_quickstart() -> None:
    config = load_config(CONFIGS / "quickstart.yaml")
    assert config.optimizer.lr == 3e-3 and config.data.shard_tokens == 2_000_000
    assert config.stages.train.time == "00:20:00" and config.parallel.schedule == "1f1b"


def test_aliases(tmp_path: Path) -> None:
    text = SMALL + "stages: {prepare: &t {time: 5:00}, shard: *t}\n"
    assert load(tmp_path, text).stages.shard.time == "5:00"


# -- extends and overrides -----------------------------------------------------------------------------------


def test_extends(tmp_path: Path) -> None:
    """Own values, then the section's file, then the whole file; later files of a list before earlier ones."""
    write(tmp_path, "partition: low\naccount: a\nsetup: [module load x, b]\n", "sites/one.yaml")
    write(tmp_path, "extends: one.yaml\naccount: b\n", "sites/two.yaml")
    write(tmp_path, "train: {steps: 5, micro_batch: 2}\nsite: {gpus_per_node: 4, account: base}\n", "base/b.yaml")
    write(tmp_path, "train: {steps: 6, threads: 3}\n", "base/c.yaml")
    config = load(
        tmp_path,
        "extends: [base/b.yaml, base/c.yaml]\nrun: {name: x}\ntrain: {threads: 4}\n"
        "site: {extends: sites/two.yaml, setup: [only]}\n",
    )
    assert (config.train.steps, config.train.micro_batch, config.train.threads) == (6, 2, 4)
    assert config.site == SiteConfig(partition="low", account="b", gpus_per_node=4, setup=["only"])


def test_extended_values_are_blamed_on_their_file(tmp_path: Path) -> None:
    write(tmp_path, "steps: 0\nmicro_batch: 0\nglobal_batch: 0\n", "t.yaml")
    lines = problems(
        tmp_path, "run: {name: x}\ntrain:\n  extends: t.yaml\n  micro_batch: -1\n", "train.global_batch=-2"
    )
    assert lines == [
        "t.yaml:1: train.steps: 0 should be a whole number greater than 0 or null",
        "command line: train.global_batch: -2 should be a whole number greater than 0 and at most 16777216",
        "run.yaml:4: train.micro_batch: -1 should be a whole number greater than 0",
    ]


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (
            "site: {extends: sub/none.yaml}",
            "run.yaml:3: extends: sub/none.yaml: cannot read it: No such file or directory",
        ),
        (
            "data: {extends: sub/empty.yaml}",
            "run.yaml:3: extends: sub/empty.yaml: it should hold keys and values such as `run: {name: first}` (`init` "
            "writes some), not "
            "nothing",
        ),
        ("model: {extends: 5}", "run.yaml:3: extends: 5 should be the name of a file, or a list of names"),
        (
            "extends: a.yaml",
            "run.yaml:3: extends: a.yaml:2: extends: b.yaml:1: extends: a.yaml: files extend one another in a circle, "
            "or too many of them",
        ),
        (
            "extends:\n- sub/torn.yaml",
            "run.yaml:3: extends: sub/torn.yaml:2:1: cannot be read as YAML: expected the node content, but found "
            "'<stream end>' (while parsing a flow node)",
        ),
    ],
)
def test_extends_goes_wrong(tmp_path: Path, section: str, says: str) -> None:
    write(tmp_path, "extends: a.yaml\n", "b.yaml")
    write(tmp_path, "\nextends: sub/../b.yaml\n", "a.yaml")
    write(tmp_path, "", "sub/empty.yaml")
    write(tmp_path, "a: [\n", "sub/torn.yaml")
    assert problems(tmp_path, SMALL + section) == [says]


def test_files_that_extend_one_another_without_end(tmp_path: Path) -> None:
    for number in range(100):
        write(tmp_path, f"extends: {number + 1}.yaml\n", f"{number}.yaml")
    with pytest.raises(ConfigError, match=r"/21.yaml: files extend one another in a circle, or too many"):
        load_config(tmp_path / "0.yaml")


def test_overrides(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        SMALL + "site: {account: a}\n",
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
        load(tmp_path, SMALL + "parallel: {data: auto}\n", "parallel.data.replicate=1").parallel.data == DataParallel()
    )


def test_paths_follow_the_file_that_says_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever extends it, and in whatever section; the command line's, and a default, the working directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", "/home/me")
    write(
        tmp_path,
        "source: [a/*.txt, python-stdlib, /abs.txt, ~/own.txt]\ntokenizer: {extends: t/t.yaml}\n",
        "b/data.yaml",
    )
    write(tmp_path, "kind: file\npath: t.json\n", "b/t/t.yaml")
    text = "run: {name: x, root: runs}\ndata: {extends: ../b/data.yaml}\ntrain: {steps: 1}\n"
    write(tmp_path, text, "conf/x.yaml")
    found = load_config(Path("../conf/x.yaml"))
    assert found.data.source == [f"{tmp_path}/b/a/*.txt", "python-stdlib", "/abs.txt", "/home/me/own.txt"]
    assert found.data.tokenizer.path == tmp_path / "b/t/t.json" and found.run.root == tmp_path / "conf/runs"
    said = load_config(Path("../conf/x.yaml"), ["data.source=b.txt", "run.root=r", "data.tokenizer.path=../t.json"])
    assert said.data.source == f"{tmp_path}/here/b.txt" and said.run.root == tmp_path / "here/r"
    assert said.data.tokenizer.path == tmp_path / "t.json"
    assert load_config(write(tmp_path, SMALL, "conf/y.yaml")).run.root == tmp_path / "here/runs"
    assert load_config(CONFIGS / "quickstart.yaml").run.root == tmp_path / "here/runs"
    assert load_config(CONFIGS / "lm-1b.yaml").data.source == str(ROOT / "text/*.jsonl.zst")


def test_broken_overrides(tmp_path: Path) -> None:
    for override, says in {
        **{wrong: f'"{wrong}": write section.key=value' for wrong in ("steps", "=1", "a..b=1", ".=")},
        "c=[1": "c: cannot be read as YAML: expected ',' or ']', but got '<stream end>' "
        "(while parsing a flow sequence)",
        "d={x: 1, x: 2}": 'd: cannot be read as YAML: "x" stands twice',
    }.items():
        assert problems(tmp_path, SMALL, "train.steps=5", override) == [f"command line: {says}"]
    assert problems(tmp_path, SMALL, "train.steps.x=2") == [
        'command line: train.steps: {"x": 2} should be a whole number greater than 0 or null'
    ]


VALUES = st.recursive(
    st.integers(0, 3) | st.lists(st.integers(), max_size=2), lambda v: st.dictionaries(st.sampled_from("abc"), v)
)
MAPPINGS = st.dictionaries(st.sampled_from("abc"), VALUES)


@settings(deadline=None)
@given(MAPPINGS, MAPPINGS, MAPPINGS)
def test_merge_laws(a: dict[str, Any], b: dict[str, Any], c: dict[str, Any]) -> None:
    before = repr((a, b))
    assert merge_values(a, {}) == a and merge_values({}, a) == a and merge_values(a, a) == a
    assert merge_values(merge_values(a, b), b) == merge_values(a, b)
    assert repr((a, b)) == before
    merged = merge_values(a, b)
    assert set(merged) == set(a) | set(b)
    for key, value in b.items():
        if isinstance(value, dict) and isinstance(a.get(key), dict):
            assert merged[key] == merge_values(a[key], value)
        else:
            assert merged[key] == value

    def shape(x: Any) -> Any:
        return {k: shape(v) for k, v in x.items()} if isinstance(x, dict) else None

    if shape(a) == shape(b) == shape(c):
        assert merge_values(merge_values(a, b), c) == merge_values(a, merge_values(b, c)) == c


# -- what a mistake is answered with -------------------------------------------------------------------------


SITE_KEYS = ", ".join(field.alias or key for key, field in SiteConfig.model_fields.items())


def test_all_problems_at_once(tmp_path: Path) -> None:
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
    assert sorted(problems(tmp_path, text)) == sorted(
        [
            "run.yaml:1: run.name: \"a b\": use letters, digits, '.', '_' and '-' (it becomes a folder and a job name)",
            "run.yaml:1: run.seed: -1 should be a whole number at least 0",
            "run.yaml:2: data.source: 5 should be text or a list with at least one item, each item text; put it in "
            "quotes",
            "run.yaml:2: data.held_out: 1 should be a number at least 0.0 and less than 1.0",
            "run.yaml:4: train.stepps: 3: there is no such key; did you mean steps or epochs? train has "
            + ", ".join(TrainConfig.model_fields),
            'run.yaml:5: train.micro_batch: "4" should be a whole number greater than 0',
            'run.yaml:7: train.precision: "fp4" should be one of fp32, bf16, fp16, fp8',
            'run.yaml:8: train.deterministic: "no" should be true or false',
            "run.yaml:9: optimizer.betas.1 is missing; it should be a number at least 0 and less than 1",
            "run.yaml:9: optimizer.lr: Infinity should be a finite number greater than 0.0",
            "run.yaml:9: optimizer.schedule: [1] should be one of constant, cosine, linear, wsd, own",
            "run.yaml:10: site.account: 123 should be text or null; put it in quotes",
            f'run.yaml:10: site.color: "red": there is no such key; site has {SITE_KEYS}',
            'run.yaml:11: stages.train.time: "00:00:00": a time limit is longer than nothing',
            "run.yaml:11: stages.evaluate.time: 20: for 20 minutes write 00:20:00",
            "run.yaml:12: parallel.data.replicat: 2: there is no such key; did you mean replicate? parallel.data has "
            "replicate, shard",
            "run.yaml:13: modle: {}: there is no such key; did you mean model? the config has "
            + ", ".join(Config.model_fields),
        ]
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "train: {steps: 1}",
            "run.yaml: run is missing; it should be a section with the keys name, root, seed, sharing",
        ),
        (
            SMALL + "site:",
            f"run.yaml:3: site: null should be a section with the keys {SITE_KEYS}",
        ),
        (
            SMALL + "parallel: {data: many}",
            'run.yaml:3: parallel.data: "many" should be auto or a section with the keys replicate, shard',
        ),
        (
            SMALL + "data: {source: []}",
            "run.yaml:3: data.source: [] should be text or a list with at least one item, each item text",
        ),
        (SMALL + "data: {source: [a, 5]}", "run.yaml:3: data.source.1: 5 should be text; put it in quotes"),
        (SMALL + "run: {}", 'run.yaml:3:1: cannot be read as YAML: "run" stands twice'),
        (
            SMALL + "data: !!python/name:os.system {}",
            "run.yaml:3:7: cannot be read as YAML: the tag tag:yaml.org,2002:python/name:os.system is not supported "
            "here",
        ),
        (SMALL + "data: !secret x", "run.yaml:3:7: cannot be read as YAML: the tag !secret is not supported here"),
        (SMALL + "data: !!int 1.5", 'run.yaml:3:7: cannot be read as YAML: "1.5" is no int'),
        (SMALL + r'data: "\ud800"', r'run.yaml:3:7: cannot be read as YAML: "\ud800" is no str'),
        (SMALL + "? [a]\n: b", "run.yaml:3:3: cannot be read as YAML: a key is a word, not a list or a mapping"),
        (
            SMALL + f"data: {2**64}",
            f'run.yaml:3:7: cannot be read as YAML: "{2**64}": the number has more than 64 bits',
        ),
        (SMALL + "data: &a [*a]", "run.yaml:3:7: cannot be read as YAML: found unconstructable recursive node"),
        (
            SMALL + "data: {a: [}",
            "run.yaml:3:12: cannot be read as YAML: expected the node content, but found '}' "
            "(while parsing a flow node)",
        ),
        (SMALL + "data: \a", r"run.yaml:3:7: cannot be read as YAML: the character '\x07' is not allowed"),
        (
            "a: 1\n---\nb: 2",
            "run.yaml:2:1: cannot be read as YAML: but found another document "
            "(expected a single document in the stream)",
        ),
        (
            "- a",
            'run.yaml: it should hold keys and values such as `run: {name: first}` (`init` writes some), not ["a"]',
        ),
        (
            "# nothing\n",
            "run.yaml: it should hold keys and values such as `run: {name: first}` (`init` writes some), not nothing",
        ),
    ],
)
def test_one_problem(tmp_path: Path, text: str, line: str) -> None:
    assert problems(tmp_path, text) == [line]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.options={a: {b: [.nan]}}", "options: .nan and .inf would be lost in config.yaml"),
        ("model.options={a: 1e999}", "options: .nan and .inf would be lost"),
        ("train.global_batch=1099511627776", "train.global_batch: 1099511627776 should be .* at most 16777216"),
        ("run.root=/tmp/" + "x" * 5000, "write a path, shorter than 3,000 characters"),
        ('run.root="a\\0b"', "write a path"),
    ],
)
def test_bounds(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(tmp_path, SMALL, override)


def test_a_pipeline_names_a_bounded_number_of_micro_batches(tmp_path: Path) -> None:
    deep = ("parallel.pipeline=2", "stages.train.tasks_per_node=2", "train.micro_batch=1")
    load(tmp_path, SMALL, *deep, "train.global_batch=10000")
    with pytest.raises(ConfigError, match=r"10,000 .*there are 10001"):
        load(tmp_path, SMALL, *deep, "train.global_batch=10001")


def test_rules_between_keys_name_them(tmp_path: Path) -> None:
    text = "run: {name: x}\ntrain:\n  steps: 5\n  global_batch: 10\n  micro_batch: 4\n"
    assert problems(tmp_path, text) == ["run.yaml:2: train: global_batch (10) is no multiple of micro_batch (4)"]
    both = {
        "train.epochs=2": "both given: set one of them to null",
        "train.steps=null": "both missing: give one of them",
    }
    for override, says in both.items():
        (line,) = problems(tmp_path, SMALL, override)
        assert line.endswith(f"train: steps and epochs are {says}"), line
    (line,) = problems(tmp_path, SMALL, "train.evaluate_every=5", "data.held_out=0")
    assert "train.evaluate_every" in line and "data.held_out is 0" in line
    unused = {"sgd": "eps=1", "adamw": "momentum=0.5"}
    for name, override in unused.items():
        (line,) = problems(tmp_path, SMALL, f"optimizer.name={name}", f"optimizer.{override}")
        assert f"{override.split('=')[0]} (" in line and f"means nothing here: optimizer.name is {name}" in line
    (line,) = problems(tmp_path, SMALL, "optimizer.name=own")
    assert "optimizer.name" in line and "model.target" in line
    own = ("optimizer.name=own", "model.target=mine", "data.source=x.h5")
    (line,) = problems(tmp_path, SMALL, *own, "parallel.zero=1", "parallel.offload=true")
    assert "without parallel.zero, parallel.offload" in line
    assert problems(tmp_path, text, "train.micro_batch=5", "stages.train.nodes=4") == [
        "run.yaml, command line: train.global_batch (10) is not a multiple of train.micro_batch (5) × 4 data parallel "
        "ranks; with these batches there may be 1, 2; no layout of 4 ranks fits this model, batch and schedule"
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
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
        ("train.checkpoint", "checkpoint"),
    ],
)
def test_the_key_that_was_meant_is_named(tmp_path: Path, key: str, meant: str) -> None:
    (line,) = problems(tmp_path, SMALL, f"{key}=1")
    assert line.startswith(f"command line: {key}: 1: there is no such key; did you mean {meant}? "), line


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_key_of_another_framework_is_answered_with_ours(tmp_path: Path, name: str) -> None:
    """At the top, and in a section of ours or of theirs."""
    found, ours = OTHER_NAMES[name], set(list_keys(()))
    assert set(found.keys) <= ours and (found.keys or found.note)
    for key in (f"train.{name}", name, f"trainer.args.{name}"):
        if key in ours:
            continue
        (line,) = problems(tmp_path, SMALL, f"{key}=1")
        said = line.split("there is no such key; ")[1]
        assert all(words in said for words in (*found.keys, found.note)), line


def test_the_usual_keys_of_other_frameworks_are_known() -> None:
    """Of Trainer, Lightning, torchtitan, Megatron-LM, DeepSpeed, nanoGPT."""
    usual = """gradient_accumulation_steps per_device_train_batch_size max_steps num_train_epochs learning_rate
        warmup_ratio max_grad_norm lr_scheduler_type bf16 fp16 logging_steps save_steps save_total_limit eval_steps
        output_dir gradient_checkpointing report_to dataloader_num_workers deepspeed fsdp resume_from_checkpoint
        accumulate_grad_batches devices num_nodes strategy accelerator max_epochs gradient_clip_val val_check_interval
        log_every_n_steps tensor_parallel_degree pipeline_parallel_degree data_parallel_shard_degree local_batch_size
        seq_len tensor_model_parallel_size micro_batch_size train_iters lr_warmup_iters clip_grad sequence_parallel
        train_micro_batch_size_per_gpu train_batch_size zero_stage n_layer n_head n_embd block_size max_iters
        out_dir"""
    assert not set(re.findall(r"\w+", usual)) - OTHER_NAMES.keys()


def test_a_message_lists_twenty_problems_and_counts_the_others(tmp_path: Path) -> None:
    many = {"run": {"name": "x"}, "train": {"steps": 1} | {f"unknown_{number}": number for number in range(3000)}}
    with pytest.raises(ConfigError) as caught:
        parse_config(many, "x")
    lines = str(caught.value).splitlines()
    assert len(lines) == 21 and lines[-1] == "and 2,980 more" and len(str(caught.value)) < 8000
    (line,) = problems(tmp_path, SMALL, f"train.{'k' * 50_000}=1")
    assert len(line) < 1000


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, says in (
        (tmp_path / "none.yaml", "none.yaml: cannot read it: No such file or directory"),
        (tmp_path, "cannot read it: Is a directory; name a YAML file in it"),
        (write(tmp_path, "", "file") / "x.yaml", "cannot read it: Not a directory"),
        (tmp_path / "\0.yaml", "cannot read it"),
        (Path("/dev/zero"), "/dev/zero is no ordinary file"),
        (pipe, "pipe is no ordinary file"),
        (write(tmp_path, "#" * 5_000_000, "long.yaml"), "long.yaml: cannot read it: it has more than 4,194,304 bytes"),
        (write(tmp_path, "extends: /dev/zero", "zero.yaml"), "zero.yaml:1: extends: /dev/zero: cannot read it"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            load_config(path)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"run: {name: caf\xe9}")
    with pytest.raises(
        ConfigError, match=r"latin.yaml: cannot read it: 'utf-8' codec can't decode byte 0xe9 in position 15"
    ):
        load_config(latin)


def test_config_from_mapping() -> None:
    config = parse_config({"run": {"name": "x"}, "train": {"steps": 3}}, "config.yaml")
    assert config.train.steps == 3
    assert parse_config(config.model_dump(mode="json"), "config.yaml") == config
    with pytest.raises(
        ConfigError, match=r'^config.yaml: train.steps: "many" should be a whole number greater than 0 or null$'
    ):
        parse_config({"run": {"name": "x"}, "train": {"steps": "many"}}, "config.yaml")


KEYS = [(model, field.alias or key) for model in models() for key, field in model.model_fields.items()]


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(KEYS), st.sampled_from(["drop", "swap", "replace", "insert"]), st.data())
def test_a_typo_is_answered_with_the_right_key(
    place: tuple[type[BaseModel], str], how: str, data: st.DataObject
) -> None:
    model, key = place
    at = data.draw(st.integers(0, len(key) - 1))
    letter = data.draw(st.sampled_from(string.ascii_lowercase + "_"))
    typo = {
        "drop": key[:at] + key[at + 1 :],
        "swap": key[:at] + key[at : at + 2][::-1] + key[at + 2 :],
        "replace": key[:at] + letter + key[at + 1 :],
        "insert": key[:at] + letter + key[at:],
    }[how]
    if any(typo == other for _, other in KEYS):
        return  # the right key of another section, or of this one
    values: dict[str, Any] = {typo: 1}
    for part in reversed(PATHS[model]):
        values = {part: values} if isinstance(part, str) else [values]  # type: ignore[assignment]
    with pytest.raises(ConfigError) as caught:
        parse_config(values, "x")
    name = re.escape(".".join(map(str, (*PATHS[model], typo))))
    found = re.search(
        rf"^x: {name}: (?:1|\"\*+\"): there is no such key; did you mean (.*)\? .* has ",
        str(caught.value),
        re.MULTILINE,
    )
    assert found and key in found[1].split(" or ")


def paths(
    model: type[BaseModel] = Config, at: tuple[str | int, ...] = ()
) -> Iterator[tuple[type[BaseModel], tuple[str | int, ...]]]:
    yield model, at
    for key, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                inside: dict[Any, tuple[str | int, ...]] = {dict: ("one",), list: (0,)}
                yield from paths(kind, (*at, key, *inside.get(get_origin(field.annotation), ())))


PATHS = dict(paths())


# -- anything at all -----------------------------------------------------------------------------------------

WORDS = st.sampled_from(
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
YAML = st.text() | st.lists(WORDS, max_size=25).map("".join)
ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["auto", "adamw", "1:00"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([k for _, k in KEYS]), inner, max_size=3)
    ),
)


@FUZZ
@given(text=YAML | st.binary())
def test_any_file_is_a_config_or_refused(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    with pytest.raises(ConfigError) as caught:  # none of these can have both run.name and train.steps by chance
        load_config(path)
    assert str(caught.value)


@FUZZ
@given(overrides=st.lists(YAML | st.tuples(WORDS, WORDS, YAML).map(lambda t: f"{t[0]}.{t[1]}={t[2]}"), max_size=4))
def test_any_overrides_are_understood_or_refused(tmp_path: Path, overrides: list[str]) -> None:
    try:
        load(tmp_path, SMALL, *overrides)
    except ConfigError as error:
        assert all(line.startswith(("command line: ", str(tmp_path))) for line in str(error).split("\n"))


@FUZZ
@given(st.dictionaries(st.sampled_from(list(Config.model_fields)), ANY_VALUE))
def test_any_mapping_is_a_config_or_refused(values: dict[str, Any]) -> None:
    try:
        config = parse_config(values, "x")
    except ConfigError as error:
        assert all(re.match(r"x: |and [\d,]+ more$", line) for line in str(error).split("\n"))
    else:
        assert isinstance(config, Config)


def test_deep_nesting_and_bombs(tmp_path: Path) -> None:
    for depth in (90, 250, 5000):
        with pytest.raises(ConfigError):
            load(tmp_path, SMALL + "data: " + "[" * depth + "]" * depth)
        with pytest.raises(ConfigError):
            load(tmp_path, SMALL, "a." * depth + "b=1")
    bomb = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    with pytest.raises(ConfigError, match="aliases of aliases"):
        load(tmp_path, SMALL + bomb)
    for depth in (20, 100, 150):  # each is nested less deeply than Python can go, all together are not
        for number in range(20):
            write(tmp_path, "a: {" * depth + f"extends: {number + 1}.yaml" + "}" * depth, f"{number}.yaml")
        write(tmp_path, SMALL, "20.yaml")
        with pytest.raises(ConfigError):
            load_config(tmp_path / "0.yaml")
    many = "".join(f"key{n}: 1\n" for n in range(3000))
    assert 1 < len(problems(tmp_path, SMALL + many)) <= 1000


# -- round trip ----------------------------------------------------------------------------------------------

AWKWARD = [
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
AWKWARD += ["2024-01-01", "'", '"', "a\nb\n", "\t", "\x85", "a\u2028b", "\ufeff", "\x00", "é", "x" * 200 + " y"]
TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(AWKWARD)
PATH = TEXT.map(lambda text: text.replace("\0", ""))
POSITIVE = st.integers(1, 2**40)
FLOAT = st.floats(0, 1e300, exclude_min=True)
BELOW_ONE = st.floats(0, 1, exclude_max=True)
TIME = st.sampled_from(["5", "5:30", "00:20:00", "1-0", "1-12:00:00"])


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    nodes, tasks, micro, accumulate = (draw(st.integers(1, 4)) for _ in range(4))
    stage = st.fixed_dictionaries({"nodes": st.just(nodes), "tasks_per_node": st.just(tasks)}, optional={"time": TIME})
    train = some(
        precision=st.sampled_from(["fp32", "bf16", "fp16", "fp8"]), threads=POSITIVE, deterministic=st.booleans()
    )
    return Config.model_validate(
        {
            "run": {"name": draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True))}
            | draw(
                some(root=PATH, seed=st.integers(0, 2**64 - 1), sharing=st.sampled_from(["private", "group", "all"]))
            ),
            "data": draw(
                some(
                    source=TEXT | st.lists(TEXT, min_size=1),
                    text_field=TEXT,
                    held_out=BELOW_ONE,
                    verify=st.sampled_from(["hashes", "sizes"]),
                )
            )
            | {
                "tokenizer": draw(
                    st.fixed_dictionaries({"kind": st.just("file"), "path": PATH}, optional={"eos_token": TEXT})
                )
            },
            "model": draw(some(layers=POSITIVE, rope_theta=FLOAT, rms_norm_eps=FLOAT, dropout=BELOW_ONE)),
            "parallel": draw(some(data=st.sampled_from(["auto", {"replicate": nodes * tasks}]), bucket_mb=POSITIVE)),
            "train": draw(train)
            | {"steps": 50, "micro_batch": micro, "global_batch": nodes * tasks * micro * accumulate},
            "optimizer": draw(some(lr=FLOAT, betas=st.tuples(BELOW_ONE, BELOW_ONE), clip_norm=st.none() | FLOAT)),
            "site": draw(some(partition=st.none() | TEXT, account=st.none() | TEXT, setup=st.lists(TEXT))),
            "stages": {"train": draw(stage), "shard": draw(some(tasks=POSITIVE, time=TIME))},
        }
    )


def test_dump_and_load_awkward_texts(tmp_path: Path) -> None:
    config = parse_config({"run": {"name": "x"}, "train": {"steps": 1}, "site": {"setup": AWKWARD}}, "x")
    assert load(tmp_path, dump_config(config)).site.setup == AWKWARD
    assert yaml.safe_load(dump_config(config))["site"]["setup"] == AWKWARD


@settings(FUZZ, max_examples=60)
@given(config=configs())
def test_dump_and_load(tmp_path: Path, config: Config) -> None:
    config = load(tmp_path, dump_config(config))  # its paths are absolute now
    text = dump_config(config)
    assert load(tmp_path / "elsewhere", text) == config
    assert dump_config(load(tmp_path, text)) == text
    assert yaml.safe_load(text) == config.model_dump(mode="json"), "readers of YAML 1.1 see the same values"


# -- schema and examples -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", list(dict.fromkeys(models())))
def test_every_field_is_described(model: type[BaseModel]) -> None:
    assert model.__doc__
    described = SCHEMA if model is Config else SCHEMA["$defs"][model.__name__]
    for key in (field.alias or key for key, field in model.model_fields.items()):
        said = described["properties"][key]
        if "$ref" in said:  # where the section says the same of itself, it alone does
            said = SCHEMA["$defs"][said["$ref"].rpartition("/")[2]] | said
        assert said.get("description", "").strip(), f"{model.__name__}.{key} has no docstring"


def test_schema_is_up_to_date() -> None:
    command = [sys.executable, "submit.py", "schema"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    committed = (CONFIGS / "schema.json").read_text()
    assert committed == done.stdout, "run: python submit.py schema > configs/schema.json"


def test_schema_knows_extends_and_descriptions() -> None:
    assert SCHEMA["title"] and SCHEMA["additionalProperties"] is False
    for section in (SCHEMA, SCHEMA["$defs"]["SiteConfig"], SCHEMA["$defs"]["TrainConfig"]):
        assert "extends" in section["properties"] and "required" not in section
    assert (
        SCHEMA["$defs"]["TrainConfig"]["properties"]["threads"]["description"]
        == "CPU threads per rank; part of what makes a result bit-identical."
    )


@pytest.mark.parametrize(
    "path",
    sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name not in ("machines", "planning")),
    ids=lambda path: str(path.relative_to(CONFIGS)),
)
def test_examples(path: Path, tmp_path: Path) -> None:
    """Each example is a whole run or a section's content, and tells editors which schema it follows."""
    match = re.match(r"# yaml-language-server: \$schema=([^#\s]+)(?:#/\$defs/(\w+))?\n", path.read_text())
    assert match, f"{path} lacks the line for editors"
    assert (path.parent / match[1]).resolve() == CONFIGS / "schema.json"
    if match[2] is None:
        load_config(path)
    else:
        section = next(at for model, at in PATHS.items() if model.__name__ == match[2])
        load(tmp_path, SMALL + f"{section[0]}: {{extends: {path}}}\n")


def test_site_template_has_every_key_with_its_default(tmp_path: Path) -> None:
    template = CONFIGS / "sites" / "template.yaml"
    assert set(yaml.safe_load(template.read_text())) == set(SITE_KEYS.split(", "))
    assert load(tmp_path, SMALL + f"site: {{extends: {template}}}\n").site == SiteConfig()


def test_importing_is_light() -> None:
    code = "import sys, pipeline.config.read; print([m for m in ('torch', 'numpy', 'h5py') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800), ("1440", 86_400), ("02:30", 150), ("00:20:00", 1200), ("1-0", 86_400), ("1-12", 129_600),
        ("1-12:30", 131_400), ("2-00:00:01", 172_801),
    ],
)  # fmt: skip
def test_time_limits_are_slurms(text: str, seconds: int) -> None:
    """The forms of sbatch(1), --time."""
    assert parse_time_limit(text) == seconds


# -- policies of the keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (
            Policy.CHANGEABLE,
            "run.name run.root data.mixture.weights data.max_rejected data.verify model.init_files parallel "
            "train.log_every train.profile_every checkpoint evaluate.every recovery site stages publish track",
        ),
        (
            Policy.PATH,
            "run.root data.mixture.sources.*.source data.source data.chat_template data.tokenizer.path data.filter "
            "model.init_from evaluate.tasks publish.to publish.no_worse_than track.prometheus.textfile "
            "track.jsonl",
        ),
        (
            Policy.NOT_IN_IDENTITY,
            "data.mixture.sources.*.source data.source data.max_rejected data.verify model.init_from model.init_files "
            "train.steps train.epochs train.log_every train.evaluate_every train.evaluate_sequences "
            "train.profile_every",
        ),
        (Policy.KEEPS_SHARDS, "data.document_mask data.sequence_length data.max_rejected data.verify"),
        (Policy.SWEEPABLE, "run.seed model train optimizer checkpoint evaluate"),
        (Policy.NOT_SWEEPABLE, "model.target train.threads"),
        (Policy.SHELL, "site.setup"),
        (Policy.SECRET_VALUE, "track.webhook.url"),
    ],
)
def test_keys_keep_their_policies(policy: Policy, expected: str) -> None:
    assert list(list_keys_with(policy)) == expected.split()


def test_every_mapping_of_slurm_options_may_contain_secrets() -> None:
    options = {key for key in list_keys(()) if key.endswith((".sbatch", ".srun"))}
    assert {*list_keys_with(Policy.OPTIONS)} == options


def test_a_policy_of_a_section_holds_for_its_keys() -> None:
    assert has_policy("site.partition", Policy.CHANGEABLE) and has_policy("publish", Policy.CHANGEABLE)
    assert not has_policy("sites", Policy.CHANGEABLE) and not has_policy("run", Policy.CHANGEABLE)

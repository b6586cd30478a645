"""List the mistakes that a new user is most likely to make, each with the expected error and the correction.

tests/cli/test_user_errors.py makes each mistake in a folder with tiny.yaml (TINY_CONFIG), classifier.yaml
(CUSTOM_CONFIG), classifier.py (CUSTOM_MODULE), corpus.jsonl and arrays.h5.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import h5py
import numpy as np

from tests.support.edits import replace_in_file

TINY_CONFIG = """\
run: {name: tiny, root: runs, seed: 3}
data:
  source: corpus.jsonl
  text_field: text
  tokenizer: {vocab_size: 300, train_bytes: 50000}
  sequence_length: 32
  held_out: 0.1
model: {dim: 32, layers: 2, heads: 4, kv_heads: 2}
train: {steps: 2, global_batch: 8, micro_batch: 4}
optimizer: {lr: 1.0e-2, warmup_steps: 1}
"""
CUSTOM_CONFIG = """\
run: {name: classifier, root: runs}
data: {source: arrays.h5, held_out: 0.2}
model: {target: classifier, layers: 1, options: {width: 4}}
train: {steps: 2, global_batch: 8, micro_batch: 4}
"""
CUSTOM_MODULE = """\
ARRAYS = ("inputs", "labels")
INPUTS = ("inputs",)
def build(options, layers):
    from torch import nn
    width, classes = options["width"], options.get("classes", 3)
    return nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, classes))
def loss(outputs, batch):
    from torch.nn import functional as F
    return F.cross_entropy(outputs, batch["labels"], reduction="sum")
def metrics(outputs, batch):
    return {"right": (outputs.argmax(-1) == batch["labels"]).sum()}
"""
"""A custom model. Its functions import torch when they are called.

The module itself does not import torch, because the submit command imports the module and must stay fast.
"""
Action = Callable[[], object]
"""A change in the working directory, as a function."""


def replace_text(file: str, old: str, new: str) -> Action:
    """Return an action that replaces text in a file of the working directory."""
    return partial(replace_in_file, Path(file), old, new)


def write_arrays(*names: str) -> Action:
    """Return an action that writes arrays.h5 with 60 samples of these arrays."""

    def write() -> None:
        generator = np.random.default_rng(0)
        values = {"inputs": generator.normal(size=(60, 4)).astype(np.float32), "labels": generator.integers(0, 3, 60)}
        with h5py.File("arrays.h5", "w") as file:
            for name in names:
                file[name] = values[name]

    return write


@dataclass
class Mistake:
    """A mistake, the expected error, and its correction."""

    name: str
    command: str
    """Arguments of submit.py that must fail."""
    facts: tuple[str, ...]
    """Texts that the output must contain, such as the key, the value, the file and the suggestion."""
    code: str = ""
    """Code of the error; "" if the test does not check the code."""
    prepare: Action = lambda: None
    """Called before `command`."""
    fix: Action = lambda: None
    """Called after `command`."""
    retry_command: str = ""
    """Arguments that must succeed after `fix`.

    "": those of `command`. "printed": the last command that the output of `command` contains.
    """
    earlier_commands: tuple[str, ...] = ()
    """Commands, as arguments of submit.py, that must succeed before `prepare`."""
    runs_stages: bool = False
    """If True, the stages of the run are executed; otherwise only the checks before a submission."""


SUBMISSION_MISTAKES = [  # submit.py must reject the submission and create no run
    Mistake(
        "a misspelt key",
        "tiny.yaml train.global_bach=8",
        ("train.global_bach", "global_batch"),
        retry_command="tiny.yaml train.global_batch=8",
    ),
    Mistake(
        "a key of another section",
        "tiny.yaml train.lr=0.1",
        ("train.lr", "optimizer.lr"),
        retry_command="tiny.yaml optimizer.lr=0.1",
    ),
    Mistake(
        "a key name of another program",
        "tiny.yaml train.batch_size=8",
        ("train.batch_size", "train.global_batch"),
        retry_command="tiny.yaml train.global_batch=8",
    ),
    Mistake(
        "a key without its section",
        "tiny.yaml steps=2",
        ("steps", "train.steps"),
        retry_command="tiny.yaml train.steps=2",
    ),
    Mistake(
        "no equals sign",
        "tiny.yaml train.steps 2",
        ("train.steps", "section.key=value"),
        retry_command="tiny.yaml train.steps=2",
    ),
    Mistake(
        "a word instead of a number",
        "tiny.yaml train.steps=two",
        ("train.steps", '"two"', "whole number"),
        retry_command="tiny.yaml train.steps=2",
    ),
    Mistake(
        "a number in quotes",
        "tiny.yaml",
        ("tiny.yaml:9", "train.steps", '"2"', "whole number"),
        prepare=replace_text("tiny.yaml", "steps: 2", 'steps: "2"'),
        fix=replace_text("tiny.yaml", '"2"', "2"),
    ),
    Mistake(
        "a glob that matches no file",
        "tiny.yaml data.source=texts/*.jsonl",
        ("data.source", "texts/*.jsonl", ".txt, .jsonl"),
        code="data.no_files",
        retry_command="tiny.yaml data.source=c*.jsonl",
    ),
    Mistake(
        "a glob that YAML reads as an alias",
        "tiny.yaml data.source=*.jsonl",
        ("command line", "data.source", "YAML", "alias", "quotes"),
        retry_command="tiny.yaml 'data.source=\"*.jsonl\"'",
    ),
    Mistake(
        "files of an unsupported type",
        "tiny.yaml data.source=tiny.yaml",
        ("data.source", "tiny.yaml", ".jsonl"),
        code="data.no_files",
        retry_command="tiny.yaml data.source=corpus.jsonl",
    ),
    Mistake(
        "a missing tokenizer",
        "tiny.yaml 'data.tokenizer={kind: file, path: none.json}'",
        ("data.tokenizer.path", "none.json"),
        retry_command="tiny.yaml data.tokenizer.kind=byte_bpe",
    ),
    Mistake(
        "a batch that is not a multiple of the micro-batch",
        "tiny.yaml train.micro_batch=3",
        ("global_batch", "8", "micro_batch", "3"),
        retry_command="tiny.yaml train.micro_batch=2",
    ),
    Mistake(
        "a batch that is not divisible by the ranks",
        "tiny.yaml stages.train.tasks_per_node=3",
        ("train.global_batch", "train.micro_batch (4)", "1, 2"),
        code="parallel.indivisible_batch",
        retry_command="tiny.yaml stages.train.tasks_per_node=2",
    ),
    Mistake(
        "more tensor parallel ranks than heads",
        "tiny.yaml parallel.tensor=8 stages.train.tasks_per_node=8 train.micro_batch=1",
        ("model.heads", "parallel.tensor (8)", "layouts of 8 ranks"),
        code="parallel.indivisible_size",
        retry_command="tiny.yaml parallel.tensor=2 stages.train.tasks_per_node=2",
    ),
    Mistake(
        "more ranks than GPUs",
        "tiny.yaml site.gpus_per_node=1 stages.train.tasks_per_node=2",
        ("stages.train.tasks_per_node (2)", "site.gpus_per_node (1)", "parallel.backend"),
        code="parallel.too_few_gpus",
        retry_command="tiny.yaml site.gpus_per_node=1 stages.train.tasks_per_node=2 parallel.backend=gloo",
    ),
    Mistake(
        "a warm-up longer than the training",
        "tiny.yaml optimizer.warmup_steps=9",
        ("optimizer.warmup_steps (9)", "train.steps (2)"),
        code="config.out_of_range",
        retry_command="tiny.yaml optimizer.warmup_steps=2",
    ),
    Mistake(
        "options without a custom model",
        "tiny.yaml model.options.width=3",
        ("tiny.yaml:8", "options", "target"),
        retry_command="tiny.yaml",
    ),
    Mistake(
        "a tab in the config",
        "tiny.yaml",
        ("tiny.yaml:2:1", "YAML", "'\\t'", "spaces"),
        prepare=replace_text("tiny.yaml", "run: {name: tiny,", "run:\n\t{name: tiny,"),
        fix=replace_text("tiny.yaml", "\n\t{", " {"),
    ),
    Mistake(
        "an empty config",
        "empty.yaml",
        ("empty.yaml", "run: {name: first}", "`init`"),
        prepare=Path("empty.yaml").touch,
        fix=lambda: shutil.copy("tiny.yaml", "empty.yaml"),
    ),
    Mistake(
        "an incomplete config",
        "half.yaml",
        ("half.yaml", "train", "steps"),
        prepare=lambda: Path("half.yaml").write_text("run: {name: x}"),
        fix=lambda: Path("half.yaml").write_text("run: {name: x}\ntrain: {steps: 2}"),
    ),
    Mistake(
        "a config that extends a missing file",
        "tiny.yaml",
        ("tiny.yaml:1", "extends", "base.yaml", "No such file"),
        prepare=replace_text("tiny.yaml", "run: {name", "extends: base.yaml\nrun: {name"),
        fix=replace_text("tiny.yaml", "extends: base.yaml\n", ""),
    ),
    Mistake(
        "a misspelt config file",
        "tinny.yaml",
        ("tinny.yaml", "No such file", "did you mean tiny.yaml?"),
        retry_command="tiny.yaml",
    ),
    Mistake(
        "a run directory that cannot be created",
        "tiny.yaml run.root=/proc",
        ("run.root", "/proc/tiny"),
        code="run.not_writable",
        retry_command="tiny.yaml run.root=runs",
    ),
    Mistake(
        "Slurm on a machine without Slurm",
        "tiny.yaml --executor=slurm",
        ("--executor", "scontrol ping", "--executor local"),
        code="slurm.not_responding",
        retry_command="tiny.yaml --executor=local",
    ),
    Mistake(
        "a module with a syntax error",
        "classifier.yaml",
        ("model.target", "classifier.py", "line 6"),
        prepare=replace_text("classifier.py", "return nn.", "return return nn."),
        fix=replace_text("classifier.py", "return return", "return"),
    ),
    Mistake(
        "a misspelt option of a custom model",
        "classifier.yaml",
        ("model.target", "classifier", "KeyError: 'width'"),
        prepare=replace_text("classifier.yaml", "width:", "widht:"),
        fix=replace_text("classifier.yaml", "widht:", "width:"),
    ),
    Mistake(
        "a batch norm without running statistics",
        "classifier.yaml",
        ("classifier", "batch norm", "track_running_stats"),
        prepare=replace_text("classifier.py", "nn.GELU()", "nn.BatchNorm1d(width, track_running_stats=False)"),
        fix=replace_text("classifier.py", "width, track_running_stats=False", "width"),
    ),
    Mistake(
        "a module that imports a missing module",
        "classifier.yaml",
        ("model.target", "No module named 'not_there'"),
        prepare=replace_text("classifier.py", "ARRAYS", "import not_there\nARRAYS"),
        fix=replace_text("classifier.py", "import not_there\n", ""),
    ),
    Mistake(
        "a module without a loss",
        "classifier.yaml",
        ("model.target", "classifier.py", "loss"),
        prepare=replace_text("classifier.py", "def loss", "def lost"),
        fix=replace_text("classifier.py", "def lost", "def loss"),
    ),
    Mistake(
        "a missing module",
        "classifier.yaml model.target=mine",
        ("model.target", "mine", "PYTHONPATH"),
        retry_command="classifier.yaml",
    ),
    Mistake(
        "a file that is not HDF5",
        "classifier.yaml",
        ("arrays.h5", "file signature not found"),
        prepare=lambda: Path("arrays.h5").write_text("1, 2"),
        fix=write_arrays("inputs", "labels"),
    ),
    Mistake(
        "a file without a required array",
        "classifier.yaml",
        ("arrays.h5", "'labels'", "inputs"),
        prepare=write_arrays("inputs"),
        fix=write_arrays("inputs", "labels"),
    ),
    Mistake(
        "text for a custom model",
        "classifier.yaml data.source=python-stdlib",
        ("model.target", "HDF5", "data.source"),
        code="config.conflict",
        retry_command="classifier.yaml data.source=arrays.h5",
    ),
]
LATER_MISTAKES = [  # a command fails, in most cases after the run was created
    Mistake(
        "a misspelt command",
        "statuss",
        ("statuss", "did you mean status?"),
        code="cli.unknown_command",
        retry_command="status",
        earlier_commands=("tiny.yaml",),
    ),
    Mistake(
        "a misspelt run",
        "resume runs/tinny",
        ("runs/tinny", "did you mean runs/tiny?"),
        code="run.not_a_run",
        retry_command="resume runs/tiny",
        earlier_commands=("tiny.yaml",),
    ),
    Mistake(
        "the name of a run instead of its path",
        "resume tiny",
        ("tiny", "did you mean runs/tiny?"),
        code="run.not_a_run",
        retry_command="resume runs/tiny",
        earlier_commands=("tiny.yaml",),
    ),
    Mistake(
        "a time limit as a number",
        "tiny.yaml stages.train.time=30",
        ("stages.train.time", "30 minutes", "00:30:00"),
        retry_command="tiny.yaml stages.train.time=00:30:00",
    ),
    Mistake(
        "a config instead of a run",
        "resume tiny.yaml",
        ("tiny.yaml", "runs/tiny"),
        code="run.not_a_run",
        retry_command="resume runs/tiny",
        earlier_commands=("tiny.yaml",),
    ),
    Mistake(
        "a run instead of a config",
        "runs/tiny",
        ("runs/tiny", "resume runs/tiny"),
        code="cli.run_as_config",
        retry_command="printed",
        earlier_commands=("tiny.yaml",),
    ),
    Mistake(
        "a cancelled run",
        "tiny.yaml",
        ("runs/tiny", "resume runs/tiny"),
        code="run.cancelled",
        retry_command="printed",
        earlier_commands=("tiny.yaml", "cancel runs/tiny"),
    ),
    Mistake(
        "a moved run",
        "resume runs/tiny",
        ("runs/tiny",),
        code="run.not_a_run",
        prepare=partial(os.rename, "runs", "old"),
        retry_command="resume old/tiny",
        earlier_commands=("tiny.yaml",),
    ),
    Mistake(
        "a deleted run",
        "resume runs/tiny",
        ("runs/tiny",),
        code="run.not_a_run",
        prepare=partial(shutil.rmtree, "runs"),
        retry_command="tiny.yaml",
        earlier_commands=("tiny.yaml",),
    ),
    Mistake(
        "a wrong text_field",
        "tiny.yaml",
        (
            "error[data.no_documents]",
            "corpus.jsonl line 1",
            "'body'",
            "'text'",
            "resume runs/tiny data.text_field=text",
        ),
        prepare=replace_text("tiny.yaml", "text_field: text", "text_field: body"),
        fix=replace_text("tiny.yaml", "text_field: body", "text_field: text"),
        runs_stages=True,
    ),
    Mistake(
        "fewer classes than the labels have",
        "classifier.yaml",
        ("Target 2 is out of bounds", "classifier.py, line 9"),
        prepare=replace_text("classifier.yaml", "width: 4", "width: 4, classes: 2"),
        fix=replace_text("classifier.yaml", "classes: 2", "classes: 3"),
        runs_stages=True,
    ),
    Mistake(
        "fewer classes than the labels have, corrected by resume",
        "classifier.yaml model.options.classes=2",
        ("Target 2 is out of bounds",),
        retry_command="resume runs/classifier model.options.classes=3",
        runs_stages=True,
    ),
    Mistake(
        "sequences longer than the text",
        "tiny.yaml data.sequence_length=900000",
        ("error[data.no_training_sample]", "data.sequence_length 900000", "resume runs/tiny data.sequence_length=…"),
        retry_command="tiny.yaml",
        runs_stages=True,
    ),
    Mistake(
        "a loss that is a mean",
        "classifier.yaml",
        ("error[model.loss_not_a_sum]", 'reduction="sum"', "resume runs/classifier --update-code"),
        prepare=replace_text("classifier.py", ', reduction="sum"', ""),
        fix=replace_text("classifier.py", '["labels"])\ndef metrics', '["labels"], reduction="sum")\ndef metrics'),
        retry_command="printed",
        runs_stages=True,
    ),
    Mistake(
        "a bug in the evaluation",
        "classifier.yaml",
        ("NameError", "classifier.py, line 11", "--update-code", "checkpoints/step-00000002"),
        prepare=replace_text("classifier.py", '{"right"', "{right"),
        fix=replace_text("classifier.py", "{right", '{"right"'),
        retry_command="printed",
        runs_stages=True,
    ),
    Mistake(
        "another config after the training",
        "classifier.yaml optimizer.lr=0.1",
        ("runs/classifier", "optimizer.lr: 0.0003 → 0.1", "checkpoints/step-00000002"),
        retry_command="printed",
        earlier_commands=("classifier.yaml",),
        runs_stages=True,
    ),
    Mistake(
        "more steps after the training",
        "classifier.yaml train.steps=3",
        ("train.steps: 2 → 3", "resume runs/classifier train.steps=3"),
        retry_command="resume runs/classifier train.steps=3",
        earlier_commands=("classifier.yaml",),
        runs_stages=True,
    ),
    Mistake(
        "a key that resume cannot change",
        "resume runs/classifier optimizer.lr=0.1",
        ("optimizer.lr: 0.0003 → 0.1", "checkpoints/step-00000002", "another run.name"),
        retry_command="classifier.yaml optimizer.lr=0.1 run.name=fast",
        earlier_commands=("classifier.yaml",),
        runs_stages=True,
    ),
]

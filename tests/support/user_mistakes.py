"""The mistakes that a new user is most likely to make: what is typed, what is said, and what leads back.

tests/cli/test_user_errors.py types them, in a folder with the two configs and the module below.
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
run: {name: own, root: runs}
data: {source: arrays.h5, held_out: 0.2}
model: {target: own, layers: 1, options: {width: 4}}
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
"""It imports torch where it needs it, so that the door, which imports the module, is soon through."""
Action = Callable[[], object]


def replace_text(file: str, old: str, new: str) -> Action:
    """Text of a file in the working directory, replaced."""

    def act() -> None:
        text = Path(file).read_text()
        assert text.count(old) == 1, f"{old} in {file}"
        Path(file).write_text(text.replace(old, new))

    return act


def write_arrays(*names: str) -> Action:
    """A file of samples with these arrays."""

    def act() -> None:
        draw = np.random.default_rng(0)
        values = {"inputs": draw.normal(size=(60, 4)).astype(np.float32), "labels": draw.integers(0, 3, 60)}
        with h5py.File("arrays.h5", "w") as file:
            for name in names:
                file[name] = values[name]

    return act


@dataclass
class Mistake:
    """What is done wrong and typed, what is said, and what leads back."""

    name: str
    typed: str
    told: str
    """Words of the answer, all of which must be in it, separated by ` … `."""
    first: Action = lambda: None
    mended: Action = lambda: None
    back: str = ""
    """What is typed then; "": what was typed at first; `printed`: the last command that was printed."""
    before: tuple[str, ...] = ()
    """What was typed before `first`, and got through."""
    trains: bool = False
    """Whether stages run; otherwise the door is all there is to it."""


SUBMISSION_MISTAKES = [
    Mistake(
        "a key misspelt",
        "tiny.yaml train.global_bach=8",
        "did you mean global_batch",
        back="tiny.yaml train.global_batch=8",
    ),
    Mistake(
        "a key of another section",
        "tiny.yaml train.lr=0.1",
        "train.lr … did you mean optimizer.lr?",
        back="tiny.yaml optimizer.lr=0.1",
    ),
    Mistake(
        "another program's key",
        "tiny.yaml train.batch_size=8",
        "did you mean train.global_batch?",
        back="tiny.yaml train.global_batch=8",
    ),
    Mistake(
        "a key without its section", "tiny.yaml steps=2", "did you mean train.steps", back="tiny.yaml train.steps=2"
    ),
    Mistake(
        "no equals sign",
        "tiny.yaml train.steps 2",
        '"train.steps": write section.key=value',
        back="tiny.yaml train.steps=2",
    ),
    Mistake(
        "a word for a number",
        "tiny.yaml train.steps=two",
        'train.steps: "two" should be a whole number',
        back="tiny.yaml train.steps=2",
    ),
    Mistake(
        "a number in quotes",
        "tiny.yaml",
        'tiny.yaml:9: train.steps: "2" should be a whole number',
        replace_text("tiny.yaml", "steps: 2", 'steps: "2"'),
        replace_text("tiny.yaml", '"2"', "2"),
    ),
    Mistake(
        "a glob that matches nothing",
        "tiny.yaml data.source=texts/*.jsonl",
        "data.source: … texts/*.jsonl' matches no file; name .txt, .jsonl",
        back="tiny.yaml data.source=c*.jsonl",
    ),
    Mistake(
        "a glob that YAML takes for something else",
        "tiny.yaml data.source=*.jsonl",
        "command line: data.source: cannot be read as YAML: … (while scanning an alias); put it in quotes",
        back="""tiny.yaml 'data.source="*.jsonl"'""",
    ),
    Mistake(
        "files of another kind",
        "tiny.yaml data.source=tiny.yaml",
        "no supported ending",
        back="tiny.yaml data.source=corpus.jsonl",
    ),
    Mistake(
        "a tokenizer that is not there",
        "tiny.yaml 'data.tokenizer={kind: file, path: none.json}'",
        "data.tokenizer.path: there is no file",
        back="tiny.yaml data.tokenizer.kind=byte_bpe",
    ),
    Mistake(
        "a batch that the micro-batch does not divide",
        "tiny.yaml train.micro_batch=3",
        "global_batch (8) is no multiple of micro_batch (3)",
        back="tiny.yaml train.micro_batch=2",
    ),
    Mistake(
        "a batch that the ranks do not divide",
        "tiny.yaml stages.train.tasks_per_node=3",
        "there may be 1, 2",
        back="tiny.yaml stages.train.tasks_per_node=2",
    ),
    Mistake(
        "more tensor parallel ranks than heads",
        "tiny.yaml parallel.tensor=8 stages.train.tasks_per_node=8 train.micro_batch=1",
        "model.heads, 4, is not a multiple of parallel.tensor (8) … layouts of 8 ranks that fit: pipeline 1 × data",
        back="tiny.yaml parallel.tensor=2 stages.train.tasks_per_node=2",
    ),
    Mistake(
        "more ranks than GPUs",
        "tiny.yaml site.gpus_per_node=1 stages.train.tasks_per_node=2",
        "each rank needs its own GPU; lower it, or set parallel.backend to gloo",
        back="tiny.yaml site.gpus_per_node=1 stages.train.tasks_per_node=2 parallel.backend=gloo",
    ),
    Mistake(
        "a warm-up longer than the training",
        "tiny.yaml optimizer.warmup_steps=9",
        "optimizer.warmup_steps (9) is more than train.steps (2)",
        back="tiny.yaml optimizer.warmup_steps=2",
    ),
    Mistake(
        "options without a model for them",
        "tiny.yaml model.options.width=3",
        "options are for a model of your own",
        back="tiny.yaml",
    ),
    Mistake(
        "tabs",
        "tiny.yaml",
        "tiny.yaml:2:1: cannot be read as YAML: found character '\\t' … indent with blanks",
        replace_text("tiny.yaml", "run: {name: tiny,", "run:\n\t{name: tiny,"),
        replace_text("tiny.yaml", "\n\t{", " {"),
    ),
    Mistake(
        "an empty config",
        "empty.yaml",
        "it should hold keys and values such as `run: {name: first}` (`init` writes some)",
        Path("empty.yaml").touch,
        lambda: shutil.copy("tiny.yaml", "empty.yaml"),
    ),
    Mistake(
        "half a config",
        "half.yaml",
        "half.yaml: train is missing; it should be a section with the keys steps",
        lambda: Path("half.yaml").write_text("run: {name: x}"),
        lambda: Path("half.yaml").write_text("run: {name: x}\ntrain: {steps: 2}"),
    ),
    Mistake(
        "a config that extends what is not there",
        "tiny.yaml",
        "tiny.yaml:1: extends: base.yaml: cannot read it: No such file",
        replace_text("tiny.yaml", "run: {name", "extends: base.yaml\nrun: {name"),
        replace_text("tiny.yaml", "extends: base.yaml\n", ""),
    ),
    Mistake(
        "a config misspelt",
        "tinny.yaml",
        "tinny.yaml: cannot read it: No such file or directory; did you mean tiny.yaml?",
        back="tiny.yaml",
    ),
    Mistake(
        "a folder that cannot be made",
        "tiny.yaml run.root=/proc",
        "run.root: cannot make /proc/tiny: … choose another run.root",
        back="tiny.yaml run.root=runs",
    ),
    Mistake(
        "Slurm where there is none",
        "tiny.yaml --executor=slurm",
        "no Slurm controller answers (scontrol ping); use --executor local",
        back="tiny.yaml --executor=local",
    ),
    Mistake(
        "a module that is no Python",
        "own.yaml",
        "own.py is no Python that 3",
        replace_text("own.py", "return nn.", "return return nn."),
        replace_text("own.py", "return return", "return"),
    ),
    Mistake(
        "a wrong name among the options",
        "own.yaml",
        "own cannot be imported or built here … KeyError: 'width'",
        replace_text("own.yaml", "width:", "widht:"),
        replace_text("own.yaml", "widht:", "width:"),
    ),
    Mistake(
        "BatchNorm",
        "own.yaml",
        "would differ between layouts; take GroupNorm for BatchNorm",
        replace_text("own.py", "nn.GELU()", "nn.BatchNorm1d(width)"),
        replace_text("own.py", "BatchNorm1d(width)", "GroupNorm(1, width)"),
    ),
    Mistake(
        "a module that imports what is not there",
        "own.yaml",
        "own cannot be imported or built here, and no job could: … No module named 'not_there'",
        replace_text("own.py", "ARRAYS", "import not_there\nARRAYS"),
        replace_text("own.py", "import not_there\n", ""),
    ),
    Mistake(
        "a module without a loss",
        "own.yaml",
        "own.py lacks loss at its top level",
        replace_text("own.py", "def loss", "def lost"),
        replace_text("own.py", "def lost", "def loss"),
    ),
    Mistake(
        "a module that is not here",
        "own.yaml model.target=mine",
        "there is no module mine … start from the folder that holds it",
        back="own.yaml",
    ),
    Mistake(
        "a file that is no HDF5",
        "own.yaml",
        "cannot read … arrays.h5",
        lambda: Path("arrays.h5").write_text("1, 2"),
        write_arrays("inputs", "labels"),
    ),
    Mistake(
        "a file without an array",
        "own.yaml",
        "own wants samples in a dataset 'labels'; there are: inputs",
        write_arrays("inputs"),
        write_arrays("inputs", "labels"),
    ),
    Mistake(
        "Python's library for a model of one's own",
        "own.yaml data.source=python-stdlib",
        "name the HDF5 files that contain its samples as data.source",
        back="own.yaml data.source=arrays.h5",
    ),
]
LATER_MISTAKES = [
    Mistake(
        "a command misspelt",
        "statuss",
        "no such command, and no such file; did you mean status?",
        before=("tiny.yaml",),
        back="status",
    ),
    Mistake(
        "a run misspelt",
        "resume runs/tinny",
        "runs/tinny is not a run: there is no such directory; did you mean runs/tiny?",
        before=("tiny.yaml",),
        back="resume runs/tiny",
    ),
    Mistake(
        "a run by its name alone",
        "resume tiny",
        "tiny is not a run: there is no such directory; did you mean runs/tiny?",
        before=("tiny.yaml",),
        back="resume runs/tiny",
    ),
    Mistake(
        "a time limit as a number",
        "tiny.yaml stages.train.time=30",
        "command line: stages.train.time: 30: for 30 minutes write 00:30:00",
        back="tiny.yaml stages.train.time=00:30:00",
    ),
    Mistake(
        "a config for a run",
        "resume tiny.yaml",
        "tiny.yaml is not a run: it is a config, that of the run runs/tiny",
        before=("tiny.yaml",),
        back="resume runs/tiny",
    ),
    Mistake(
        "a run for a config",
        "runs/tiny",
        "runs/tiny is a run, not a config",
        before=("tiny.yaml",),
        back="printed",
    ),
    Mistake(
        "a cancelled run",
        "tiny.yaml",
        "runs/tiny was cancelled; to continue it:",
        before=("tiny.yaml", "cancel runs/tiny"),
        back="printed",
    ),
    Mistake(
        "a run that was moved",
        "resume runs/tiny",
        "runs/tiny is not a run: there is no such directory",
        partial(os.rename, "runs", "old"),
        before=("tiny.yaml",),
        back="resume old/tiny",
    ),
    Mistake(
        "a run that was deleted",
        "resume runs/tiny",
        "runs/tiny is not a run: there is no such directory",
        partial(shutil.rmtree, "runs"),
        before=("tiny.yaml",),
        back="tiny.yaml",
    ),
    Mistake(
        "a wrong text_field",
        "tiny.yaml",
        "no field 'body'; there are 'text'. … resume runs/tiny data.text_field=text … the config is wrong: correct "
        "it and give the same command again",
        replace_text("tiny.yaml", "text_field: text", "text_field: body"),
        replace_text("tiny.yaml", "text_field: body", "text_field: text"),
        trains=True,
    ),
    Mistake(
        "a number of classes that the labels do not have",
        "own.yaml",
        "Target 2 is out of bounds … correct it and give the same command again",
        replace_text("own.yaml", "width: 4", "width: 4, classes: 2"),
        replace_text("own.yaml", "classes: 2", "classes: 3"),
        trains=True,
    ),
    Mistake(
        "the same, mended by resume",
        "own.yaml model.options.classes=2",
        "Target 2 is out of bounds",
        back="resume runs/own model.options.classes=3",
        trains=True,
    ),
    Mistake(
        "sequences longer than the text",
        "tiny.yaml data.sequence_length=900000",
        "add text or lower data.sequence_length … resume runs/tiny data.sequence_length=…",
        back="tiny.yaml",
        trains=True,
    ),
    Mistake(
        "a loss that is a mean",
        "own.yaml",
        'Leave the mean out (reduction="sum" in torch.nn.functional)',
        replace_text("own.py", ', reduction="sum"', ""),
        replace_text("own.py", '["labels"])\ndef metrics', '["labels"], reduction="sum")\ndef metrics'),
        back="printed",
        trains=True,
    ),
    Mistake(
        "a bug that shows after the training",
        "own.yaml",
        "NameError: … correct own.py, line 11, then: … --update-code replaces it and continues from "
        "checkpoints/step-00000002",
        replace_text("own.py", '{"right"', "{right"),
        replace_text("own.py", "{right", '{"right"'),
        back="printed",
        trains=True,
    ),
    Mistake(
        "another config after the training",
        "own.yaml optimizer.lr=0.1",
        "runs/own exists with another config: … optimizer.lr: 0.0003 → 0.1 … checkpoints/step-00000002",
        before=("own.yaml",),
        back="printed",
        trains=True,
    ),
    Mistake(
        "more steps after the end",
        "own.yaml train.steps=3",
        "train.steps: 2 → 3 … to go on with it: … resume runs/own train.steps=3",
        before=("own.yaml",),
        back="resume runs/own train.steps=3",
        trains=True,
    ),
    Mistake(
        "a key that resume does not take",
        "resume runs/own optimizer.lr=0.1",
        "optimizer.lr: 0.0003 → 0.1: resume cannot change it … there is checkpoints/step-00000002 … another run.name",
        before=("own.yaml",),
        back="own.yaml optimizer.lr=0.1 run.name=fast",
        trains=True,
    ),
]

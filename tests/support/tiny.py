"""Create tiny runs: generated text, a small tokenizer and a decoder with two layers. Preparing one takes a second."""

from __future__ import annotations

import json
import random
from pathlib import Path

from pipeline.base.dist_env import RankInfo
from pipeline.base.signals import StopFlag
from pipeline.config.read import load_config
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from tests.support.edits import replace_in_file
from tests.support.ranks import make_rank_info, run_ranks

WORDS = ["the", "model", "rank", "step", "loss", "shard", "token", "save", "run", "when", "then", "each", "of", "and"]

CONFIG = """\
run: {{name: {name}, root: {root}, seed: 3}}
data:
  source: {source}
  tokenizer: {{vocab_size: 300, train_bytes: 50000}}
  sequence_length: 32
  shard_tokens: 20000
  held_out: 0.1
model: {{dim: 32, layers: 2, heads: 4, kv_heads: 2, dropout: 0.1}}
train: {{steps: {steps}, global_batch: 8, micro_batch: 1}}
optimizer: {{lr: 1.0e-2, warmup_steps: 2}}
checkpoint: {{every_steps: 7, keep: 3}}
stages: {{shard: {{tasks: 2}}, train: {{tasks_per_node: 2}}, evaluate: {{tasks_per_node: 1}}}}
"""


def write_corpus(folder: Path, documents: int = 300) -> Path:
    """Write corpus.jsonl with random sentences and return its path. Every call writes the same sentences."""
    generator = random.Random(0)
    path = folder / "corpus.jsonl"
    with open(path, "w") as file:
        for _ in range(documents):
            text = " ".join(generator.choice(WORDS) for _ in range(generator.randint(20, 200)))
            file.write(json.dumps({"text": text}) + "\n")
    return path


def write_config(folder: Path, name: str = "tiny", steps: int = 30) -> Path:
    """Write the config and the corpus of a tiny run; return the path of the config."""
    path = folder / f"{name}.yaml"
    path.write_text(CONFIG.format(name=name, root=folder / "runs", source=write_corpus(folder), steps=steps))
    return path


def make_run(folder: Path, name: str = "tiny", overrides: tuple[str, ...] = (), data: Path | None = None) -> Run:
    """Create a run for which the prepare and shard stages are done.

    Args:
        folder: folder for the config, the corpus and the run directory.
        name: name of the run.
        overrides: overrides of config keys.
        data: data directory of another run. If given, the run has a link to it, and no data is prepared.
    """
    run = Run.create(load_config(write_config(folder, name), overrides))
    if data is not None:
        run.data_dir.rmdir()
        run.data_dir.symlink_to(data)
        return run
    for stage in ("prepare", "shard"):
        load_stage_module(run, stage).run_stage(run, make_rank_info(0, 1, 1), {}, PassiveStopFlag())
    return run


class PassiveStopFlag(StopFlag):
    """A stop flag that leaves the signal handlers of the test process unchanged."""

    def exit_on_signal(self) -> None:
        pass


def run_stage_on_rank(rank_info: RankInfo, path: Path, stage: str, options: dict[str, str] | None = None) -> int:
    """Run a stage of the run at `path` in this rank, as `python -m pipeline STAGE RUN` does. Return the exit code.

    Tests pass this function to `run_ranks`. Its forked ranks start faster than new Python processes.
    """
    run = Run.open(path)
    return int(load_stage_module(run, stage).run_stage(run, rank_info, options or {}, StopFlag().install()))


def slow_down_steps(run: Run, seconds: float = 0.5) -> Run:
    """Edit the run's copy of the code so that each step sleeps for `seconds`. Return the run.

    A test can then send a signal or a request while the run is training.
    """
    trainer = run.code_dir / "pipeline/train/trainer.py"
    line_start = "        lr = self.compute_learning_rate("
    replace_in_file(trainer, line_start, f"        time.sleep({seconds})\n{line_start}")
    return run


def compute_run_digest(run: Run) -> str:
    """Verify the files of the newest checkpoint and return its digest, which `verify` also prints.

    A forked rank needs a tenth of a second. The command `verify` would first have to import torch.
    """
    return str(run_ranks(1, _compute_digest_on_rank, run.path)[0])


def _compute_digest_on_rank(_: RankInfo, path: Path) -> str:
    """Verify the newest checkpoint of the run at `path`, and return its digest."""
    from pipeline.checkpoint import catalog
    from pipeline.checkpoint.checkpointer import compute_digest

    folder = Run.open(path).checkpoints_dir
    newest = folder / catalog.checkpoint_name(catalog.list_checkpoint_steps(folder)[0])
    catalog.verify_checkpoint_files(newest, catalog.read_checkpoint_manifest(newest))
    return compute_digest(newest)

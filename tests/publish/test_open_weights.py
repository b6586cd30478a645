"""Training from an open model equals training in transformers on any layout, and damaged folders are rejected."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.tokenizer import train_bpe
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import CheckpointError, ExitCode, UserError
from pipeline.base.files import read_json, write_json
from pipeline.checkpoint.identity import SOURCE_FILE
from pipeline.config.read import load_config
from pipeline.config.sections import Config
from pipeline.publish.card import write_card
from pipeline.publish.generate import _load_run
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from tests.support.ranks import make_rank_info, run_ranks
from tests.support.tiny import CONFIG, WORDS, HarmlessFlag, compute_run_digest, stage_rank, write_corpus
from tests.support.tiny_training import BATCHES, STEPS, VOCAB, continue_training, make_batches, tiny_config

SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8}, "attention_bias": True},
    "mistral": {"head_dim": 8, "sliding_window": 16, "tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
}
ROUNDING = 4e-5
"""Tolerance for a parameter's gradient, relative to its largest entry.

Gradients of queries and keys are sums that nearly cancel. In float32 they differ by up to 2e-5 from float64, both ours
and those of transformers. Gradients of all other parameters differ by up to 2e-6.
"""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "tensor, no sequence": {"tensor": 2, "sequence": False},
    "pipeline": {"pipeline": 2, "zero": 1},
    "zero 3": {"zero": 3},
}


def save_random_model(folder: Path, family: str, pieces: str = "50GB", **more: Any) -> Any:
    """Save a transformers model with different random weights and a tokenizer in `folder`. Return the model.

    Args:
        folder: where the model is saved.
        family: model type of transformers, such as `qwen3`.
        pieces: maximum size of a safetensors file.
        more: values of the model's config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    theirs = AutoConfig.for_model(family, **{**SIZES, **more})
    model = AutoModelForCausalLM.from_config(theirs, attn_implementation="eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2, generator=generator)
    model.save_pretrained(folder, max_shard_size=pieces)
    vocabulary = {str(number): number for number in range(theirs.vocab_size)}
    write_json(folder / "tokenizer.json", {"model": {"vocab": vocabulary}})
    write_json(folder / "tokenizer_config.json", {"eos_token": "0"})
    return model


def make_config(folder: Path, ranks: int, **parallel: Any) -> Config:
    return tiny_config(ranks, data={"tokenizer": None}, model={"init_from": str(folder)}, parallel=parallel)


Arrays = dict[str, Any]
"""numpy arrays by name. A tensor would be passed from the rank to the test in a file that is removed with the rank."""


def run_first_pass(engine: Any, where: RankInfo) -> tuple[Any, Arrays]:
    """Return the logits of this rank's samples in the first step, and whole gradients by name, without an update.

    The logits are None on a rank that computes none, because it is not in the last pipeline-parallel stage.
    """
    from pipeline.model.decoder import full_tensor

    task = engine.task
    loss = task.loss
    logits = []
    dp_rank = engine.layout.coordinates(where.rank).dp

    def record_logits(outputs: Any, batch: Any) -> Any:
        logits.append(full_tensor(outputs.detach()).clone())  # The memory of the outputs is reused.
        return loss(outputs, batch)

    task.loss = record_logits
    batch = make_batches(engine.config)
    engine.backward({"tokens": batch[0].chunk(engine.layout.dp)[dp_rank]}, 1)
    task.loss = loss
    named = [each for piece in engine.parts for each in task.named_weights(piece)]
    gradients = {name: full_tensor(parameter.grad).numpy().copy() for name, parameter in named}
    engine.optimizer.zero_grad(set_to_none=True)
    engine.replica_sync.end_step(is_applied=False)
    rows = len(batch[0]) // engine.layout.dp  # With pipeline parallelism, one more micro-batch is computed before.
    return torch.cat(logits)[-rows:].numpy() if logits else None, gradients


def is_close(found: Any, expected: torch.Tensor, error: float = 1e-5) -> bool:
    """Return whether all entries differ by at most `error` times the largest expected entry."""
    return bool((torch.as_tensor(found) - expected).abs().max() <= error * expected.abs().max())


def train_on_rank(
    where: RankInfo, path: Path, configs: list[Config]
) -> list[tuple[list[tuple[float, float]], int, Any]]:
    """Train each config in turn on this rank.

    Returns for each config: losses and gradient norms by step, the number of weights that this rank read from the
    folder of the open model, and the result of `run_first_pass`.
    """
    from pipeline.comm import groups
    from pipeline.model import open_weights as module
    from pipeline.model.task import DecoderTask
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train.engine import Engine

    groups.configure_determinism(configs[0])
    world = groups.join_process_group(where, configs[0])
    real_safe_open = module.safe_open
    results = []
    for config in configs:
        layout = resolve_layout(config, world.size, where.local_world_size)
        task = DecoderTask(config, VOCAB)
        read = [0]
        source = module.open_initial_weights(Run(path, config), task, groups.new_control_group())

        class CountingFile:
            """A safetensors file that counts the weights that are read from it."""

            def __init__(self, *arguments: Any, **options: Any) -> None:
                self.file = real_safe_open(*arguments, **options)

            def __enter__(self) -> CountingFile:
                self.file.__enter__()
                return self

            def __exit__(self, *error: Any) -> None:
                self.file.__exit__(*error)

            def get_slice(self, name: str) -> Any:
                self.name = name
                return self

            def __getitem__(self, index: Any) -> torch.Tensor:
                part = self.file.get_slice(self.name)[index]
                read[0] += part.numel()  # noqa: B023
                return part

        module.safe_open = CountingFile  # type: ignore[misc, assignment]
        engine = Engine(config, layout, world, task, source=source)
        module.safe_open = real_safe_open  # type: ignore[misc]
        first = run_first_pass(engine, where)
        results.append((continue_training(engine, where, 0, STEPS), read[0], first))
    return results


def train_transformers_model(
    model: Any, config: Config
) -> tuple[list[tuple[float, float]], tuple[torch.Tensor, Arrays]]:
    """Train a transformers model in a plain loop with torch's AdamW.

    Returns: losses and gradient norms by step; logits and gradients of the first step.
    """
    options = config.optimizer
    results = []
    first = None
    by_decay = [[p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False)]
    groups = [{"params": by_decay[0], "weight_decay": options.weight_decay}, {"params": by_decay[1], "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps)
    for batch in make_batches(config)[:STEPS]:
        optimizer.zero_grad()
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        first = first or (logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()})
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm or 0.0)
        optimizer.step()
        results.append((loss.item(), norm.item()))
    assert first is not None
    return results, first


@pytest.mark.parametrize(
    ("family", "layouts"),
    [("qwen3", ["tensor"]), *(pytest.param(name, list(LAYOUTS), marks=pytest.mark.story) for name in FAMILIES)],
)
def test_ten_steps_equal_those_of_transformers_on_every_layout(tmp_path: Path, family: str, layouts: list[str]) -> None:
    assert BATCHES >= STEPS == 10
    folder = tmp_path / family
    model = save_random_model(folder, family, "20KB", **FAMILIES[family])
    assert len(list(folder.glob("*.safetensors"))) > 1
    config = make_config(folder, 1)
    expected, (logits, gradients) = train_transformers_model(model, config)
    [[(losses, read, (our_logits, our_gradients))]] = run_ranks(1, train_on_rank, tmp_path, [config])
    assert losses == [pytest.approx(step, rel=1e-5) for step in expected]
    assert is_close(our_logits, logits)
    assert our_gradients.keys() == gradients.keys()
    assert all(is_close(our_gradients[name], gradients[name], ROUNDING) for name in gradients)
    model_size = sum(p.numel() for p in model.parameters())
    norm_size = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert read == model_size
    ranks = run_ranks(2, train_on_rank, tmp_path, [make_config(folder, 2, **LAYOUTS[layout]) for layout in layouts])
    for number, layout in enumerate(layouts):
        for rank in ranks:
            assert rank[number][0] == [pytest.approx(step, rel=1e-5) for step in losses], layout
        parts = [rank[number][2] for rank in ranks]
        rank_logits = [part for part, _ in parts if part is not None]  # Only the last pipeline-parallel stage has any.
        has_all_rows = len(rank_logits[0]) == len(logits)
        assert is_close(rank_logits[0] if has_all_rows else np.concatenate(rank_logits), logits), layout
        assert {name for _, rank_gradients in parts for name in rank_gradients} == gradients.keys(), layout
        for _, rank_gradients in parts:
            for name, gradient in rank_gradients.items():
                assert is_close(gradient, gradients[name], ROUNDING), (layout, name)
        reads = [rank[number][1] for rank in ranks]
        repeated = norm_size if "tensor" in layout else 0  # Tensor-parallel ranks all have the weights of norms.
        if layout == "pipeline" and model.config.tie_word_embeddings:
            repeated = VOCAB * 16
        assert model_size <= sum(reads) <= model_size + repeated, (layout, reads)
        assert max(reads) < 0.7 * model_size, (layout, reads)


def open_weights_on_rank(where: RankInfo, path: Path, configs: list[Config]) -> list[tuple[str, str]]:
    """Open the open model of each config. Return the code and message of each error, or two empty strings."""
    from pipeline.comm import groups
    from pipeline.model.open_weights import open_initial_weights
    from pipeline.model.task import DecoderTask

    groups.join_process_group(where, configs[0])
    errors = []
    for config in configs:
        try:
            open_initial_weights(Run(path, config), DecoderTask(config, VOCAB), groups.new_control_group())
        except UserError as error:
            errors.append((error.code, str(error)))
        else:
            errors.append(("", ""))
    return errors


class PickledCall:
    """An object whose unpickling creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_damaged_or_malicious_folders_are_rejected_by_all_ranks(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_random_model(tmp_path / "right", "qwen2")
    weights = load_file(tmp_path / "right/model.safetensors")
    norm = "model.norm.weight"
    up = "model.layers.3.mlp.up_proj.weight"

    def folder(name: str, tensors: dict[str, Any] | None = None) -> Path:
        copy = shutil.copytree(tmp_path / "right", tmp_path / name)
        if tensors is not None:
            save_file(tensors, copy / "model.safetensors", {"format": "pt"})
        return Path(copy)

    without_up = {name: value for name, value in weights.items() if name != up}
    inverse_frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    not_safetensors = ("model.not_safetensors", "model.safetensors")
    cases = {
        folder("missing_tensor", without_up): ("model.missing_tensor", up),
        folder("shape", {**weights, norm: torch.ones(17)}): ("model.wrong_shape", norm, "[17]", "config.json", "[16]"),
        folder("type", {**weights, norm: torch.ones(16, dtype=torch.int8)}): ("model.wrong_type", norm, "I8", "BF16"),
        folder("more", {**weights, "model.extra.bias": torch.ones(3)}): (
            "model.unexpected_tensor",
            "config.json",
            "model.extra.bias",
        ),
        folder("old_rope", {**weights, **inverse_frequencies}): ("",),  # Unused tensors of older versions are ignored.
        (truncated := folder("truncated")): not_safetensors,
        (wrong_shape := folder("shape_exceeds_data")): not_safetensors,
        (wrong_offset := folder("offset_exceeds_file")): not_safetensors,
        (long_header := folder("header_exceeds_file")): not_safetensors,
        (link := folder("link")): ("model.link_outside_folder", "model.safetensors"),
        (pickled := folder("pickled")): not_safetensors,
        (duplicate := folder("duplicate")): ("model.duplicate_tensor", norm, "a.safetensors", "model.safetensors"),
        (changed_config := folder("changed_config")): ("model.folder_changed", "config.json"),
        (changed_weights := folder("changed_weights")): ("model.folder_changed", "changed_weights", "weight"),
    }
    content = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(content[: len(content) // 2])
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    begin, end = header[up]["data_offsets"]
    for path, values in (
        (wrong_shape, {"shape": [32, 17]}),
        (wrong_offset, {"data_offsets": [begin + 1_000_000, end + 1_000_000]}),
    ):
        text = json.dumps({**header, up: {**header[up], **values}}).encode()
        (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    (long_header / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + content[8:])
    (pickled / "model.safetensors").write_bytes(pickle.dumps(PickledCall(tmp_path / "executed")))
    save_file({norm: weights[norm]}, duplicate / "a.safetensors")
    index = {norm: "a.safetensors", up: "model.safetensors"}
    write_json(duplicate / "model.safetensors.index.json", {"weight_map": index})
    configs = [make_config(path, 2) for path in cases]
    # These files change after their configs were loaded.
    (link / "model.safetensors").unlink()
    (link / "model.safetensors").symlink_to(tmp_path / "right/model.safetensors")
    model_config = json.loads((changed_config / "config.json").read_bytes())
    write_json(changed_config / "config.json", {**model_config, "rms_norm_eps": 0.5})
    new_weights = {name: value + 1 for name, value in weights.items()}
    save_file(new_weights, changed_weights / "model.safetensors", {"format": "pt"})
    os.utime(changed_weights / "model.safetensors", (1, 1))  # differs from the time of the copy
    for errors in run_ranks(2, open_weights_on_rank, tmp_path, configs):
        for path, (code, message), (expected_code, *facts) in zip(cases, errors, cases.values(), strict=True):
            assert code == expected_code, (path.name, message)
            assert all(fact in message for fact in facts), (path.name, message)
    assert not (tmp_path / "executed").exists()


def make_run_from_model(folder: Path, name: str, source: Path, steps: int) -> Run:
    """Create a run that starts from the open model `source`, and run its stages prepare and shard."""
    text = CONFIG.format(name=name, root=folder / "runs", source=write_corpus(folder), steps=steps)
    model = "model: {dim: 32, layers: 2, heads: 4, kv_heads: 2, dropout: 0.1}"
    lines = [line for line in text.splitlines() if not line.startswith("  tokenizer: ")]
    text = (
        "\n".join(lines)
        .replace(model, f"model: {{init_from: {source}}}")
        .replace("warmup_steps: 2", "schedule: constant")
    )
    assert text.count(str(source)) == 1 and "constant" in text
    (folder / f"{name}.yaml").write_text(text)
    run = Run.create(load_config(folder / f"{name}.yaml"))
    for stage in ("prepare", "shard"):
        load_stage_module(stage).run_stage(run, make_rank_info(0, 1, 1), {}, HarmlessFlag())
    return run


def test_run_resumes_after_the_folder_of_its_open_model_was_removed(tmp_path: Path) -> None:
    source = tmp_path / "models--some--open/snapshots/0123"  # the path of a snapshot in the cache of the Hub
    save_random_model(source, "qwen3", vocab_size=320, **FAMILIES["qwen3"])  # more embeddings than token IDs
    (source / "tokenizer.json").write_text(train_bpe([" ".join(WORDS)], 300, "<|end|>"))
    write_json(source / "tokenizer_config.json", {"eos_token": "<|end|>"})
    write_json(source / "generation_config.json", {"eos_token_id": [0, 7]})
    uninterrupted = make_run_from_model(tmp_path, "uninterrupted", source, 8)
    run = make_run_from_model(tmp_path, "run", source, 4)
    assert run_ranks(2, stage_rank, uninterrupted.path, "train") == [ExitCode.DONE] * 2
    assert run_ranks(2, stage_rank, run.path, "train") == [ExitCode.DONE] * 2
    first = json.loads(run.metrics_file.read_text().splitlines()[0])
    assert 0.5 < first["loss"] < 20
    shutil.rmtree(source)
    run = Run.open(run.path)
    run.apply_overrides(["train.steps=8"])
    assert run_ranks(2, stage_rank, run.path, "train") == [ExitCode.DONE] * 2
    assert compute_run_digest(run) == compute_run_digest(uninterrupted)
    assert run_ranks(1, stage_rank, run.path, "evaluate") == [ExitCode.DONE]
    assert _load_run(run.path, "the model", None, 5)[2] == [0, 7]  # the end tokens of the open model

    # The run records the files that it started from.
    recorded = read_json(uninterrupted.path / SOURCE_FILE)
    assert set(recorded["files"]) == {"config.json", "model.safetensors"}
    run.apply_overrides([f"publish={{to: {tmp_path}}}"])
    write_card(Run.open(run.path), tmp_path, 8, None, [])
    card = (tmp_path / "README.md").read_text()
    assert "base_model: some/open\n" in card
    for name, sha256 in recorded["files"].items():
        assert f"started from 0123/{name}: sha256 {sha256}" in card and len(sha256) == 64
    (run.path / SOURCE_FILE).write_text("{}")
    with pytest.raises(AssertionError, match=f"{CheckpointError.__name__}.*{SOURCE_FILE} is missing or damaged"):
        run_ranks(1, stage_rank, run.path, "train")


def measure_memory_on_rank(where: RankInfo, path: Path, configs: list[Config]) -> dict[str, float]:
    """Measure the peak memory of importing an open model on this rank, for the last config.

    The configs before it only cause Python modules to be imported.

    Returns, in GB: `import, memory`, the peak increase while importing; `share`, the size of this rank's parameters
    and the two moments of AdamW for them.
    """
    from benchmarks.convert import measure_block
    from pipeline.comm import groups
    from pipeline.model.decoder import local_tensor
    from pipeline.model.open_weights import open_initial_weights
    from pipeline.model.task import DecoderTask
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train.engine import Engine

    results: dict[str, float] = {}
    world = groups.join_process_group(where, configs[0])
    for config in configs:
        task = DecoderTask(config, VOCAB)
        layout = resolve_layout(config, world.size, where.local_world_size)
        with measure_block(results, "import"):
            source = open_initial_weights(Run(path, config), task, groups.new_control_group())
            engine = Engine(config, layout, world, task, source=source)
            assert source is not None and engine.parts
            source.write_source()
    return {
        **results,
        "share": 3 * sum(local_tensor(p).nbytes for part in engine.parts for p in part.parameters()) / 1e9,
    }


@pytest.mark.story
@pytest.mark.parametrize("parallel", [{"zero": 3}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_importing_needs_memory_for_the_share_of_the_rank_and_one_tensor(
    tmp_path: Path, parallel: dict[str, Any]
) -> None:
    """The model has 0.5 GB in float32, with two tensors of 67 MB. The limit detects ranks that read too much."""
    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 6,
        "vocab_size": 16384,
    }
    model = save_random_model(tmp_path / "open", "llama", **sizes)
    model_gb = sum(parameter.nbytes for parameter in model.parameters()) / 1e9
    largest = max(parameter.nbytes for parameter in model.parameters()) / 1e9
    del model
    model_config = {"init_from": str(tmp_path / "open"), "dim": 1024, "layers": 6, "intermediate_size": 4096}
    config = tiny_config(2, data={"tokenizer": None}, model=model_config, parallel=parallel)
    save_random_model(tmp_path / "small", "llama")
    configs = [make_config(tmp_path / "small", 2, **parallel), config]
    for found in run_ranks(2, measure_memory_on_rank, tmp_path, configs):
        assert found["share"] < 3 * 0.66 * model_gb
        assert found["import, memory"] < found["share"] + largest + 0.06, (found, model_gb, largest)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_memory_of_importing_and_exporting_a_large_model_is_bounded(tmp_path: Path) -> None:
    """Importing more than 3 GB with one rank needs their size and one tensor; exporting needs 2 GB and one tensor."""
    from benchmarks import convert

    convert.make_source(tmp_path / "open", 16)
    run = convert.make_run(tmp_path, tmp_path / "open")
    size = sum(path.stat().st_size for path in (tmp_path / "open").glob("*.safetensors")) / 1e9
    largest = 2 * 128256 * 3072 / 1e9
    assert size > 3
    assert convert.run_child("import", run)["import, memory"] < size + largest + 0.1
    assert convert.run_child("export", run)["export, memory"] < 2 + largest

"""Tests that training from an open model equals training in transformers on any layout.

Damaged and malicious folders must be rejected.
"""

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
from tests.support.tiny import CONFIG, WORDS, PassiveStopFlag, compute_run_digest, run_stage_on_rank, write_corpus
from tests.support.tiny_training import BATCHES, STEPS, VOCAB, continue_training, make_batches, tiny_config

MODEL_SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {**LLAMA3_ROPE, "original_max_position_embeddings": 8}, "attention_bias": True},
    "mistral": {"head_dim": 8, "sliding_window": 16, "tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
}
GRADIENT_TOLERANCE = 4e-5
"""Tolerance for a parameter's gradient, relative to its largest entry.

Gradients of queries and keys are sums that nearly cancel. In Sluice and in transformers, they differ in float32 by up
to 2e-5 from float64. Gradients of all other parameters differ by up to 2e-6.
"""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "tensor, no sequence": {"tensor": 2, "sequence": False},
    "pipeline": {"pipeline": 2, "zero": 1},
    "zero 3": {"zero": 3},
}


def save_random_model(folder: Path, family: str, max_file_size: str = "50GB", **config_values: Any) -> Any:
    """Save a transformers model with random weights and a tokenizer in `folder`. Return the model.

    Args:
        folder: where the model is saved.
        family: model type of transformers, such as `qwen3`.
        max_file_size: maximum size of a safetensors file.
        config_values: values of the model's config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**MODEL_SIZES, **config_values})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2, generator=generator)
    model.save_pretrained(folder, max_shard_size=max_file_size)
    vocabulary = {str(number): number for number in range(config.vocab_size)}
    write_json(folder / "tokenizer.json", {"model": {"vocab": vocabulary}})
    write_json(folder / "tokenizer_config.json", {"eos_token": "0"})
    return model


def make_config(folder: Path, ranks: int, **parallel: Any) -> Config:
    """Return the config of a run that starts from the open model in `folder`."""
    return tiny_config(ranks, data={"tokenizer": None}, model={"init_from": str(folder)}, parallel=parallel)


Arrays = dict[str, Any]
"""numpy arrays by name. A tensor would be passed from the rank to the test in a file that is removed with the rank."""


def run_first_pass(engine: Any, rank_info: RankInfo) -> tuple[Any, Arrays]:
    """Return the logits of this rank's samples in the first step, and unsharded gradients by name, without an update.

    The logits are None on a rank that computes none, because it is not in the last pipeline-parallel stage.
    """
    from pipeline.model.decoder import full_tensor

    task = engine.task
    original_loss = task.loss
    logits = []
    dp_rank = engine.layout.coordinates(rank_info.rank).dp

    def record_logits_and_compute_loss(outputs: Any, batch: Any) -> Any:
        logits.append(full_tensor(outputs.detach()).clone())  # The memory of the outputs is reused.
        return original_loss(outputs, batch)

    task.loss = record_logits_and_compute_loss
    batch = make_batches(engine.config)
    engine.backward({"tokens": batch[0].chunk(engine.layout.dp)[dp_rank]}, 1)
    task.loss = original_loss
    named_weights = [named for part in engine.parts for named in task.named_weights(part)]
    gradients = {name: full_tensor(parameter.grad).numpy().copy() for name, parameter in named_weights}
    engine.optimizer.zero_grad(set_to_none=True)
    engine.replica_sync.end_step(is_applied=False)
    rows = len(batch[0]) // engine.layout.dp  # A pipeline computes one more micro-batch before the batch.
    return torch.cat(logits)[-rows:].numpy() if logits else None, gradients


def is_close(actual: Any, expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    """Return whether all entries differ by at most `tolerance` times the largest expected entry."""
    return bool((torch.as_tensor(actual) - expected).abs().max() <= tolerance * expected.abs().max())


def train_on_rank(
    rank_info: RankInfo, path: Path, configs: list[Config]
) -> list[tuple[list[tuple[float, float]], int, Any]]:
    """Train each config in turn on this rank.

    Returns:
        For each config: losses and gradient norms by step, the number of weights that this rank read from the folder
        of the open model, and the result of `run_first_pass`.
    """
    from pipeline.comm import groups
    from pipeline.model import open_weights
    from pipeline.model.task import DecoderTask
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train.engine import Engine

    groups.configure_determinism(configs[0])
    world = groups.join_process_group(rank_info, configs[0])
    real_safe_open = open_weights.safe_open
    results = []
    for config in configs:
        layout = resolve_layout(config, world.size, rank_info.local_world_size)
        task = DecoderTask(config, VOCAB)
        weights_read = 0
        source = open_weights.open_initial_weights(Run(path, config), task, groups.new_control_group())

        class CountingFile:
            """A safetensors file that adds the number of weights that are read from it to `weights_read`."""

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
                nonlocal weights_read
                weights = self.file.get_slice(self.name)[index]
                weights_read += weights.numel()
                return weights

        open_weights.safe_open = CountingFile  # type: ignore[misc, assignment]
        engine = Engine(config, layout, world, task, source=source)
        open_weights.safe_open = real_safe_open  # type: ignore[misc]
        first_pass = run_first_pass(engine, rank_info)
        results.append((continue_training(engine, rank_info, 0, STEPS), weights_read, first_pass))
    return results


def train_transformers_model(
    model: Any, config: Config
) -> tuple[list[tuple[float, float]], tuple[torch.Tensor, Arrays]]:
    """Train a transformers model in a simple loop with torch's AdamW.

    Returns:
        The losses and gradient norms by step, and the logits and gradients of the first step.
    """
    options = config.optimizer
    results = []
    first_pass = None
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps)
    for batch in make_batches(config)[:STEPS]:
        optimizer.zero_grad()
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        first_pass = first_pass or (
            logits.detach(),
            {name: parameter.grad.clone() for name, parameter in model.named_parameters()},
        )
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm or 0.0)
        optimizer.step()
        results.append((loss.item(), norm.item()))
    assert first_pass is not None
    return results, first_pass


@pytest.mark.story
@pytest.mark.parametrize(
    "family",
    [family if family in ("llama", "qwen3") else pytest.param(family, marks=pytest.mark.long) for family in FAMILIES],
)
def test_ten_steps_equal_those_of_transformers_on_every_layout(tmp_path: Path, family: str) -> None:
    assert BATCHES >= STEPS == 10
    folder = tmp_path / family
    model = save_random_model(folder, family, "20KB", **FAMILIES[family])
    assert len(list(folder.glob("*.safetensors"))) > 1
    config = make_config(folder, 1)
    expected_steps, (expected_logits, expected_gradients) = train_transformers_model(model, config)
    [[(steps, weights_read, (logits, gradients))]] = run_ranks(1, train_on_rank, tmp_path, [config])
    assert steps == [pytest.approx(step, rel=1e-5) for step in expected_steps]
    assert is_close(logits, expected_logits)
    assert gradients.keys() == expected_gradients.keys()
    assert all(is_close(gradients[name], expected_gradients[name], GRADIENT_TOLERANCE) for name in gradients)
    model_size = sum(parameter.numel() for parameter in model.parameters())
    norm_size = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 1)
    assert weights_read == model_size
    results_by_rank = run_ranks(
        2, train_on_rank, tmp_path, [make_config(folder, 2, **LAYOUTS[layout]) for layout in LAYOUTS]
    )
    for number, layout in enumerate(LAYOUTS):
        results = [rank_results[number] for rank_results in results_by_rank]
        for rank_steps, _, _ in results:
            assert rank_steps == [pytest.approx(step, rel=1e-5) for step in steps], layout
        first_passes = [first_pass for _, _, first_pass in results]
        # Only the last pipeline-parallel stage computes logits. With data parallelism, a rank has some of the rows.
        rank_logits = [logits for logits, _ in first_passes if logits is not None]
        has_all_rows = len(rank_logits[0]) == len(expected_logits)
        assert is_close(rank_logits[0] if has_all_rows else np.concatenate(rank_logits), expected_logits), layout
        names_of_all_ranks = {name for _, rank_gradients in first_passes for name in rank_gradients}
        assert names_of_all_ranks == expected_gradients.keys(), layout
        for _, rank_gradients in first_passes:
            for name, gradient in rank_gradients.items():
                assert is_close(gradient, expected_gradients[name], GRADIENT_TOLERANCE), (layout, name)
        sizes_read = [size for _, size, _ in results]
        # Each tensor-parallel rank has the weights of all norms. The first and the last pipeline-parallel stage both
        # have tied embeddings.
        read_twice = norm_size if "tensor" in layout else 0
        if layout == "pipeline" and model.config.tie_word_embeddings:
            read_twice = VOCAB * MODEL_SIZES["hidden_size"]
        assert model_size <= sum(sizes_read) <= model_size + read_twice, (layout, sizes_read)
        assert max(sizes_read) < 0.7 * model_size, (layout, sizes_read)


def open_weights_on_rank(rank_info: RankInfo, path: Path, configs: list[Config]) -> list[tuple[str, str]]:
    """Open the weights of each config's open model. Return the code and message of each error, or two empty strings."""
    from pipeline.comm import groups
    from pipeline.model.open_weights import open_initial_weights
    from pipeline.model.task import DecoderTask

    groups.join_process_group(rank_info, configs[0])
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

    save_random_model(tmp_path / "intact", "qwen2")
    weights = load_file(tmp_path / "intact/model.safetensors")
    norm = "model.norm.weight"
    up_proj = "model.layers.3.mlp.up_proj.weight"

    def copy_model(name: str, tensors: dict[str, Any] | None = None) -> Path:
        """Copy the intact model, with other tensors if given, and return the copy."""
        copy = shutil.copytree(tmp_path / "intact", tmp_path / name)
        if tensors is not None:
            save_file(tensors, copy / "model.safetensors", {"format": "pt"})
        return Path(copy)

    without_up_proj = {name: value for name, value in weights.items() if name != up_proj}
    inverse_frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    not_safetensors = ("model.not_safetensors", "model.safetensors")
    # For each copy: the code of the error, and texts in its message. The name of a copy is the kind of its damage.
    cases = {
        copy_model("missing_tensor", without_up_proj): ("model.missing_tensor", up_proj),
        copy_model("shape", {**weights, norm: torch.ones(17)}): (
            "model.wrong_shape",
            norm,
            "[17]",
            "config.json",
            "[16]",
        ),
        copy_model("type", {**weights, norm: torch.ones(16, dtype=torch.int8)}): (
            "model.wrong_type",
            norm,
            "I8",
            "BF16",
        ),
        copy_model("more", {**weights, "model.extra.bias": torch.ones(3)}): (
            "model.unexpected_tensor",
            "config.json",
            "model.extra.bias",
        ),
        # Unused tensors of older versions are ignored.
        copy_model("old_rope", {**weights, **inverse_frequencies}): ("",),
        (truncated := copy_model("truncated")): not_safetensors,
        (wrong_shape := copy_model("shape_exceeds_data")): not_safetensors,
        (wrong_offset := copy_model("offset_exceeds_file")): not_safetensors,
        (long_header := copy_model("header_exceeds_file")): not_safetensors,
        (link := copy_model("link")): ("model.link_outside_folder", "model.safetensors"),
        (pickled := copy_model("pickled")): not_safetensors,
        (duplicate := copy_model("duplicate")): ("model.duplicate_tensor", norm, "a.safetensors", "model.safetensors"),
        (changed_config := copy_model("changed_config")): ("model.folder_changed", "config.json"),
        (changed_weights := copy_model("changed_weights")): ("model.folder_changed", "changed_weights", "weight"),
    }
    content = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(content[: len(content) // 2])
    # a safetensors file: the size of the header in 8 bytes, the header in JSON, and the data
    header_size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_size])
    begin, end = header[up_proj]["data_offsets"]
    for path, values in (
        (wrong_shape, {"shape": [32, 17]}),
        (wrong_offset, {"data_offsets": [begin + 1_000_000, end + 1_000_000]}),
    ):
        text = json.dumps({**header, up_proj: {**header[up_proj], **values}}).encode()
        (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + header_size :])
    (long_header / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + content[8:])
    (pickled / "model.safetensors").write_bytes(pickle.dumps(PickledCall(tmp_path / "executed")))
    save_file({norm: weights[norm]}, duplicate / "a.safetensors")
    index = {norm: "a.safetensors", up_proj: "model.safetensors"}
    write_json(duplicate / "model.safetensors.index.json", {"weight_map": index})
    configs = [make_config(path, 2) for path in cases]
    # These files change after their configs were loaded.
    (link / "model.safetensors").unlink()
    (link / "model.safetensors").symlink_to(tmp_path / "intact/model.safetensors")
    model_config = json.loads((changed_config / "config.json").read_bytes())
    write_json(changed_config / "config.json", {**model_config, "rms_norm_eps": 0.5})
    new_weights = {name: value + 1 for name, value in weights.items()}
    save_file(new_weights, changed_weights / "model.safetensors", {"format": "pt"})
    os.utime(changed_weights / "model.safetensors", (1, 1))  # differs from the time of the copy
    for errors in run_ranks(2, open_weights_on_rank, tmp_path, configs):
        for path, (code, message), (expected_code, *expected_texts) in zip(cases, errors, cases.values(), strict=True):
            assert code == expected_code, (path.name, message)
            assert all(text in message for text in expected_texts), (path.name, message)
    assert not (tmp_path / "executed").exists()


def make_run_from_model(folder: Path, name: str, source: Path, steps: int, *overrides: str) -> Run:
    """Create a run that starts from the open model `source`, and run its prepare and shard stages."""
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
    run = Run.create(load_config(folder / f"{name}.yaml", overrides))
    for stage in ("prepare", "shard"):
        load_stage_module(run, stage).run_stage(run, make_rank_info(0, 1, 1), {}, PassiveStopFlag())
    return run


def save_model_with_tokenizer(folder: Path) -> None:
    """Save a random model whose tokenizer knows the words of the test corpus."""
    save_random_model(folder, "qwen3", vocab_size=320, **FAMILIES["qwen3"])  # more embeddings than token IDs
    (folder / "tokenizer.json").write_text(train_bpe([" ".join(WORDS)], 300, "<|end|>"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|end|>"})


def test_run_resumes_after_the_folder_of_its_open_model_was_removed(tmp_path: Path) -> None:
    source = tmp_path / "models--some--open/snapshots/0123"  # the path of a snapshot in the cache of the Hub
    save_model_with_tokenizer(source)
    write_json(source / "generation_config.json", {"eos_token_id": [0, 7]})
    uninterrupted_run = make_run_from_model(tmp_path, "uninterrupted", source, 8)
    run = make_run_from_model(tmp_path, "run", source, 4)
    assert run_ranks(2, run_stage_on_rank, uninterrupted_run.path, "train") == [ExitCode.DONE] * 2
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * 2
    first_step = json.loads(run.metrics_file.read_text().splitlines()[0])
    assert 0.5 < first_step["loss"] < 20
    shutil.rmtree(source)
    run = Run.open(run.path)
    run.apply_overrides(["train.steps=8"])
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * 2
    assert compute_run_digest(run) == compute_run_digest(uninterrupted_run)
    assert run_ranks(1, run_stage_on_rank, run.path, "evaluate") == [ExitCode.DONE]
    assert _load_run(run.path, "the model", None, 5)[2] == [0, 7]  # the end tokens of the open model

    # The run records the files that it started from.
    recorded_source = read_json(uninterrupted_run.path / SOURCE_FILE)
    assert set(recorded_source["files"]) == {"config.json", "model.safetensors"}
    run.apply_overrides([f"publish={{to: {tmp_path}}}"])
    write_card(Run.open(run.path), tmp_path, 8, None, [])
    card = (tmp_path / "README.md").read_text()
    assert "base_model: some/open\n" in card
    for name, sha256 in recorded_source["files"].items():
        assert f"started from 0123/{name}: sha256 {sha256}" in card and len(sha256) == 64
    (run.path / SOURCE_FILE).write_text("{}")
    with pytest.raises(AssertionError, match=f"{CheckpointError.__name__}.*{SOURCE_FILE} is missing or damaged"):
        run_ranks(1, run_stage_on_rank, run.path, "train")


def measure_memory_on_rank(rank_info: RankInfo, path: Path, configs: list[Config]) -> dict[str, float]:
    """Measure the peak memory of importing an open model on this rank, for the last config.

    The imports of the earlier configs only load the Python modules.

    Returns:
        Sizes in GB. `import, memory`: the peak increase during the import. `share`: this rank's parameters and their
        two moments of AdamW.
    """
    from benchmarks.convert import measure_block
    from pipeline.comm import groups
    from pipeline.model.decoder import local_tensor
    from pipeline.model.open_weights import open_initial_weights
    from pipeline.model.task import DecoderTask
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train.engine import Engine

    results: dict[str, float] = {}
    world = groups.join_process_group(rank_info, configs[0])
    for config in configs:
        task = DecoderTask(config, VOCAB)
        layout = resolve_layout(config, world.size, rank_info.local_world_size)
        with measure_block(results, "import"):
            source = open_initial_weights(Run(path, config), task, groups.new_control_group())
            engine = Engine(config, layout, world, task, source=source)
            assert source is not None and engine.parts
            source.write_source()
    return {
        **results,
        "share": 3
        * sum(local_tensor(parameter).nbytes for part in engine.parts for parameter in part.parameters())
        / 1e9,
    }


@pytest.mark.story
@pytest.mark.parametrize("parallel", [{"zero": 3}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_importing_needs_memory_for_the_rank_s_share_and_one_tensor(tmp_path: Path, parallel: dict[str, Any]) -> None:
    """The model has 0.5 GB in float32, with two tensors of 67 MB, so a rank that reads too much exceeds the limit."""
    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 6,
        "vocab_size": 16384,
    }
    model = save_random_model(tmp_path / "open", "llama", **sizes)
    model_gb = sum(parameter.nbytes for parameter in model.parameters()) / 1e9
    largest_tensor_gb = max(parameter.nbytes for parameter in model.parameters()) / 1e9
    del model
    model_config = {"init_from": str(tmp_path / "open"), "dim": 1024, "layers": 6, "intermediate_size": 4096}
    config = tiny_config(2, data={"tokenizer": None}, model=model_config, parallel=parallel)
    save_random_model(tmp_path / "small", "llama")
    configs = [make_config(tmp_path / "small", 2, **parallel), config]
    for sizes_gb in run_ranks(2, measure_memory_on_rank, tmp_path, configs):
        assert sizes_gb["share"] < 3 * 0.66 * model_gb
        max_gb = sizes_gb["share"] + largest_tensor_gb + 0.06
        assert sizes_gb["import, memory"] < max_gb, (sizes_gb, model_gb, largest_tensor_gb)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_importing_and_exporting_a_large_model_need_little_more_memory_than_its_weights(tmp_path: Path) -> None:
    """With one rank, importing needs the size of the weights and of one tensor. Exporting needs 2 GB and one tensor."""
    from benchmarks import convert

    convert.make_source(tmp_path / "open", 16)
    run = convert.make_run(tmp_path, tmp_path / "open")
    model_gb = sum(path.stat().st_size for path in (tmp_path / "open").glob("*.safetensors")) / 1e9
    largest_tensor_gb = 2 * 128256 * 3072 / 1e9  # embeddings in bf16 (benchmarks/convert.py)
    assert model_gb > 3
    assert convert.run_child("import", run)["import, memory"] < model_gb + largest_tensor_gb + 0.1
    assert convert.run_child("export", run)["export, memory"] < 2 + largest_tensor_gb

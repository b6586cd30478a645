"""Tests of `export`.

An exported checkpoint is the same model in transformers, and importing and exporting it again gives the same bytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.tokenizer import train_bpe
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode, UserError
from pipeline.base.files import write_json
from pipeline.checkpoint import catalog
from pipeline.config.read import load_config
from pipeline.publish import export
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from tests.support.edits import replace_in_file
from tests.support.ranks import run_ranks
from tests.support.tiny import make_run, write_config

FEATURES = {
    "llama": (
        "rope_scaling={rope_type: llama3, factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, "
        "original_max_position_embeddings: 8}",
    ),
    "llama, biases": ("attention_bias=all",),
    "llama, linear": ("rope_scaling={rope_type: linear, factor: 4.0}",),
    "mistral": ("sliding_window=32",),
    "qwen2": ("attention_bias=qkv",),
    "qwen2, window": ("attention_bias=qkv", "sliding_window=32", "max_window_layers=1"),
    "qwen3": ("qk_norm=true",),
    "qwen3, window": ("qk_norm=true", "sliding_window=64", "max_window_layers=0"),
}
"""Values of the section `model`. A key is the family of the exported model in transformers, and a variant."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the data directory of a prepared run."""
    return make_run(tmp_path_factory.mktemp("data")).data_dir


def save_initial_checkpoint(rank_info: RankInfo, path: Path) -> list[list[float]]:
    """Save the initial weights of a run as the checkpoint of step 1. Return their logits for `make_tokens`."""
    from pipeline.checkpoint.checkpointer import Checkpointer
    from pipeline.comm import groups
    from pipeline.data.verify_shards import load_run_manifest
    from pipeline.train.trainer import Trainer
    from tests.support.tiny import PassiveStopFlag

    run = Run.open(path)
    world = groups.join_process_group(rank_info, run.config)
    trainer = Trainer(run, load_run_manifest(run), rank_info, world, PassiveStopFlag())
    saver = Checkpointer(
        run.checkpoints_dir, groups.new_control_group(), keep=1, background=False,
        manifest_entries=trainer.checkpointer.manifest_entries, on_saved=lambda *_: None,
    )  # fmt: skip
    saver.save(trainer.engine.state_dict(), step=1, samples_consumed=0, extra={"scaler": {}})
    with torch.no_grad():
        return trainer.engine.parts[0].eval()(make_tokens())[0].tolist()


def make_tokens() -> torch.Tensor:
    """Return one sequence of 32 token IDs."""
    return torch.arange(32)[None] * 7 % 256


def export_initial_weights(folder: Path, data: Path, name: str, *overrides: str) -> tuple[Path, torch.Tensor]:
    """Create a run and export its initial weights. Return the folder of the export and the logits before it."""
    run = make_run(folder, name, overrides, data)
    logits = run_ranks(1, save_initial_checkpoint, run.path)[0]
    message = export.export_checkpoint(run, folder / f"{name}-out", None, "fp32")
    assert str(folder / f"{name}-out") in message.splitlines()[0]
    assert "step-00000001" in message.splitlines()[0]
    return folder / f"{name}-out", torch.tensor(logits)


QUICK_VARIANTS = ("llama", "qwen2, window")
"""The variants that are tested without the marker `story`."""


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=() if name in QUICK_VARIANTS else pytest.mark.story) for name in FEATURES]
)
def test_exported_model_is_the_same_in_transformers_and_after_an_import(
    tmp_path: Path, data: Path, variant: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    family = variant.partition(",")[0]
    overrides = [f"model.{key}" for key in FEATURES[variant]]
    overrides += [
        f"model.tie_word_embeddings={'true' if family == 'qwen3' else 'false'}",
        "model.initializer_range=0.2",
    ]
    first_export, logits = export_initial_weights(tmp_path, data, "first", *overrides)
    model, report = AutoModelForCausalLM.from_pretrained(first_export, output_loading_info=True)
    assert model.config.model_type == family
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    with torch.no_grad():
        hf_logits = model.eval()(make_tokens()).logits[0]
    assert hf_logits.std() > 0.1
    torch.testing.assert_close(logits, hf_logits, atol=1e-5, rtol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(first_export)
    assert tokenizer.decode(tokenizer("the model").input_ids) == "the model"
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == model.config.eos_token_id

    # Import the export and export it again, with files that a user added beside the tokenizer.
    (first_export / "chat_template.jinja").write_text(
        "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    )
    write_json(first_export / "special_tokens_map.json", {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"})
    write_json(first_export / "generation_config.json", {"eos_token_id": [0, 7], "temperature": 0.6})
    config_file = (first_export / "config.json").read_text()
    assert '"eos_token_id": 0,' in config_file and '"pad_token_id": null' in config_file
    config = write_config(tmp_path, "second")
    replace_in_file(
        config,
        "model: {dim: 32, layers: 2, heads: 4, kv_heads: 2, dropout: 0.1}",
        f"model: {{init_from: {first_export}}}",
    )
    replace_in_file(config, "  tokenizer: {vocab_size: 300, train_bytes: 50000}\n", "")
    run = Run.create(load_config(config))
    run.data_dir.rmdir()
    run.data_dir.symlink_to(data)
    assert run_ranks(1, save_initial_checkpoint, run.path)[0] == logits.tolist()
    export.export_checkpoint(run, tmp_path / "second", None, "fp32")
    names = {path.name for path in first_export.iterdir()}
    assert names == {path.name for path in (tmp_path / "second").iterdir()} and "model.safetensors" in names
    # The token IDs in config.json agree with the added files.
    expected = {**json.loads(config_file), "eos_token_id": [0, 7], "pad_token_id": 0}
    assert json.loads((tmp_path / "second/config.json").read_text()) == expected
    for name in names - {"config.json"}:
        assert (first_export / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "second")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "the run"}], tokenize=False) == "<the run>"


def test_tokenizer_config_has_only_keys_that_transformers_4_also_knows(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    (tmp_path / "tokenizer.json").write_text(train_bpe(["the model"], 300, "<|end|>"))
    original_tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|end|>", extra_special_tokens=["<|end|>"]
    )
    original_tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    compatible_text = export._make_compatible(file.read_text())
    config = json.loads(compatible_text)
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "extra_special_tokens" not in config
    assert config["additional_special_tokens"] == ["<|end|>"]
    assert export._make_compatible(compatible_text) == compatible_text
    file.write_text(compatible_text)
    assert AutoTokenizer.from_pretrained(tmp_path).all_special_tokens == original_tokenizer.all_special_tokens
    assert export._make_compatible("{% if a %}") == "{% if a %}", "text that is not JSON must stay unchanged"


def test_export_splits_and_converts_weights_and_leaves_nothing_if_it_fails(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    folder, _ = export_initial_weights(tmp_path, data, "run")
    run = Run.open(tmp_path / "runs/run")
    weights = load_file(folder / "model.safetensors")
    with pytest.raises(UserError, match="exists already"):
        export.export_checkpoint(run, folder, None, "fp32")
    monkeypatch.setattr(export, "MAX_FILE_BYTES", 20_000)
    export.export_checkpoint(run, tmp_path / "several", "1", "bf16")
    index = json.loads((tmp_path / "several/model.safetensors.index.json").read_bytes())
    files = sorted(path.name for path in (tmp_path / "several").glob("*.safetensors"))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    exported_tensors: dict[str, Any] = {}
    for name in files:
        tensors = load_file(tmp_path / "several" / name)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 20_000
        assert {index["weight_map"][tensor_name] for tensor_name in tensors} == {name}
        exported_tensors |= tensors
    assert exported_tensors.keys() == weights.keys()
    assert all(torch.equal(exported_tensors[name], weights[name].bfloat16()) for name in weights)
    assert json.loads((tmp_path / "several/config.json").read_bytes())["torch_dtype"] == "bfloat16"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in exported_tensors.values())

    # A failed export leaves no files, and no parent folders that it created.
    monkeypatch.setattr(export, "_write_weights_file", lambda *_: 1 / 0)
    paths_before = sorted(tmp_path.iterdir())
    with pytest.raises(ZeroDivisionError):
        export.export_checkpoint(run, tmp_path / "new/parent/out", None, "fp32")
    assert sorted(tmp_path.iterdir()) == paths_before

    # The command fails if the checkpoint is damaged.
    checkpoint = run.checkpoints_dir / catalog.checkpoint_name(1)
    damaged_file = next(checkpoint.glob("*.distcp"))
    content = bytearray(damaged_file.read_bytes())
    content[len(content) // 2] ^= 1
    damaged_file.write_bytes(content)
    command = [sys.executable, str(CODE_ROOT / "submit.py"), "export", "runs/run", "damaged"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == ExitCode.BAD_CHECKPOINT, result.stderr
    assert "damaged" in result.stderr
    assert not (tmp_path / "damaged").exists()

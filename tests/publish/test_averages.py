"""Tests of `export --ema`, `export --average` and `generate --ema`, compared with the tensors of the checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.base.errors import CheckpointError, ExitCode, UserError
from pipeline.checkpoint.catalog import checkpoint_name
from pipeline.publish import publish_stage
from pipeline.publish.export import export_checkpoint
from pipeline.publish.generate import generate_text
from pipeline.run.directory import Run
from tests.publish.test_open_weights import make_run_from_model, save_model_with_tokenizer
from tests.support.errors import raises_error
from tests.support.ranks import run_ranks
from tests.support.tiny import make_run, run_stage_on_rank

FREEZE = 'optimizer.freeze=["model.embed_tokens.*"]'
ADAPTER: dict[str, Any] = {"rank": 4, "alpha": 6, "targets": ["*.q_proj", "*.down_proj"]}


def train_run(folder: Path, name: str, *overrides: str) -> Run:
    """Train a tiny run for 8 steps, with a checkpoint after every second step, and return it."""
    run = make_run(folder, name, ("train.steps=8", "checkpoint={every_steps: 2, keep: 4}", *overrides))
    assert set(run_ranks(2, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    return run


def read_tensors(run: Run, step: int) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint by name."""
    from pipeline.checkpoint.checkpointer import CheckpointReader, iterate_tensors

    checkpoint = run.checkpoints_dir / checkpoint_name(step)
    names = list(CheckpointReader(checkpoint).read_metadata().state_dict_metadata)
    return dict(iterate_tensors(checkpoint, names))


def read_export(folder: Path, file: str = "model.safetensors") -> dict[str, Tensor]:
    """Return the exported tensors by name."""
    from safetensors.torch import load_file

    return dict(load_file(folder / file))


def check_equal(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check that all tensors are bit-identical."""
    assert tensors.keys() == expected.keys()
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, expected[name])] == []


@pytest.fixture(scope="module")
def averaged_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a trained run with moving averages and frozen weights."""
    folder = tmp_path_factory.mktemp("averaged")
    return train_run(folder, "averaged", "train.ema={decay: 0.9}", "parallel.zero=3", FREEZE)


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a trained run without moving averages."""
    return train_run(tmp_path_factory.mktemp("plain"), "plain")


def test_export_and_generate_use_the_moving_average(averaged_run: Run, tmp_path: Path) -> None:
    """Frozen weights have no average."""
    for step in (None, "4"):
        folder = tmp_path / f"export-{step}"
        message = export_checkpoint(averaged_run, folder, step, "fp32", ema=True)
        assert "moving average" in message and checkpoint_name(int(step or 8)) in message
        tensors = read_tensors(averaged_run, int(step or 8))
        names = [name.removeprefix("model.") for name in tensors if name.startswith("model.")]
        averaged_names = {name.removeprefix("ema.") for name in tensors if name.startswith("ema.")}
        assert {*names} - averaged_names == {"model.embed_tokens.weight"}
        expected = {name: tensors.get(f"ema.{name}", tensors[f"model.{name}"]) for name in names}
        check_equal(read_export(folder), expected)
    assert not torch.equal(expected["lm_head.weight"], tensors["model.lm_head.weight"])

    def generate(target: Path, ema: bool) -> str:
        return generate_text(target, "the model", step=None, max_tokens=30, temperature=1.0, top_p=1.0, seed=1, ema=ema)

    text = generate(averaged_run.path, True)
    assert text == generate(tmp_path / "export-None", False) != generate(averaged_run.path, False)
    with pytest.raises(UserError, match=r"--ema.*not a run"):
        generate(tmp_path / "export-None", True)


def test_the_publish_stage_publishes_the_weights_with_their_metrics(averaged_run: Run, tmp_path: Path) -> None:
    assert run_ranks(1, run_stage_on_rank, averaged_run.path, "evaluate") == [ExitCode.DONE]
    averaged_run.apply_overrides([f"publish={{to: {tmp_path}, rules: {{ema_loss: {{max: 100}}}}}}"])
    with raises_error("publish.unknown_metric", "publish.rules.ema_loss", "use loss"):
        publish_stage.check_inputs(averaged_run)
    averaged_run.apply_overrides(["publish.rules={ema_loss: null, loss: {max: 100}}"])
    publish_stage.check_inputs(averaged_run)
    assert run_ranks(1, run_stage_on_rank, averaged_run.path, "publish") == [ExitCode.DONE]
    version = tmp_path / "averaged" / checkpoint_name(8)
    tensors = read_tensors(averaged_run, 8)
    check_equal(
        read_export(version),
        {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")},
    )
    card = (version / "README.md").read_text()
    assert "ema_" not in card and "| bits" in card


def test_an_average_that_does_not_exist_is_an_error(plain_run: Run, averaged_run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--ema.*train\.ema"):
        export_checkpoint(plain_run, tmp_path / "out", None, "fp32", ema=True)
    with pytest.raises(UserError, match=r"--ema.*train\.ema"):
        generate_text(plain_run.path, "a", step=None, max_tokens=1, temperature=0.0, top_p=1.0, seed=1, ema=True)
    with pytest.raises(UserError, match="--ema and --average"):
        export_checkpoint(averaged_run, tmp_path / "out", None, "fp32", ema=True, average=2)
    with pytest.raises(UserError, match=r"--average 5.*4 intact.*2, 4, 6, 8.*checkpoint\.keep"):
        export_checkpoint(plain_run, tmp_path / "out", None, "fp32", average=5)
    with pytest.raises(UserError, match=r"--average 3.*2 intact.* 4 \(2, 4\)"):
        export_checkpoint(plain_run, tmp_path / "out", "4", "fp32", average=3)
    with pytest.raises(UserError, match="--step 5"):
        export_checkpoint(plain_run, tmp_path / "out", "5", "fp32", average=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("step", "count", "steps"), [(None, 4, [2, 4, 6, 8]), (None, 2, [6, 8]), ("6", 3, [2, 4, 6])])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_mean_of_checkpoints_is_rounded_once(
    plain_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    step: str | None, count: int, steps: list[int], dtype: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("pipeline.publish.export._MEAN_BATCH_ELEMENTS", 2_000)  # several batches
    message = export_checkpoint(plain_run, tmp_path / "out", step, dtype, average=count)
    assert f"mean of steps {', '.join(map(str, steps))}" in message
    checkpoints = [read_tensors(plain_run, each) for each in steps]
    torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    expected = {
        name.removeprefix("model."): torch.stack([tensors[name].double() for tensors in checkpoints])
        .mean(0)
        .to(torch_dtype)
        for name in checkpoints[0]
        if name.startswith("model.")
    }
    check_equal(read_export(tmp_path / "out"), expected)


def test_damaged_checkpoints_are_not_averaged(tmp_path: Path) -> None:
    """A wrong size is found before the export, and the checkpoint is left out. A wrong byte is found by its hash."""
    run = train_run(tmp_path, "damaged")
    (tmp_path / "out").mkdir()
    file = next((run.checkpoints_dir / checkpoint_name(6)).glob("*.distcp"))
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert "steps 4, 8 of" in export_checkpoint(run, tmp_path / "out/size", None, "fp32", average=2)
    with pytest.raises(CheckpointError, match="step-00000006"):
        export_checkpoint(run, tmp_path / "out/selected", "6", "fp32", average=2)
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="step-00000006"):
        export_checkpoint(run, tmp_path / "out/byte", None, "fp32", average=2)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["size"]


def test_averages_of_adapters(tmp_path: Path) -> None:
    """The moving average is that of the adapter. The mean of checkpoints is that of the merged weights."""
    source = tmp_path / "model"
    save_model_with_tokenizer(source)
    overrides = (f"adapter={json.dumps(ADAPTER)}", "train.ema={decay: 0.5}", "checkpoint={every_steps: 2, keep: 4}")
    run = make_run_from_model(tmp_path, "adapter", source, 4, *overrides)
    assert run_ranks(1, run_stage_on_rank, run.path, "train") == [ExitCode.DONE]
    export_checkpoint(run, tmp_path / "ema", None, "fp32", ema=True)
    tensors = read_tensors(run, 4)
    averages = {name.removeprefix("ema."): tensor for name, tensor in tensors.items() if name.startswith("ema.")}
    assert {f"model.{name}" for name in averages} == {name for name in tensors if name.startswith("model.")}
    check_equal(
        read_export(tmp_path / "ema", "adapter_model.safetensors"),
        {f"base_model.model.{name}": tensor for name, tensor in averages.items()},
    )

    def merge(adapter: dict[str, Tensor]) -> dict[str, Tensor]:
        merged = read_export(source)
        for name in [name for name in adapter if name.endswith(".lora_A.weight")]:
            layer = name.removesuffix(".lora_A.weight")
            product = adapter[f"{layer}.lora_B.weight"] @ adapter[name]
            merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + product * (ADAPTER["alpha"] / ADAPTER["rank"])
        return merged

    def check_close(folder: Path, expected: dict[str, Tensor]) -> None:
        exported = read_export(folder)
        assert exported.keys() == expected.keys()
        for name, tensor in exported.items():
            torch.testing.assert_close(tensor, expected[name], msg=name)

    export_checkpoint(run, tmp_path / "merged", None, "fp32", ema=True, merge=True)
    check_close(tmp_path / "merged", merge(averages))
    with pytest.raises(UserError, match=r"--average.*--merge"):
        export_checkpoint(run, tmp_path / "mean", None, "fp32", average=2)
    export_checkpoint(run, tmp_path / "mean", None, "fp32", average=2, merge=True)
    merged_by_step: list[dict[str, Any]] = [
        merge({name[6:]: tensor for name, tensor in read_tensors(run, step).items() if name.startswith("model.")})
        for step in (2, 4)
    ]
    mean = {name: (merged_by_step[0][name] + merged_by_step[1][name]) / 2 for name in merged_by_step[0]}
    check_close(tmp_path / "mean", mean)
    assert any((mean[name] - tensor).abs().max() > 1e-4 for name, tensor in merged_by_step[1].items())

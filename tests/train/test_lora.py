"""Tests of LoRA: training equals peft's on every layout, and only adapters are trained and saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode, UserError
from pipeline.base.files import read_jsonl
from pipeline.checkpoint.catalog import checkpoint_name
from pipeline.checkpoint.checkpointer import CheckpointReader
from pipeline.config.sections import AdapterConfig, Config
from pipeline.model.spec import check_targets, list_layers
from pipeline.parallel.mesh import resolve_layout
from pipeline.parallel.traffic import count_rank_traffic
from pipeline.publish.export import export_checkpoint
from pipeline.run.directory import Run
from planning.memory import estimate_memory
from planning.rehearse import rehearse_rank
from planning.timeline import rank_actions
from tests.publish.test_open_weights import (
    FAMILIES,
    make_run_from_model,
    save_model_with_tokenizer,
    save_random_model,
)
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, run_stage_on_rank
from tests.support.tiny_training import VOCAB, make_batches, tiny_config

ADAPTER: dict[str, Any] = {"rank": 4, "alpha": 6, "targets": ["*.q_proj", "*.o_proj", "*.up_proj", "*.down_proj"]}
TRAINING_STEPS = 30
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, {}),
    "zero 1": (2, {"zero": 1}),
    "zero 2": (2, {"zero": 2}),
    "zero 3": (2, {"zero": 3}),
    "tensor": (2, {"tensor": 2}),
    "tensor, no sequence": (2, {"tensor": 2, "sequence": False}),
    "pipeline": (2, {"pipeline": 2}),
    "context": (2, {"context": 2}),
    "tensor, zero 3": (4, {"tensor": 2, "zero": 3}),
    "pipeline, zero 2, recomputed": (4, {"pipeline": 2, "zero": 2, "activation_checkpointing": "full"}),
}

Steps = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def make_config(folder: Path, ranks: int, train: dict[str, Any] | None = None, **parallel: Any) -> Config:
    """Return the config of a run that trains an adapter of the open model in `folder`."""
    return tiny_config(
        ranks, data={"tokenizer": None}, model={"init_from": str(folder)}, adapter=ADAPTER, parallel=parallel,
        train=train or {}, optimizer={"lr": 0.01},
    )  # fmt: skip


def make_language_task(config: Config) -> Any:
    """Return the task of the backend of the config."""
    from pipeline.model.task import DecoderTask
    from pipeline.model.transformers_task import TransformersTask

    return (TransformersTask if config.model.backend == "transformers" else DecoderTask)(config, VOCAB)


def train_adapters(rank_info: RankInfo, path: Path, configs: list[Config]) -> list[tuple[Steps, dict[str, Any]]]:
    """Train with each config on this rank. Return the steps, and the arrays of the state by name."""
    from pipeline.comm import groups
    from pipeline.model.decoder import full_tensor
    from pipeline.model.open_weights import open_initial_weights
    from pipeline.train.engine import Engine

    groups.configure_determinism(configs[0])
    world = groups.join_process_group(rank_info, configs[0])
    results = []
    for config in configs:
        layout = resolve_layout(config, world.size, rank_info.local_world_size)
        task = make_language_task(config)
        source = open_initial_weights(Run(path, config), task, groups.new_control_group())
        engine = Engine(config, layout, world, task, source=source)
        batches = make_batches(config)
        dp_rank = layout.coordinates(rank_info.rank).dp
        steps = []
        for step in range(1, TRAINING_STEPS + 1):
            batch = batches[step % len(batches)].chunk(layout.dp)[dp_rank]
            loss = engine.backward({"tokens": batch}, step)
            norm = engine.clip_gradients(config.optimizer.clip_norm)
            engine.update_weights(norm.item())
            steps.append((loss.item(), norm.item()))
        state = {name: full_tensor(tensor).numpy().copy() for name, tensor in engine.state_dict().items()}
        results.append((steps, state))
    return results


def make_peft_model(model: Any, config: Config) -> Any:
    """Return peft's model with the same adapters and the same initial values."""
    from peft import LoraConfig, get_peft_model

    assert config.adapter is not None
    targets = [pattern.removeprefix("*.") for pattern in config.adapter.targets]
    settings = LoraConfig(r=config.adapter.rank, lora_alpha=config.adapter.alpha, target_modules=targets)
    peft_model = get_peft_model(model, settings)
    task = make_language_task(config)
    decoder = task.build(range(config.model.layers)).to_empty(device="cpu")
    task.init_adapters(decoder, torch.device("cpu"))
    weights = dict(task.saved_weights(decoder))
    for name, parameter in peft_model.named_parameters():
        if parameter.requires_grad:
            own_name = name.removeprefix("base_model.model.").replace(".default", "")
            assert weights[own_name].shape == parameter.shape
            if "lora_B" in name:
                assert not parameter.any() and not weights[own_name].any()
            else:
                bound = parameter.shape[1] ** -0.5
                for sampled in (parameter.abs().max(), weights[own_name].abs().max()):
                    assert 0.5 * bound < sampled <= bound
            parameter.data.copy_(weights.pop(own_name))
    assert not weights
    return peft_model


def train_peft_model(model: Any, config: Config) -> Steps:
    """Train a model in a simple loop."""
    options = config.optimizer
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay
    )
    batches = make_batches(config)
    steps = []
    for step in range(1, TRAINING_STEPS + 1):
        batch = batches[step % len(batches)]
        optimizer.zero_grad()
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, options.clip_norm or 0.0)
        optimizer.step()
        steps.append((loss.item(), norm.item()))
    return steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random model and return its folder."""
    folder = tmp_path_factory.mktemp("model")
    save_random_model(folder, "qwen3", **FAMILIES["qwen3"])
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[Steps, dict[str, Any]]:
    """Train with peft on the config of one rank. Return the result of `train_with_peft`."""
    return train_with_peft(folder, make_config(folder, 1))


def train_with_peft(folder: Path, config: Config) -> tuple[Steps, dict[str, Any]]:
    """Train with peft. Return the steps, and the trained arrays by the names of Sluice."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    peft_model = make_peft_model(model, config)
    steps = train_peft_model(peft_model, config)
    assert steps[-1][0] < 0.98 * steps[0][0]
    trained = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter.detach().numpy()
        for name, parameter in peft_model.named_parameters()
        if parameter.requires_grad
    }
    return steps, trained


def check_equals_peft(results: list[tuple[Steps, dict[str, Any]]], expected: tuple[Steps, dict[str, Any]]) -> None:
    """Compare the results of all ranks for one config with those of peft."""
    expected_steps, expected_weights = expected
    all_names = set()
    for steps, state in results:
        losses, norms = zip(*steps, strict=True)
        expected_losses, expected_norms = zip(*expected_steps, strict=True)
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        assert norms == pytest.approx(expected_norms, rel=1e-3)
        names = {name.removeprefix("model.") for name in state if name.startswith("model.")}
        all_names |= names
        for name in names:
            difference = abs(state[f"model.{name}"] - expected_weights[name]).max()
            assert difference < 1e-3 * abs(expected_weights[name]).max(), name
        optimizer_names = {name for name in state if name.startswith("optimizer.")}
        assert {name.removeprefix("optimizer.").rpartition(".")[0] for name in optimizer_names} <= names
    assert all_names == expected_weights.keys()


def test_thirty_steps_equal_those_of_peft(folder: Path, tmp_path: Path, expected: tuple[Steps, dict[str, Any]]) -> None:
    configs = [make_config(folder, 1), make_config(folder, 1, {"compile": True, "loss_chunk": 64})]
    for result in run_ranks(1, train_adapters, tmp_path, configs)[0]:
        check_equals_peft([result], expected)


def quantize_with_torchao(model: Any, dtype: torch.dtype) -> None:
    """Replace the weights of all linear layers in the blocks of a model of transformers."""
    from torchao.quantization import NF4Tensor

    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            blocks = module.weight.numel() // 64
            quantized = NF4Tensor.from_tensor(module.weight.detach().to(dtype), 64, blocks)
            assert not torch.equal(quantized.to(torch.float32), module.weight)
            module.weight = torch.nn.Parameter(quantized, requires_grad=False)


def test_quantized_weights_equal_those_of_torchao(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_random_model(tmp_path, "qwen3", **FAMILIES["qwen3"])

    def make_quantized_config(ranks: int, train: dict[str, Any] | None = None, **sections: Any) -> Config:
        return make_config(tmp_path, ranks, train).model_copy(
            update={"adapter": AdapterConfig(**ADAPTER, base="nf4"), **sections}
        )

    config = make_quantized_config(1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    quantize_with_torchao(model, torch.float32)
    peft_model = make_peft_model(model, config)
    steps = train_peft_model(peft_model, config)
    names = (name for name, weight in peft_model.named_parameters() if weight.requires_grad)
    weights = {name: peft_model.get_parameter(name).detach().numpy() for name in names}
    expected = (
        steps,
        {name.removeprefix("base_model.model.").replace(".default", ""): weights[name] for name in weights},
    )
    configs = [config, make_quantized_config(1, {"compile": True})]
    for result in run_ranks(1, train_adapters, tmp_path, configs)[0]:
        check_equals_peft([result], expected)
    results = run_ranks(2, train_adapters, tmp_path, [make_quantized_config(2)])
    check_equals_peft([result for (result,) in results], expected)


def train_with_fp32_storage(rank_info: RankInfo, path: Path, configs: list[Config]) -> Any:
    """Train as `train_adapters` does, but store frozen weights in fp32."""
    from pipeline.model import lora

    add_adapters = lora.add_adapters
    lora.add_adapters = lambda model, adapter, dtype=None: add_adapters(model, adapter)
    return train_adapters(rank_info, path, configs)


def test_the_type_of_frozen_weights_changes_no_bit(folder: Path, tmp_path: Path) -> None:
    configs = [make_config(folder, 1, {"precision": "bf16"})]
    ((steps, state),) = run_ranks(1, train_adapters, tmp_path, configs)[0]
    ((expected_steps, expected_state),) = run_ranks(1, train_with_fp32_storage, tmp_path, configs)[0]
    assert steps == expected_steps
    assert all((array == expected_state[name]).all() for name, array in state.items())


def test_the_planned_state_and_traffic_of_adapters_equal_those_of_a_rehearsal(tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama", hidden_size=128, intermediate_size=256, max_position_embeddings=128)
    for precision in ("fp32", "bf16"):
        for parallel in ({}, {"zero": 3}, {"tensor": 2}, {"pipeline": 2}, {"context": 2, "zero": 2}):
            config = tiny_config(
                4, data={"tokenizer": None, "sequence_length": 64}, adapter=ADAPTER, parallel=parallel,
                model={"init_from": str(tmp_path), "dim": 128, "intermediate_size": 256},
                train={"precision": precision, "micro_batch": 4},
            )  # fmt: skip
            layout = resolve_layout(config)
            account = rehearse_rank(config, 0, VOCAB)
            planned = estimate_memory(config, layout, 0, VOCAB, rank_actions(layout)[0], on_cpu=True)
            kinds = account.peak_by_kind()
            assert kinds["weights"] == planned.weights
            assert kinds["optimizer"] == pytest.approx(planned.optimizer, rel=0.01)  # each parameter counts its steps
            assert planned.total == pytest.approx(account.peak, rel=0.2), (precision, parallel)
            sent = sum(size for _, size in account.sent.values())
            planned_sent = sum(size for _, size, _ in count_rank_traffic(config, layout, VOCAB, 0))
            assert sent == pytest.approx(planned_sent, rel=0.06), (precision, parallel)


@pytest.mark.story
@pytest.mark.parametrize("ranks", [2, 4])
def test_thirty_steps_equal_those_of_peft_on_every_layout(
    folder: Path, tmp_path: Path, expected: tuple[Steps, dict[str, Any]], ranks: int
) -> None:
    layouts = [parallel for size, parallel in LAYOUTS.values() if size == ranks]
    results_by_rank = run_ranks(
        ranks, train_adapters, tmp_path, [make_config(folder, ranks, **parallel) for parallel in layouts]
    )
    for results in zip(*results_by_rank, strict=True):
        check_equals_peft(list(results), expected)


def test_a_stopped_run_is_exact_and_its_exports_compute_the_same(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = tmp_path / "model"
    save_model_with_tokenizer(source)
    overrides = (
        f"adapter={json.dumps(ADAPTER)}",
        "train.evaluate_every=4",
        "parallel.zero=3",
        "train.evaluate_sequences=1000",
    )
    uninterrupted = make_run_from_model(tmp_path, "uninterrupted", source, 8, *overrides)
    run = make_run_from_model(tmp_path, "run", source, 4, *overrides)
    for each in (uninterrupted, run):
        assert run_ranks(2, run_stage_on_rank, each.path, "train") == [ExitCode.DONE] * 2
    run.apply_overrides(["train.steps=8"])
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * 2
    assert compute_run_digest(run) == compute_run_digest(uninterrupted)
    tensors = CheckpointReader(run.checkpoints_dir / checkpoint_name(8)).read_metadata().state_dict_metadata
    assert all(".lora_" in name for name in tensors)
    assert len([name for name in tensors if name.startswith("model.")]) == 2 * len(ADAPTER["targets"]) * 4

    run_ranks(1, run_stage_on_rank, run.path, "evaluate")
    result = json.loads((run.evaluation_dir / f"{checkpoint_name(8)}.json").read_text())
    held_out_losses = [line.get("held_out_loss") for line in read_jsonl(run.metrics_file)]
    assert result["loss"] == pytest.approx(held_out_losses[7], rel=1e-6) != held_out_losses[3]

    export_checkpoint(run, tmp_path / "adapter", None, "fp32")
    names = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    export_checkpoint(run, tmp_path / "merged", None, "fp32", merge=True)
    tokens_BT = torch.arange(32)[None] * 7 % 256
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    prompt = tokenizer("the model", return_tensors="pt")["input_ids"]
    own_model = run_ranks(1, compute_logits_on_rank, run.path, tokens_BT.tolist(), prompt.tolist())[0]
    logits_TV, own_text = torch.tensor(own_model[0]), own_model[1]
    assert AutoModelForCausalLM.from_pretrained(source)(tokens_BT).logits[0].sub(logits_TV).abs().max() > 0.01
    for model in (
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source), tmp_path / "adapter"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged"),
    ):
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(tokens_BT).logits[0], logits_TV, atol=1e-4, rtol=1e-5)
            new_ids = model.generate(input_ids=prompt, max_new_tokens=8, do_sample=False)[0]
        assert tokenizer.decode(new_ids, skip_special_tokens=True) == own_text
    with pytest.raises(UserError, match="--merge"):
        plain_run = make_run_from_model(tmp_path, "plain", source, 1)
        export_checkpoint(plain_run, tmp_path / "plain-out", None, "fp32", merge=True)


def compute_logits_on_rank(_: RankInfo, path: Path, tokens_BT: Any, prompt: Any) -> tuple[Any, str]:
    """Return the logits of the newest checkpoint as a list, and the text that it generates from a prompt."""
    from pipeline.publish.generate import _load_run, generate_text

    model = _load_run(path, "the model", None, 32)[0]
    with torch.no_grad():
        logits = model(torch.tensor(tokens_BT))[0].tolist()
    return logits, generate_text(path, "the model", step=None, max_tokens=8, temperature=0.0, top_p=1.0, seed=0)


def count_weight_bytes_on_rank(rank_info: RankInfo, path: Path, config: Config) -> int:
    """Return the bytes of all weights of the engine."""
    from pipeline.comm import groups
    from pipeline.model.open_weights import open_initial_weights
    from pipeline.train.engine import Engine

    groups.configure_determinism(config)
    world = groups.join_process_group(rank_info, config)
    task = make_language_task(config)
    source = open_initial_weights(Run(path, config), task, groups.new_control_group())
    engine = Engine(config, resolve_layout(config), world, task, source=source)

    def count(weight: Any) -> int:
        """Return the bytes of a weight, or those of the tensors of a quantized weight."""
        if not hasattr(weight, "quantized_data"):
            return int(weight.nbytes)
        return sum(int(getattr(weight, name).nbytes) for name in weight.__tensor_flatten__()[0])

    return sum(count(weight.detach()) for weight in engine.model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_planned_bytes_of_quantized_weights_are_right(tmp_path: Path, precision: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
    save_random_model(tmp_path, "llama", **sizes)
    config = tiny_config(
        1, data={"tokenizer": None}, adapter=ADAPTER | {"base": "nf4"}, train={"precision": precision},
        model={"init_from": str(tmp_path), "dim": 128, "intermediate_size": 256, "kv_heads": 4},
    )  # fmt: skip
    planned = estimate_memory(config, resolve_layout(config), 0, VOCAB, [], on_cpu=True).weights
    actual = run_ranks(1, count_weight_bytes_on_rank, tmp_path, config)[0]
    assert planned == pytest.approx(actual, rel=0.005)
    assert (
        planned
        < 0.5
        * estimate_memory(
            config.model_copy(update={"adapter": AdapterConfig(**ADAPTER)}), resolve_layout(config), 0, VOCAB, [], True
        ).weights
    )


@pytest.mark.parametrize("backend", ["decoder", pytest.param("transformers", marks=pytest.mark.long)])
def test_a_quantized_run_resumes_to_the_bit_and_equals_its_merged_export(tmp_path: Path, backend: str) -> None:
    from transformers import AutoModelForCausalLM

    source = tmp_path / "model"
    save_model_with_tokenizer(source)
    overrides = (
        f"adapter={json.dumps(ADAPTER | {'base': 'nf4'})}", "train.precision=bf16", "train.evaluate_every=4",
        "train.evaluate_sequences=1000", f"model.backend={backend}",
    )  # fmt: skip
    undisturbed = make_run_from_model(tmp_path, "undisturbed", source, 8, *overrides)
    run = make_run_from_model(tmp_path, "run", source, 4, *overrides)
    assert run_ranks(2, run_stage_on_rank, undisturbed.path, "train") == [ExitCode.DONE] * 2
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * 2
    run.apply_overrides(["train.steps=8"])
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * 2
    assert compute_run_digest(run) == compute_run_digest(undisturbed)
    run_ranks(1, run_stage_on_rank, run.path, "evaluate")
    result = json.loads((run.evaluation_dir / f"{checkpoint_name(8)}.json").read_text())
    held_out_losses = [line.get("held_out_loss") for line in read_jsonl(run.metrics_file)]
    assert result["loss"] == pytest.approx(held_out_losses[7], rel=1e-5) != held_out_losses[3]

    export_checkpoint(run, tmp_path / "merged", None, "fp32", merge=True)
    tokens_BT = torch.arange(32)[None] * 7 % 256
    logits, _ = run_ranks(1, compute_logits_on_rank, run.path, tokens_BT.tolist(), [[1]])[0]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens_BT).logits[0]
    torch.testing.assert_close(merged, torch.tensor(logits), atol=1e-4, rtol=1e-5)
    assert AutoModelForCausalLM.from_pretrained(source)(tokens_BT).logits[0].sub(merged).abs().max() > 0.01


@pytest.mark.parametrize(
    "parallel", [{"zero": 1}, {"zero": 3}, {"tensor": 2}, {"pipeline": 2}, {"context": 2}, {"zero": 2, "offload": True}]
)
def test_quantized_weights_cannot_be_sharded(folder: Path, parallel: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"adapter\.base nf4 needs data parallelism.*parallel\.{next(iter(parallel))}"):
        tiny_config(
            2, data={"tokenizer": None}, model={"init_from": str(folder)}, parallel=parallel,
            adapter=ADAPTER | {"base": "nf4"},
        )  # fmt: skip


def test_a_changed_or_missing_model_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "model"
    save_model_with_tokenizer(source)
    run = make_run_from_model(tmp_path, "run", source, 2, f"adapter={json.dumps(ADAPTER)}")
    assert run_ranks(1, run_stage_on_rank, run.path, "train") == [ExitCode.DONE]
    content = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(content)  # another modification time
    run.apply_overrides(["train.steps=4"])
    for stage in ("train", "evaluate"):
        with pytest.raises(AssertionError, match=r"model\.folder_changed|has changed since"):
            run_ranks(1, run_stage_on_rank, run.path, stage)
    shutil.rmtree(source)
    with pytest.raises(AssertionError, match=r"config\.json"):
        run_ranks(1, run_stage_on_rank, run.path, "train")


@pytest.mark.parametrize(
    ("section", "values", "text"),
    [
        ("adapter", {"targets": ["*.q_proj", "*.c_attn"]}, r"adapter.targets: '\*.c_attn' matches no linear layer"),
        ("optimizer", {"freeze": ["*norm*"]}, r"optimizer\.freeze cannot be combined with adapter"),
        ("train", {"precision": "fp8"}, "fp8"),
    ],
)
def test_settings_without_effect_are_errors(folder: Path, section: str, values: dict[str, Any], text: str) -> None:
    sections: dict[str, dict[str, Any]] = {
        "data": {"tokenizer": None},
        "model": {"init_from": str(folder)},
        "adapter": dict(ADAPTER),
    }
    sections[section] = sections.get(section, {}) | values
    with pytest.raises(UserError, match=text):
        check_targets((config := tiny_config(1, **sections)).adapter or AdapterConfig(), list_layers(config.model))
    with pytest.raises(UserError, match=r"adapter needs trained weights: set model\.init_from"):
        tiny_config(1, adapter=ADAPTER)

"""Tests of models that transformers builds: training equals a plain loop, and exports keep all names and bits."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_prep.tokenizer import train_bpe
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode, UserError
from pipeline.base.files import write_json
from pipeline.config.hugging_face import ModelFolderError, read_model_section
from pipeline.config.read import parse_config
from pipeline.config.sections import Config
from pipeline.model.transformers_task import check_config
from pipeline.parallel.mesh import resolve_layout
from pipeline.publish.export import export_checkpoint
from pipeline.publish.generate import generate_text
from pipeline.run.directory import Run
from tests.publish.test_open_weights import make_run_from_model, save_random_model, train_transformers_model
from tests.support.ranks import run_ranks
from tests.support.tiny import WORDS, compute_run_digest, run_stage_on_rank
from tests.support.tiny_training import STEPS, VOCAB, make_batches
from tests.train.test_lora import check_equals_peft, train_adapters, train_with_peft

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_neox": {"tie_word_embeddings": False},
    "olmo2": {},
    "phi3": {"pad_token_id": 0},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "smollm3": {"pad_token_id": 0},
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "zero 1": {"zero": 1},
    "zero 2, recomputed": {"zero": 2, "activation_checkpointing": "full"},
    "zero 3": {"zero": 3},
    "zero 3, selective": {"zero": 3, "activation_checkpointing": "selective"},
}
TOKEN_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 0}

Steps = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def make_config(folder: Path, ranks: int, parallel: dict[str, Any] | None = None, **sections: Any) -> Config:
    """Return the config of a run that starts from the model in `folder`."""
    values: dict[str, dict[str, Any]] = {
        "run": {"name": "tiny", "seed": 5},
        "data": {"sequence_length": 16},
        "model": {"init_from": str(folder)},
        "train": {"steps": STEPS, "global_batch": 16, "micro_batch": 2},
        "optimizer": {"lr": 2e-3, "clip_norm": 0.1},
        "parallel": parallel or {},
        "stages": {"train": {"tasks_per_node": ranks}},
    }
    return parse_config(values | {name: values.get(name, {}) | keys for name, keys in sections.items()}, "tiny")


def save_model(folder: Path, family: str, **values: Any) -> Any:
    """Save a random model of the family and return it."""
    return save_random_model(folder, family, **{**FAMILIES[family], **TOKEN_IDS, **values})


def train_on_rank(rank_info: RankInfo, path: Path, configs: list[Config]) -> list[Steps]:
    """Train with each config on this rank and return the steps."""
    from pipeline.comm import groups
    from pipeline.model.open_weights import open_initial_weights
    from pipeline.model.transformers_task import TransformersTask
    from pipeline.train.engine import Engine

    groups.configure_determinism(configs[0])
    world = groups.join_process_group(rank_info, configs[0])
    results = []
    for config in configs:
        layout = resolve_layout(config, world.size, rank_info.local_world_size)
        task = TransformersTask(config, VOCAB, eos_id=3)
        source = open_initial_weights(Run(path, config), task, groups.new_control_group())
        engine = Engine(config, layout, world, task, source=source)
        dp_rank = layout.coordinates(rank_info.rank).dp
        steps = []
        for step, batch in enumerate(make_batches(config)[:STEPS], start=1):
            loss = engine.backward({"tokens": batch.chunk(layout.dp)[dp_rank]}, step)
            norm = engine.clip_gradients(config.optimizer.clip_norm)
            engine.update_weights(norm.item())
            steps.append((loss.item(), norm.item()))
        results.append(steps)
    return results


def check_equal_steps(
    steps: list[tuple[float, float]], expected: list[tuple[float, float]], tolerance: float, case: str = ""
) -> None:
    """Compare the losses of steps with a relative tolerance, and the gradient norms with a larger one.

    The last digits of a norm depend on the CPU, because the plain loop adds the squares in another order.
    """
    (losses, norms), (expected_losses, expected_norms) = zip(*steps, strict=True), zip(*expected, strict=True)
    assert losses == pytest.approx(expected_losses, rel=tolerance), case
    assert norms == pytest.approx(expected_norms, rel=5 * tolerance), case


@pytest.mark.parametrize(
    "family",
    [family if family == "gemma3_text" else pytest.param(family, marks=pytest.mark.story) for family in FAMILIES],
)
def test_ten_steps_equal_those_of_a_plain_loop(tmp_path: Path, family: str) -> None:
    folder = tmp_path / family
    model = save_model(folder, family)
    config = make_config(folder, 1)
    assert config.model.backend == "transformers" and type(model).__name__ in config.model.describe()
    expected, _ = train_transformers_model(model, config)
    assert abs(expected[-1][0] - expected[0][0]) > 0.01
    ((steps,),) = run_ranks(1, train_on_rank, tmp_path, [config])
    check_equal_steps(steps, expected, 1e-6)
    configs = [make_config(folder, 2, parallel) for parallel in LAYOUTS.values()]
    for result in run_ranks(2, train_on_rank, tmp_path, configs):
        for layout, steps in zip(LAYOUTS, result, strict=True):
            check_equal_steps(steps, expected, 2e-6, layout)


def train_on_separate_documents(model: Any, config: Config) -> list[float]:
    """Train in a plain loop that computes each document alone. A document ends with the token 3. Return the losses."""
    options = config.optimizer
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps)
    losses = []
    for batch in make_batches(config)[:STEPS]:
        optimizer.zero_grad()
        total, count = torch.zeros(()), 0
        for tokens in batch:
            ends = [int(end) + 1 for end in (tokens[:-1] == 3).nonzero()[:, 0]]
            bounds = sorted({0, *ends, len(tokens) - 1})
            for start, end in itertools.pairwise(bounds):
                targets = tokens[start + 1 : end + 1].clone()
                targets[tokens[start:end] == 3] = -100  # the first token of a document is not predicted
                logits = model(tokens[None, start:end]).logits[0]
                total = total + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
                count += int((targets != -100).sum())
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm or 0.0)
        optimizer.step()
        losses.append(float(total) / count)
    return losses


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe"])
def test_documents_are_separated(tmp_path: Path, family: str) -> None:
    model = save_model(tmp_path / family, family)
    config = make_config(tmp_path / family, 1, data={"document_mask": True})
    expected = train_on_separate_documents(model, config)
    ((steps,),) = run_ranks(1, train_on_rank, tmp_path, [config])
    assert [loss for loss, _ in steps] == pytest.approx(expected, rel=2e-6)


def save_model_with_tokenizer(folder: Path, family: str, **values: Any) -> Any:
    """Save a random model whose tokenizer knows the words of the test corpus. Return the model."""
    model = save_model(folder, family, vocab_size=320, **values)
    (folder / "tokenizer.json").write_text(train_bpe([" ".join(WORDS)], 300, "<|end|>"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|end|>"})
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_without_changed_weights_equals_the_folder(tmp_path: Path, family: str) -> None:
    folder = tmp_path / "folder"
    save_model_with_tokenizer(folder, family)
    run = make_run_from_model(tmp_path, "run", folder, 1, "optimizer.lr=1e-30", "optimizer.weight_decay=0")
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * 2
    export_checkpoint(run, tmp_path / "export", None, "fp32")
    original, exported = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "export"))
    assert exported.keys() == original.keys()
    for name, values in original.items():
        assert torch.equal(exported[name], values), name
    configs = [json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "export")]
    assert configs[1] == configs[0]


@pytest.mark.parametrize(
    "family",
    [family if family == "gemma3_text" else pytest.param(family, marks=pytest.mark.long) for family in FAMILIES],
)
def test_stop_resume_evaluate_generate_and_export(tmp_path: Path, family: str) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "folder"
    save_model_with_tokenizer(folder, family)
    overrides = ("parallel.zero=3", "data.document_mask=true", "train.precision=bf16")
    uninterrupted_run = make_run_from_model(tmp_path, "uninterrupted", folder, 8, *overrides)
    assert run_ranks(2, run_stage_on_rank, uninterrupted_run.path, "train") == [ExitCode.DONE] * 2
    run = make_run_from_model(tmp_path, "run", folder, 4, *overrides)
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * 2
    shutil.rmtree(folder)  # A resumed run does not need it.
    run = Run.open(run.path)
    run.apply_overrides(["train.steps=8"])
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * 2
    assert compute_run_digest(run) == compute_run_digest(uninterrupted_run)
    assert run_ranks(2, run_stage_on_rank, run.path, "evaluate") == [ExitCode.DONE] * 2
    export_checkpoint(run, tmp_path / "export", None, "fp32")
    options: dict[str, Any] = {"step": None, "max_tokens": 12, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    text = generate_text(run.path, "the model", **options)
    assert generate_text(tmp_path / "export", "the model", **options) == text
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(tmp_path / "export/tokenizer.json"))
    prompt = torch.tensor([tokenizer.encode("the model").ids])
    ids = model.generate(prompt, do_sample=False, max_new_tokens=12)
    assert tokenizer.decode(ids[0].tolist()) == text


@pytest.mark.story
def test_adapters_equal_those_of_peft(tmp_path: Path) -> None:
    save_model(tmp_path / "folder", "gemma3_text")
    adapter = {"rank": 4, "alpha": 6, "targets": ["*.q_proj", "*.down_proj"]}
    config = make_config(tmp_path / "folder", 1, adapter=adapter)
    expected = train_with_peft(tmp_path / "folder", config)
    check_equals_peft(run_ranks(1, train_adapters, tmp_path, [config])[0], expected)
    sharded_config = make_config(tmp_path / "folder", 2, {"zero": 3}, adapter=adapter)
    check_equals_peft([results[0] for results in run_ranks(2, train_adapters, tmp_path, [sharded_config])], expected)


def test_an_adapter_is_exported_alone_and_merged(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "folder"
    save_model_with_tokenizer(folder, "smollm3")
    run = make_run_from_model(tmp_path, "run", folder, 4, "adapter={rank: 2, targets: ['*.v_proj', '*.up_proj']}")
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * 2
    assert run_ranks(1, run_stage_on_rank, run.path, "evaluate") == [ExitCode.DONE]
    export_checkpoint(run, tmp_path / "adapter", None, "fp32")
    export_checkpoint(run, tmp_path / "merged", None, "fp32", merge=True)
    tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    base, merged = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (folder, tmp_path / "merged")
    )
    base_logits = base(tokens).logits
    adapted_logits = PeftModel.from_pretrained(base, tmp_path / "adapter")(tokens).logits
    assert not torch.allclose(adapted_logits, base_logits, rtol=1e-3)
    assert torch.allclose(merged(tokens).logits, adapted_logits, rtol=1e-5, atol=1e-5)
    options: dict[str, Any] = {"step": None, "max_tokens": 8, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    text = generate_text(run.path, "the model", **options)
    assert generate_text(tmp_path / "merged", "the model", **options) == text


def test_several_types_of_weights_are_read_exactly(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    save_model_with_tokenizer(folder, "olmo2")
    tensors = load_file(folder / "model.safetensors")
    mixed = {name: values if "norm" in name else values.bfloat16() for name, values in tensors.items()}
    save_file(mixed, folder / "model.safetensors", {"format": "pt"})
    run = make_run_from_model(tmp_path, "run", folder, 1, "optimizer.lr=1e-30", "optimizer.weight_decay=0")
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * 2
    export_checkpoint(run, tmp_path / "export", None, "fp32")
    exported = load_file(tmp_path / "export/model.safetensors")
    assert all(torch.equal(exported[name], values.float()) for name, values in mixed.items())


@pytest.mark.parametrize(
    ("parallel", "key"),
    [({"tensor": 2}, "parallel.tensor"), ({"pipeline": 2}, "parallel.pipeline"), ({"context": 2}, "parallel.context")],
)
def test_layouts_that_split_the_model_are_rejected(tmp_path: Path, parallel: dict[str, int], key: str) -> None:
    save_model(tmp_path, "phi3")
    with pytest.raises(UserError, match=rf"{key} \(2\).*model.backend transformers"):
        make_config(tmp_path, 2, parallel)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"loss_chunk": 64}}, "train.loss_chunk"),
        ({"train": {"precision": "fp8"}}, "train.precision fp8"),
        ({"model": {"dim": 64}}, "dim"),
        ({"model": {"backend": "decoder"}}, "model_type"),
        ({"model": {"layers": 3}}, "model.layers is 3, but 4"),
        ({"model": {"backend": "transformers", "init_from": None}}, "backend transformers needs init_from"),
    ],
)
def test_keys_without_an_effect_are_rejected(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    save_model(tmp_path, "phi3")
    with pytest.raises(UserError, match=message):
        make_config(tmp_path, 1, **sections)


def test_a_family_of_the_decoder_can_also_be_built_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_random_model(tmp_path, "llama")
    assert make_config(tmp_path, 1).model.other_model_key is None
    config = make_config(tmp_path, 1, model={"backend": "transformers"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected, _ = train_transformers_model(model, config)
    ((steps,),) = run_ranks(1, train_on_rank, tmp_path, [config])
    check_equal_steps(steps, expected, 1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "unknown"}, 'model_type "unknown" is not supported'),
        ({"model_type": "unknown", "auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "is not supported"),
        ({"model_type": 3}, "model_type 3"),
        ({"model_type": "gemma3", "architectures": None}, "Gemma3ForConditionalGeneration.*of text"),
        ({"architectures": ["Phi3ForSequenceClassification"]}, "of text"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"output_router_logits": True}, "output_router_logits"),
        ({"transformers_weights": "adapter_model.bin"}, "transformers_weights"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers"),
        ({"vocab_size": -1}, "vocab_size"),
    ],
)
def test_unsupported_folders_are_rejected(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_model(tmp_path, "phi3")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    content = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", content | changes)
    with pytest.raises(ModelFolderError, match=message):
        read_model_section(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_code_in_the_folder_is_not_executed(tmp_path: Path) -> None:
    save_model(tmp_path, "phi3")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    content = json.loads((tmp_path / "config.json").read_text())
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    write_json(tmp_path / "config.json", content | {"auto_map": auto_map})
    config = make_config(tmp_path, 1)
    ((steps,),) = run_ranks(1, train_on_rank, tmp_path, [config])
    assert len(steps) == STEPS and not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("family", "sections", "message"),
    [
        ("bert", {}, "a token reads later tokens"),
        ("falcon_mamba", {"data": {"document_mask": True}}, "data.document_mask: FalconMambaForCausalLM"),
    ],
)
def test_models_that_mix_tokens_wrongly_are_rejected(
    tmp_path: Path, family: str, sections: dict[str, Any], message: str
) -> None:
    save_random_model(tmp_path, family, **TOKEN_IDS)
    with pytest.raises(AssertionError, match=message):
        run_ranks(1, train_on_rank, tmp_path, [make_config(tmp_path, 1, **sections)])


@pytest.mark.parametrize("change", ["index", "adapter", "attention", "table"])
def test_only_the_checked_weight_files_are_read(tmp_path: Path, change: str) -> None:
    """Files that Sluice does not hash, implementations from the Hub and stored tables have no effect."""
    save_model(tmp_path, "olmo2")
    config = make_config(tmp_path, 1)
    ((expected,),) = run_ranks(1, train_on_rank, tmp_path, [config])
    tensors = load_file(tmp_path / "model.safetensors")
    if change == "index":  # Sluice reads the files of the index. transformers would read model.safetensors.
        save_file(tensors, tmp_path / "part.safetensors", {"format": "pt"})
        write_json(
            tmp_path / "model.safetensors.index.json",
            {"metadata": {}, "weight_map": dict.fromkeys(tensors, "part.safetensors")},
        )
        wrong = {name: torch.zeros_like(values) for name, values in tensors.items()}
        save_file(wrong, tmp_path / "model.safetensors", {"format": "pt"})
    elif change == "adapter":
        write_json(tmp_path / "adapter_config.json", {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]})
    elif change == "attention":
        content = json.loads((tmp_path / "config.json").read_text())
        write_json(tmp_path / "config.json", content | {"attn_implementation": "some/kernel"})
    else:
        table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
        save_file(tensors | table, tmp_path / "model.safetensors", {"format": "pt"})
    ((steps,),) = run_ranks(1, train_on_rank, tmp_path, [make_config(tmp_path, 1)])
    assert steps == expected


def test_an_output_layer_that_differs_from_the_tied_embedding_is_an_error(tmp_path: Path) -> None:
    save_model(tmp_path, "olmo2", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = 2 * tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(AssertionError, match=r"(?s)rank 1:.*set tie_word_embeddings to false"):
        run_ranks(2, train_on_rank, tmp_path, [make_config(tmp_path, 2)])


def test_weights_that_transformers_freezes_are_not_trained(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1}
    save_random_model(tmp_path, "ernie4_5_moe", **TOKEN_IDS, **sizes)
    configs = [make_config(tmp_path, 2), make_config(tmp_path, 2, {"zero": 3})]
    for ddp_steps, zero_steps in run_ranks(2, train_on_rank, tmp_path, configs):
        assert ddp_steps == [pytest.approx(step, rel=2e-6) for step in zero_steps]


def test_weights_without_gradients_are_named(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 32,
    }  # fmt: skip
    save_random_model(tmp_path, "bart", **TOKEN_IDS, **sizes)
    with pytest.raises(AssertionError, match=r"does not use .* weights, such as .*encoder_attn.*optimizer\.freeze"):
        run_ranks(2, train_on_rank, tmp_path, [make_config(tmp_path, 2)])
    frozen = make_config(tmp_path, 2, optimizer={"freeze": ["*encoder_attn*"]})
    assert all(len(steps) == STEPS for (steps,) in run_ranks(2, train_on_rank, tmp_path, [frozen]))


def test_models_without_a_cache_generate(tmp_path: Path) -> None:
    save_model_with_tokenizer(tmp_path / "model", "olmo2")
    tokenizer_files = ("tokenizer.json", "tokenizer_config.json")
    save_random_model(tmp_path / "mamba", "mamba", **{**TOKEN_IDS, "vocab_size": 320})
    for name in tokenizer_files:
        shutil.copyfile(tmp_path / "model" / name, tmp_path / "mamba" / name)
    options: dict[str, Any] = {"step": None, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    longer = generate_text(tmp_path / "mamba", "the model", max_tokens=6, **options)
    assert longer.startswith(generate_text(tmp_path / "mamba", "the model", max_tokens=3, **options))


def test_quantized_experts_are_rejected(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3_moe")
    model = make_config(tmp_path, 1).model.model_dump_json()
    with pytest.raises(UserError, match=r"adapter\.base nf4 does not quantize .*experts"):
        check_config(model, json.dumps({"targets": ["*.q_proj"], "base": "nf4"}))


def test_patterns_are_checked_before_submission(tmp_path: Path) -> None:
    from pipeline.train.optimizer import check_freeze

    save_model(tmp_path, "gpt_neox")
    model = make_config(tmp_path, 1).model.model_dump_json()
    check_config(model, "null")
    check_config(model, json.dumps({"targets": ["*.query_key_value"]}))
    with pytest.raises(UserError, match=r"adapter.targets: '\*.q_proj' matches no linear layer"):
        check_config(model, json.dumps({"targets": ["*.q_proj"]}))
    check_freeze('["gpt_neox.embed_in.*"]', model)
    with pytest.raises(UserError, match="matches no parameter"):
        check_freeze('["model.embed_tokens.*"]', model)


@pytest.mark.parametrize("problem", ["missing", "unexpected", "shape"])
def test_tensors_that_do_not_match_are_reported_by_all_ranks(tmp_path: Path, problem: str) -> None:
    save_model(tmp_path, "olmo2")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if problem == "missing":
        del tensors[name]
    elif problem == "unexpected":
        tensors[name + "_2"] = torch.zeros(3)
    else:
        tensors[name] = torch.zeros(3, 3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(AssertionError, match=r"(?s)rank 1:.*UserError.*layers.1.mlp.up_proj.weight"):
        run_ranks(2, train_on_rank, tmp_path, [make_config(tmp_path, 2)])

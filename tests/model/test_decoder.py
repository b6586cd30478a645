"""Tests of the decoder, its initial weights, its loss and its number of FLOPs.

The decoder is compared with the models of transformers that have the same architecture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pipeline.config.hugging_face import build_config_json
from pipeline.config.sections import ModelConfig, ModelMetadata
from pipeline.config.types import RopeScaling
from pipeline.model.decoder import Decoder, cross_entropy_sum, init_weights
from pipeline.model.spec import training_flops_per_token

VOCAB = 97
LENGTH = 24
MODEL_CONFIGS = {
    "grouped": ModelConfig(dim=32, layers=2, heads=4, kv_heads=2),
    "one kv head, wide heads": ModelConfig(dim=32, layers=2, heads=4, kv_heads=1, head_dim=16, rope_theta=500.0),
    "plain": ModelConfig(dim=32, layers=2, heads=4, rms_norm_eps=1e-3, intermediate_size=40),
    "tied": ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, tie_word_embeddings=True),
    "llama 3.1": ModelConfig(
        dim=32,
        layers=2,
        heads=4,
        kv_heads=2,
        rope_theta=500.0,
        rope_scaling=RopeScaling(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "stretched, biases": ModelConfig(
        dim=32, layers=2, heads=4, attention_bias="all", rope_scaling=RopeScaling(rope_type="linear", factor=2.0)
    ),
    "yarn": ModelConfig(
        dim=32,
        layers=2,
        heads=4,
        rope_theta=500.0,
        rope_scaling=RopeScaling(rope_type="yarn", factor=3.0, original_max_position_embeddings=16),
    ),
    "yarn, all keys": ModelConfig(
        dim=128,
        layers=1,
        heads=4,
        rope_scaling=RopeScaling(
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            beta_fast=8.0,
            beta_slow=0.5,
            attention_factor=1.2,
            truncate=False,
        ),
    ),
    "mistral": ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, head_dim=16, sliding_window=LENGTH),
    "mistral, short window": ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, head_dim=16, sliding_window=7),
    "qwen2": ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, attention_bias="qkv"),
    "qwen2, window from the second block on": ModelConfig(
        dim=32, layers=3, heads=4, kv_heads=2, attention_bias="qkv", sliding_window=5, max_window_layers=1
    ),
    "qwen3": ModelConfig(
        dim=32, layers=2, heads=4, kv_heads=2, head_dim=16, qk_norm=True, attention_bias="all", tie_word_embeddings=True
    ),
}


@pytest.fixture(autouse=True)
def use_one_thread() -> Iterator[None]:
    """Let torch compute with one thread, because more threads are slower for such small tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build_decoder(config: ModelConfig, seed: int = 1, std: float = 0.02) -> Decoder:
    """Return a decoder with initial weights; `std` is their standard deviation."""
    model = Decoder(config, VOCAB, LENGTH)
    init_weights(model, seed, std)
    return model


def sample_tokens(seed: int, batch: int = 3, length: int = LENGTH) -> torch.Tensor:
    """Return random token IDs of shape (batch, length)."""
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def build_transformers_model(config: ModelConfig) -> PreTrainedModel:
    """Return the model that transformers builds from the exported config.json of a model with this config."""
    transformers_config = AutoConfig.for_model(
        **build_config_json(config, ModelMetadata(), VOCAB, LENGTH, 0, "float32")
    )
    return AutoModelForCausalLM.from_config(transformers_config, attn_implementation="eager")


@pytest.mark.parametrize("name", MODEL_CONFIGS)
def test_names_logits_and_gradients_equal_those_of_transformers(name: str) -> None:
    config = MODEL_CONFIGS[name]
    model = build_decoder(config, std=0.2)
    transformers_model = build_transformers_model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):  # train a little, so that the weights are not the initial ones
        batch = sample_tokens(step)
        optimizer.zero_grad()
        (cross_entropy_sum(model(batch[:, :-1]), batch[:, 1:]) / batch[:, 1:].numel()).backward()
        optimizer.step()
    assert list(model.state_dict()) == list(transformers_model.state_dict())
    transformers_model.load_state_dict(model.state_dict())
    batch = sample_tokens(99)
    logits_BTV = model(batch)
    expected_BTV = transformers_model(batch).logits
    assert expected_BTV.std() > 0.3, "the logits are too small for a meaningful comparison"
    torch.testing.assert_close(logits_BTV, expected_BTV, atol=1e-5, rtol=1e-5)
    model.zero_grad()
    transformers_model.zero_grad()
    (cross_entropy_sum(logits_BTV[:, :-1], batch[:, 1:]) / batch[:, 1:].numel()).backward()
    transformers_model(batch, labels=batch).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert list(gradients) == [n for n, _ in transformers_model.named_parameters()]
    for parameter_name, parameter in transformers_model.named_parameters():
        torch.testing.assert_close(gradients[parameter_name], parameter.grad, atol=1e-6, rtol=1e-4)


def test_a_changed_token_changes_the_logits_of_its_position_and_later_ones_only() -> None:
    model = build_decoder(MODEL_CONFIGS["grouped"], std=0.2)
    tokens = sample_tokens(1)
    changed_tokens = tokens.clone()
    changed_tokens[:, 10] = (changed_tokens[:, 10] + 1) % VOCAB
    logits = model(tokens)
    changed_logits = model(changed_tokens)
    assert torch.equal(logits[:, :10], changed_logits[:, :10])
    assert not torch.isclose(logits[:, 10:], changed_logits[:, 10:]).all(dim=-1).any()


def test_dropout_is_active_in_training_mode_only() -> None:
    config = ModelConfig(dim=32, layers=2, heads=4, dropout=0.5)
    model = build_decoder(config)
    batch = sample_tokens(1)
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))
    without_dropout = build_decoder(ModelConfig(dim=32, layers=2, heads=4))
    assert torch.equal(model(batch), without_dropout(batch))


@pytest.mark.parametrize("name", ["grouped", "tied", "llama 3.1", "stretched, biases", "yarn"])
def test_a_model_built_on_the_meta_device_has_the_same_initial_weights(name: str) -> None:
    """`init_weights` neither uses nor changes the global random state."""
    config = MODEL_CONFIGS[name]
    torch.manual_seed(1)
    expected = build_decoder(config)
    torch.manual_seed(2)
    with torch.device("meta"):
        model = Decoder(config, VOCAB, LENGTH)
    model.to_empty(device="cpu")
    for value in [*model.parameters(), *model.buffers()]:
        value.data.fill_(math.nan)
    state = torch.get_rng_state()
    init_weights(model, 1, 0.02)
    assert torch.equal(state, torch.get_rng_state())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in expected.named_parameters()]
    for parameter, expected_parameter in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, expected_parameter)
    assert torch.equal(model(sample_tokens(1)), expected(sample_tokens(1))), "the rotary tables differ"
    assert ("lm_head.weight" not in dict(model.named_parameters())) == config.tie_word_embeddings


def test_initial_weights_depend_on_seed_and_parameter_name_only() -> None:
    two_layer_model = build_decoder(ModelConfig(dim=64, layers=2, heads=4))
    eight_layer_model = build_decoder(ModelConfig(dim=64, layers=8, heads=4))
    eight_layer_weights = dict(eight_layer_model.named_parameters())
    for name, parameter in two_layer_model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            # Their std is std / sqrt(2 * layers), which is half as large with 4 times as many layers.
            torch.testing.assert_close(parameter, eight_layer_weights[name] * 2)
            assert parameter.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.05)
        elif parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            assert torch.equal(parameter, eight_layer_weights[name])
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05)
            assert abs(parameter.mean().item()) < 0.002
    first_values = [parameter.flatten()[:100] for parameter in eight_layer_model.parameters() if parameter.ndim > 1]
    directions = {tuple((values / values.norm()).tolist()) for values in first_values}
    assert len(directions) == len(first_values), "two parameters have the same random numbers"
    with_other_seed = dict(build_decoder(ModelConfig(dim=64, layers=2, heads=4), seed=2).named_parameters())
    assert not any(
        torch.equal(parameter, with_other_seed[name])
        for name, parameter in two_layer_model.named_parameters()
        if parameter.ndim > 1
    )


def test_the_loss_is_a_sum_over_tokens_computed_in_fp32() -> None:
    logits_BTV = torch.randn(4, 6, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    targets_BT = sample_tokens(2, 4, 6)
    exact_losses = -logits_BTV.double().log_softmax(-1).gather(-1, targets_BT[..., None])[..., 0]
    loss = cross_entropy_sum(logits_BTV, targets_BT)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    torch.testing.assert_close(loss.double(), exact_losses.sum(), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        cross_entropy_sum(logits_BTV[:1], targets_BT[:1]).double(), exact_losses[0].sum(), rtol=1e-6, atol=0
    )
    bf16_BTV = logits_BTV.bfloat16()
    assert torch.equal(cross_entropy_sum(bf16_BTV, targets_BT), cross_entropy_sum(bf16_BTV.float(), targets_BT))
    partly_ignored_BT = targets_BT.clone()
    partly_ignored_BT[1:] = -100
    assert torch.equal(
        cross_entropy_sum(logits_BTV, partly_ignored_BT), cross_entropy_sum(logits_BTV[:1], targets_BT[:1])
    )


@pytest.mark.parametrize("name", [name for name in MODEL_CONFIGS if "window" not in name])
def test_flops_per_token_equal_those_of_torchs_flop_counter(name: str) -> None:
    config = MODEL_CONFIGS[name]
    model = build_decoder(config)
    batch = sample_tokens(1)
    # FlopCounterMode does not support the CPU's fused attention kernel, so the plain one is used.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(batch)
    forward_flops = counter.get_total_flops() / batch.numel()  # The backward pass needs twice as many.
    # FlopCounterMode does not count norms and the embedding. The formula includes them by convention.
    norm_parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 1)
    embedding_parameters = 0 if config.tie_word_embeddings else VOCAB * config.dim
    uncounted_flops = 6 * (norm_parameters + embedding_parameters)  # 6 FLOPs per parameter and token
    assert training_flops_per_token(config, VOCAB, LENGTH) == 3 * forward_flops + uncounted_flops


def test_flops_per_token_count_the_windows_of_the_blocks() -> None:
    """The first of three blocks reads all 24 tokens, the others 5. A head has a width of 8."""
    config = MODEL_CONFIGS["qwen2, window from the second block on"]
    without_window = config.model_copy(update={"sliding_window": None})
    difference = training_flops_per_token(without_window, VOCAB, LENGTH) - training_flops_per_token(
        config, VOCAB, LENGTH
    )
    assert difference == 12 * 32 * (3 * 24 - (24 + 5 + 5))


def count_parameters(name: str) -> int:
    """Return the number of parameter values of a decoder in `MODEL_CONFIGS`."""
    return sum(parameter.numel() for parameter in build_decoder(MODEL_CONFIGS[name]).parameters())


def test_tied_weights_are_one_parameter() -> None:
    expected = build_transformers_model(MODEL_CONFIGS["tied"]).num_parameters()
    assert count_parameters("tied") == expected
    assert count_parameters("grouped") == expected + VOCAB * 32

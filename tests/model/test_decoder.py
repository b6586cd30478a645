"""The model against transformers' Llama and its relatives; initial weights, loss and operation count, too."""

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

VOCAB, LENGTH = 97, 24
CONFIGS = {
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
    "mistral": ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, head_dim=16, sliding_window=LENGTH),
    "qwen2": ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, attention_bias="qkv"),
    "qwen3": ModelConfig(
        dim=32, layers=2, heads=4, kv_heads=2, head_dim=16, qk_norm=True, attention_bias="all", tie_word_embeddings=True
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(config: ModelConfig, seed: int = 1, std: float = 0.02) -> Decoder:
    model = Decoder(config, VOCAB, LENGTH)
    init_weights(model, seed, std)
    return model


def tokens(seed: int, batch: int = 3, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def reference_of(config: ModelConfig) -> PreTrainedModel:
    theirs = AutoConfig.for_model(**build_config_json(config, ModelMetadata(), VOCAB, LENGTH, 0, "float32"))
    return AutoModelForCausalLM.from_config(theirs, attn_implementation="eager")


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_that_of_transformers(name: str) -> None:
    config = CONFIGS[name]
    model, reference = build(config, std=0.2), reference_of(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        batch = tokens(step)
        optimizer.zero_grad()
        (cross_entropy_sum(model(batch[:, :-1]), batch[:, 1:]) / batch[:, 1:].numel()).backward()
        optimizer.step()
    assert list(model.state_dict()) == list(reference.state_dict())
    reference.load_state_dict(model.state_dict())
    batch = tokens(99)
    logits_BTV, expected_BTV = model(batch), reference(batch).logits
    assert expected_BTV.std() > 0.3  # weights that matter: the comparison below is not one of zeros
    torch.testing.assert_close(logits_BTV, expected_BTV, atol=1e-5, rtol=1e-5)
    model.zero_grad()
    reference.zero_grad()
    (cross_entropy_sum(logits_BTV[:, :-1], batch[:, 1:]) / batch[:, 1:].numel()).backward()
    reference(batch, labels=batch).loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    assert list(gradients) == [n for n, _ in reference.named_parameters()]
    for parameter_name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[parameter_name], parameter.grad, atol=1e-6, rtol=1e-4)


def test_a_position_sees_only_what_came_before() -> None:
    model = build(CONFIGS["grouped"], std=0.2)
    before = tokens(1)
    after = before.clone()
    after[:, 10] = (after[:, 10] + 1) % VOCAB
    same, other = model(before), model(after)
    assert torch.equal(same[:, :10], other[:, :10])
    assert not torch.isclose(same[:, 10:], other[:, 10:]).all(dim=-1).any()


def test_dropout_acts_in_training_only() -> None:
    config = ModelConfig(dim=32, layers=2, heads=4, dropout=0.5)
    model, batch = build(config), tokens(1)
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))
    plain = build(CONFIGS["plain"].model_copy(update={"rms_norm_eps": 1e-5, "intermediate_size": None}))
    assert torch.equal(model(batch), plain(batch))


@pytest.mark.parametrize("name", ["grouped", "tied"])
def test_initial_weights_do_not_depend_on_how_the_model_was_built(name: str) -> None:
    config = CONFIGS[name]
    torch.manual_seed(1)
    straight = build(config)
    torch.manual_seed(2)
    with torch.device("meta"):
        empty = Decoder(config, VOCAB, LENGTH)
    empty.to_empty(device="cpu")
    for value in [*empty.parameters(), *empty.buffers()]:
        value.data.fill_(math.nan)
    state = torch.get_rng_state()
    init_weights(empty, 1, 0.02)
    assert torch.equal(state, torch.get_rng_state())
    assert [n for n, _ in empty.named_parameters()] == [n for n, _ in straight.named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(empty.parameters(), straight.parameters(), strict=True))
    assert torch.equal(empty(tokens(1)), straight(tokens(1)))  # the rotary tables too
    assert ("lm_head.weight" not in dict(empty.named_parameters())) == config.tie_word_embeddings


def test_initial_weights_belong_to_names() -> None:
    small, large = (build(ModelConfig(dim=64, layers=layers, heads=4)) for layers in (2, 8))
    weights = dict(large.named_parameters())
    for name, parameter in small.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):  # std / sqrt(2 * layers): half of it at 4 times
            torch.testing.assert_close(parameter, weights[name] * 2)
            assert parameter.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.05)
        elif parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            assert torch.equal(parameter, weights[name])
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05)
            assert abs(parameter.mean().item()) < 0.002
    matrices = [p.flatten()[:100] for p in large.parameters() if p.ndim > 1]
    assert len({tuple((m / m.norm()).tolist()) for m in matrices}) == len(matrices)
    other = dict(build(ModelConfig(dim=64, layers=2, heads=4), seed=2).named_parameters())
    assert not any(torch.equal(p, other[n]) for n, p in small.named_parameters() if p.ndim > 1)


def test_loss_is_a_sum_in_fp32() -> None:
    logits_BTV = torch.randn(4, 6, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    targets_BT = tokens(2, 4, 6)
    exact = -logits_BTV.double().log_softmax(-1).gather(-1, targets_BT[..., None])[..., 0]
    loss = cross_entropy_sum(logits_BTV, targets_BT)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    torch.testing.assert_close(loss.double(), exact.sum(), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        cross_entropy_sum(logits_BTV[:1], targets_BT[:1]).double(), exact[0].sum(), rtol=1e-6, atol=0
    )
    half = logits_BTV.bfloat16()
    assert torch.equal(cross_entropy_sum(half, targets_BT), cross_entropy_sum(half.float(), targets_BT))
    ignored = targets_BT.clone()
    ignored[1:] = -100
    assert torch.equal(cross_entropy_sum(logits_BTV, ignored), cross_entropy_sum(logits_BTV[:1], targets_BT[:1]))


@pytest.mark.parametrize("name", CONFIGS)
def test_operations_are_those_torch_counts(name: str) -> None:
    config = CONFIGS[name]
    model, batch = build(config), tokens(1)
    # the plain kernel, since the counter does not know the CPU's fused one
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(batch)
    forward = counter.get_total_flops() / batch.numel()  # backward takes twice as much; norms are not counted there
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    looked_up = 0 if config.tie_word_embeddings else VOCAB * config.dim  # counted by convention
    assert training_flops_per_token(config, VOCAB, LENGTH) == 3 * forward + 6 * (norms + looked_up)


def test_tied_weights_are_one_parameter() -> None:
    reference = reference_of(CONFIGS["tied"])
    tied, grouped = (sum(p.numel() for p in build(CONFIGS[name]).parameters()) for name in ("tied", "grouped"))
    assert (tied, grouped) == (reference.num_parameters(), reference.num_parameters() + VOCAB * 32)

"""Tests of samples that contain several documents, with a document mask, and of tokens without a loss.

On every layout, the losses and gradient norms must equal those of a loop that trains on one document at a time.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.dist_env import RankInfo
from pipeline.config.sections import Config, ModelConfig
from pipeline.data.manifest import MASK_DOCUMENT_START, MASK_LEARNED
from pipeline.model.decoder import Decoder, RotaryEmbedding, TokenPositions, cross_entropy_sum, init_weights
from pipeline.model.task import DecoderTask
from tests.support.ranks import run_ranks
from tests.support.tiny_training import VOCAB, tiny_config

STEPS = 3
"""Steps of a training run, if the case does not set `train.steps`."""
EOS = 0
"""Token ID of the end-of-text token."""
PROMPTS: dict[str, Any] = {"records": "prompts", "document_mask": True, "source": "a.jsonl"}
"""Section `data` for prompts with answers. Only the tokens of the answers have a loss."""
TEXT: dict[str, Any] = {"document_mask": True}
"""Section `data` for text. All tokens have a loss, except the first one of a document."""
QK_NORM = {"qk_norm": True}
WINDOW = {"sliding_window": 3, "max_window_layers": 1}
_expected_steps: dict[str, list[tuple[float, float]]] = {}
"""Results of `train_one_by_one` by model, kind of data and number of steps."""


def make_packed_config(ranks: int, data: dict[str, Any], **sections: dict[str, Any]) -> Config:
    """Return a config with samples of 16 tokens; `data` is `PROMPTS` or `TEXT`."""
    tokenizer = {"tokenizer": {"vocab_size": 512}, "sequence_length": 16}
    train = {"steps": STEPS, **sections.pop("train", {})}
    return tiny_config(ranks, data={**tokenizer, **data}, train=train, **sections)


def make_packed_batches(config: Config) -> list[dict[str, torch.Tensor]]:
    """Return global batches whose samples contain documents of 1 to 9 tokens, with a loss mask if the config has one.

    The second half of a batch has few tokens in its loss, so that the ranks' token counts differ.
    """
    generator = torch.Generator().manual_seed(7)
    global_batch = config.train.global_batch
    length = config.data.sequence_length + 1
    batches = []
    for _ in range(config.train.steps or 0):
        shape = (global_batch, length)
        tokens = torch.randint(1, VOCAB, shape, generator=generator)
        is_start = torch.zeros(shape, dtype=torch.bool)
        for row in range(global_batch):
            position = int(torch.randint(0, 5, (), generator=generator))
            while position < length:
                is_start[row, position] = True
                if position:
                    tokens[row, position - 1] = EOS
                position += int(torch.randint(1, 10, (), generator=generator))
        # the probability that a token has a loss decreases from the first to the last sample
        has_loss = torch.rand(shape, generator=generator) < torch.linspace(0.9, 0.05, global_batch).unsqueeze(1)
        batch = {"tokens": tokens}
        if config.data.records != "text":
            batch["mask"] = (is_start * MASK_DOCUMENT_START + (has_loss & ~is_start) * MASK_LEARNED).to(torch.uint8)
        batches.append(batch)
    return batches


def train_one_by_one(config: Config) -> list[tuple[float, float]]:
    """Train in plain torch, with one forward pass for each document. Return the loss and gradient norm of each step."""
    options = config.optimizer
    results = []
    model = Decoder(config.model, VOCAB, config.data.sequence_length)
    init_weights(model, config.run.seed, config.model.initializer_range)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps)
    for batch in make_packed_batches(config):
        optimizer.zero_grad()
        total_loss = torch.zeros(())
        loss_count = 0
        for row, tokens in enumerate(batch["tokens"]):
            if "mask" in batch:
                boundaries = (batch["mask"][row] & MASK_DOCUMENT_START).nonzero().flatten().tolist()
            else:
                boundaries = [position + 1 for position in (tokens == EOS).nonzero().flatten().tolist()]
            boundaries = [0, *(position for position in boundaries if 0 < position < len(tokens)), len(tokens)]
            for start, end in pairwise(boundaries):
                targets = tokens[start + 1 : end].clone()
                if "mask" in batch:
                    targets[batch["mask"][row, start + 1 : end] & MASK_LEARNED == 0] = -100
                loss_count += int((targets != -100).sum())
                if len(targets):
                    logits = model(tokens[None, start : end - 1])
                    total_loss = total_loss + cross_entropy_sum(logits, targets[None])
        loss = total_loss / loss_count
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm or 0.0)
        optimizer.step()
        results.append((loss.item(), norm.item()))
    return results


def get_expected_steps(config: Config) -> list[tuple[float, float]]:
    """Return the result of `train_one_by_one`, which is computed once for each model, kind of data, and length."""
    key = f"{config.model!r} {config.data!r} {config.train.steps}"
    if key not in _expected_steps:
        _expected_steps[key] = train_one_by_one(config)
    return _expected_steps[key]


def train_on_packed_batches(rank_info: RankInfo, configs: list[Config]) -> list[list[tuple[float, float]]]:
    """Train with each config in turn, as one rank. Return the losses and gradient norms of each config."""
    from pipeline.comm import groups
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train.engine import Engine

    groups.configure_determinism(configs[0])
    world = groups.join_process_group(rank_info, configs[0])
    results = []
    for config in configs:
        layout = resolve_layout(config, world.size, rank_info.local_world_size, VOCAB)
        engine = Engine(config, layout, world, DecoderTask(config, VOCAB, EOS))
        dp_rank = layout.coordinates(rank_info.rank).dp
        steps = []
        for step, batch in enumerate(make_packed_batches(config), 1):
            local_batch = {name: array.chunk(layout.dp)[dp_rank] for name, array in batch.items()}
            loss = engine.backward(local_batch, step)
            norm = engine.clip_gradients(config.optimizer.clip_norm)
            engine.update_weights(norm.item())
            steps.append((loss.item(), norm.item()))
        results.append(steps)
    return results


Case = tuple[dict[str, Any], dict[str, Any]]
"""The section `data`, and other sections of the config."""
ONE_RANK_CASES: list[Case] = [
    (PROMPTS, {}),
    (TEXT, {"train": {"loss_chunk": 7}}),
    (TEXT, {"model": WINDOW}),
]
TWO_RANKS_CASES: list[Case] = [
    (PROMPTS, {"parallel": {"tensor": 2}, "train": {"micro_batch": 8}}),
    (PROMPTS, {"parallel": {"pipeline": 2}, "train": {"loss_chunk": 7}}),
    (PROMPTS, {"parallel": {"zero": 3}}),
]
FURTHER_TWO_RANKS_CASES: list[Case] = [
    (PROMPTS, {"parallel": {"zero": 0}}),
    (PROMPTS, {"parallel": {"tensor": 2}, "train": {"micro_batch": 8}, "model": WINDOW}),
    (TEXT, {"parallel": {"zero": 3, "activation_checkpointing": "selective"}, "train": {"loss_chunk": 7}}),
    (TEXT, {"parallel": {"tensor": 2, "sequence": False}, "train": {"micro_batch": 8, "loss_chunk": 7}}),
    (TEXT, {"parallel": {"pipeline": 2, "schedule": "zbv", "virtual_stages": 2}}),
    (PROMPTS, {"parallel": {"pipeline": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}, "model": QK_NORM}),
    (PROMPTS, {"parallel": {"activation_checkpointing": "full"}, "train": {"compile": True}}),
    (PROMPTS, {"parallel": {"tensor": 2}, "train": {"compile": True, "micro_batch": 8}}),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, ONE_RANK_CASES),
        (2, TWO_RANKS_CASES),
        pytest.param(2, FURTHER_TWO_RANKS_CASES, marks=pytest.mark.long),
    ],
    ids=["one rank", "two ranks", "two ranks, further cases"],
)
def test_packed_documents_give_the_same_results_as_single_documents(ranks: int, cases: list[Case]) -> None:
    check_packed(ranks, cases)


def check_packed(ranks: int, cases: list[Case]) -> None:
    """Train each case on `ranks` ranks, and compare all steps of all ranks with `train_one_by_one`."""
    configs = [make_packed_config(ranks, data, **sections) for data, sections in cases]
    results_by_rank = run_ranks(ranks, train_on_packed_batches, configs, timeout=600)
    for number, config in enumerate(configs):
        expected_steps = get_expected_steps(config)
        assert len(expected_steps) == config.train.steps
        for results in results_by_rank:
            assert results[number] == [pytest.approx(step, rel=1e-5) for step in expected_steps], cases[number]


@settings(max_examples=50)
@given(rows=st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=3))
def test_attention_and_positions_are_restricted_to_each_document(rows: list[list[bool]]) -> None:
    """`rows` has, for each of 9 tokens of a sample, whether the token starts a document.

    The rotary tables are compared directly. The loss would not show wrong positions, because it depends only on the
    distances between tokens.
    """
    rotary = RotaryEmbedding(ModelConfig(dim=16, heads=4), 9)
    positions = TokenPositions(rotary, torch.tensor(rows), [None, 3])
    ranges, short_ranges = positions.get_key_ranges(None), positions.get_key_ranges(3)
    assert ranges is not None and short_ranges is not None
    for row, starts in enumerate(rows):
        document_starts = [max((p for p in range(1, position + 1) if starts[p]), default=0) for position in range(9)]
        for position, start in enumerate(document_starts):
            query = row * 9 + position
            assert ranges.first_N[query] == row * 9 + start and ranges.last_N[query] == query
            assert short_ranges.first_N[query] == row * 9 + max(start, position - 2)
            assert torch.equal(positions.cos_B1TK[row, 0, position], rotary.cos_TK[position - start])
            assert torch.equal(positions.sin_B1TK[row, 0, position], rotary.sin_TK[position - start])


def test_a_token_that_ends_and_starts_documents_belongs_to_the_next_document() -> None:
    """Some tokenizers use one token for the end and the start of documents. It occurs once between two documents."""
    config = make_packed_config(1, TEXT)
    task = DecoderTask(config, VOCAB, EOS, eos_starts_next=True)
    model = Decoder(config.model, VOCAB, config.data.sequence_length)
    init_weights(model, config.run.seed, config.model.initializer_range)
    first_document = [EOS, 5, 6, 7]
    second_document = [EOS, 8, 9, 10, 11]
    batch = {"tokens": torch.tensor([[*first_document, *second_document, EOS]])}
    with torch.no_grad():
        packed_logits = model(*task.model_inputs(batch), **task.document_boundaries(batch))[0]
        single_logits = torch.cat(
            [model(torch.tensor([document]))[0] for document in (first_document, second_document)]
        )
    torch.testing.assert_close(packed_logits, single_logits)
    # all tokens have a loss, so the task does not count them
    assert task.count_loss_entries(batch) is None and (task.next_tokens(batch) == batch["tokens"][:, 1:]).all()

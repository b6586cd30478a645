"""Documents packed into samples, each apart, and tokens that carry no loss: on every layout the losses and gradients of
the same documents one by one."""

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
from pipeline.model.decoder import Decoder, PackedRotaryEmbedding, RotaryEmbedding, cross_entropy_sum, init_weights
from pipeline.model.task import DecoderTask
from tests.support.ranks import run_ranks
from tests.support.tiny_training import VOCAB, tiny_config

STEPS, EOS = 3, 0
MASKED: dict[str, Any] = {"records": "prompts", "document_mask": True, "source": "a.jsonl"}
TEXT: dict[str, Any] = {"document_mask": True}
QK_NORM = {"qk_norm": True}
_single: dict[str, list[tuple[float, float]]] = {}


def configured(ranks: int, data: dict[str, Any], **sections: dict[str, Any]) -> Config:
    tokenizer = {"tokenizer": {"vocab_size": 512}, "sequence_length": 16}
    return tiny_config(ranks, data={**tokenizer, **data}, **sections)


def packed(config: Config) -> list[dict[str, torch.Tensor]]:
    """Global batches of documents of 1 to 9 tokens in samples; where there is a mask, also what is learned of them.

    The second half of a batch learns hardly anything, so that ranks count differently.
    """
    generator = torch.Generator().manual_seed(7)
    size, length = config.train.global_batch, config.data.sequence_length + 1
    found = []
    for _ in range(STEPS):
        shape = (size, length)
        tokens, begins = torch.randint(1, VOCAB, shape, generator=generator), torch.zeros(shape, dtype=torch.bool)
        for row in range(size):
            place = int(torch.randint(0, 5, (), generator=generator))
            while place < length:
                begins[row, place] = True
                if place:
                    tokens[row, place - 1] = EOS
                place += int(torch.randint(1, 10, (), generator=generator))
        learned = torch.rand(shape, generator=generator) < torch.linspace(0.9, 0.05, size).unsqueeze(1)
        batch = {"tokens": tokens}
        if config.data.records != "text":
            batch["mask"] = (begins * MASK_DOCUMENT_START + (learned & ~begins) * MASK_LEARNED).to(torch.uint8)
        found.append(batch)
    return found


def one_by_one(config: Config) -> list[tuple[float, float]]:
    """Losses and gradient norms of a plain loop that never sees two documents at once."""
    options, results = config.optimizer, []
    model = Decoder(config.model, VOCAB, config.data.sequence_length)
    init_weights(model, config.run.seed, config.model.initializer_range)
    by_decay = [[p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False)]
    groups = [{"params": by_decay[0], "weight_decay": options.weight_decay}, {"params": by_decay[1], "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps)
    for batch in packed(config):
        optimizer.zero_grad()
        total, counted = torch.zeros(()), 0
        for row, tokens in enumerate(batch["tokens"]):
            if "mask" in batch:
                borders = (batch["mask"][row] & MASK_DOCUMENT_START).nonzero().flatten().tolist()
            else:
                borders = [place + 1 for place in (tokens == EOS).nonzero().flatten().tolist()]
            borders = [0, *(place for place in borders if 0 < place < len(tokens)), len(tokens)]
            for start, end in pairwise(borders):
                targets = tokens[start + 1 : end].clone()
                if "mask" in batch:
                    targets[batch["mask"][row, start + 1 : end] & MASK_LEARNED == 0] = -100
                counted += int((targets != -100).sum())
                if len(targets):
                    total = total + cross_entropy_sum(model(tokens[None, start : end - 1]), targets[None])
        loss = total / counted
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm or 0.0)
        optimizer.step()
        results.append((loss.item(), norm.item()))
    return results


def reference(config: Config) -> list[tuple[float, float]]:
    """The same, computed once for each model and kind of data."""
    kind = f"{config.model!r} {config.data!r}"
    if kind not in _single:
        _single[kind] = one_by_one(config)
    return _single[kind]


def packed_rank(where: RankInfo, configs: list[Config]) -> list[list[tuple[float, float]]]:
    from pipeline.comm import groups
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train.engine import Engine

    groups.configure_determinism(configs[0])
    world = groups.join_process_group(where, configs[0])
    results = []
    for config in configs:
        layout = resolve_layout(config, world.size, where.local_world_size, VOCAB)
        engine = Engine(config, layout, world, DecoderTask(config, VOCAB, EOS))
        part, found = layout.coordinates(where.rank).dp, []
        for step, batch in enumerate(packed(config), 1):
            own = {name: array.chunk(layout.dp)[part] for name, array in batch.items()}
            loss = engine.backward(own, step)
            norm = engine.clip_gradients(config.optimizer.clip_norm)
            engine.update_weights(norm.item())
            found.append((loss.item(), norm.item()))
        results.append(found)
    return results


Case = tuple[dict[str, Any], dict[str, Any]]
ONE: list[Case] = [
    (MASKED, {}),
    (TEXT, {"train": {"loss_chunk": 7}}),
]
TWO: list[Case] = [
    (MASKED, {"parallel": {"tensor": 2}, "train": {"micro_batch": 8}}),
    (MASKED, {"parallel": {"pipeline": 2}, "train": {"loss_chunk": 7}}),
    (MASKED, {"parallel": {"zero": 3}}),
]
MORE: list[Case] = [
    (MASKED, {"parallel": {"zero": 0}}),
    (TEXT, {"parallel": {"zero": 3, "activation_checkpointing": "selective"}, "train": {"loss_chunk": 7}}),
    (TEXT, {"parallel": {"tensor": 2, "sequence": False}, "train": {"micro_batch": 8, "loss_chunk": 7}}),
    (TEXT, {"parallel": {"pipeline": 2, "schedule": "zbv", "virtual_stages": 2}}),
    (MASKED, {"parallel": {"pipeline": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}, "model": QK_NORM}),
    (MASKED, {"parallel": {"activation_checkpointing": "full"}, "train": {"compile": True}}),
    (MASKED, {"parallel": {"tensor": 2}, "train": {"compile": True, "micro_batch": 8}}),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "cases"), [(1, ONE), (2, TWO), pytest.param(2, MORE, marks=pytest.mark.story)], ids=["one", "two", "more"]
)
def test_packed_documents_are_those_one_by_one(ranks: int, cases: list[Case]) -> None:
    configs = [configured(ranks, data, **sections) for data, sections in cases]
    results = run_ranks(ranks, packed_rank, configs, timeout=600)
    for number, config in enumerate(configs):
        expected = reference(config)
        assert len(expected) == STEPS
        for rank in results:
            assert rank[number] == [pytest.approx(step, rel=1e-5) for step in expected], cases[number]


@settings(deadline=None, max_examples=50)
@given(rows=st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=3))
def test_who_sees_whom_and_where_positions_start(rows: list[list[bool]]) -> None:
    """Positions are asked for by themselves: rotary ones tell in a loss only how far apart tokens are."""
    rotary = RotaryEmbedding(ModelConfig(dim=16, heads=4), 9)
    packed = PackedRotaryEmbedding(rotary, torch.tensor(rows))
    for row, starts in enumerate(rows):
        firsts = [max((place for place in range(1, own + 1) if starts[place]), default=0) for own in range(9)]
        for own, first in enumerate(firsts):
            seen = packed.mask_B1TT[row, 0, own].nonzero().flatten().tolist()
            assert seen == list(range(first, own + 1))
            assert torch.equal(packed.cos_B1TK[row, 0, own], rotary.cos_TK[own - first])
            assert torch.equal(packed.sin_B1TK[row, 0, own], rotary.sin_TK[own - first])


def test_an_end_token_that_begins_the_next_document_stays_with_it() -> None:
    """Some tokenizers have one token for both: it stands once between two documents, and the next one sees it."""
    config = configured(1, TEXT)
    task, model = DecoderTask(config, VOCAB, EOS, True), Decoder(config.model, VOCAB, config.data.sequence_length)
    init_weights(model, config.run.seed, config.model.initializer_range)
    first, second = [EOS, 5, 6, 7], [EOS, 8, 9, 10, 11]
    batch = {"tokens": torch.tensor([[*first, *second, EOS]])}
    with torch.no_grad():
        together = model(*task.model_inputs(batch), **task.document_boundaries(batch))[0]
        alone = torch.cat([model(torch.tensor([one]))[0] for one in (first, second)])
    torch.testing.assert_close(together, alone)
    assert task.count_loss_entries(batch) is None and (task.next_tokens(batch) == batch["tokens"][:, 1:]).all()

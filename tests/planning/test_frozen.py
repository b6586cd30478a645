"""Tests of predictions with `optimizer.freeze`, compared with torch's FLOP count of real forwards and backwards."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipeline.config.sections import Config
from pipeline.model.decoder import Decoder, cross_entropy_sum
from pipeline.model.spec import EMBEDDING
from pipeline.model.task import DecoderTask
from pipeline.parallel.mesh import resolve_layout
from pipeline.train.optimizer import find_frozen_names
from planning import predict as predicting
from planning.machine import Attention, Link, Step
from planning.predict import predict_step
from planning.workload import Workload, workload_from_config
from tests.planning.test_predict import IDEAL, PERFECT
from tests.support.tiny_training import tiny_config

VOCAB, LAYERS, LENGTH, BATCH = 512, 4, 16, 2
TABLE, HEAD, NORM = "model.embed_tokens.*", "lm_head.*", "model.norm.*"
TIED = {"tie_word_embeddings": True}
BLOCKS: list[tuple[list[str], dict[str, Any]]] = [
    ([], {}),
    ([TABLE], {}),
    ([TABLE, "model.layers.[01].*"], {}),
    (["model.layers.[01].*"], {}),
    ([TABLE, "model.layers.[13].*"], {}),
    (["model.layers.[23].*", HEAD], {}),
    ([TABLE, "model.layers.*"], {}),
    ([TABLE, "model.layers.*", NORM], {}),
    ([HEAD], {}),
    ([TABLE, "model.layers.0.*"], TIED),
    (["model.layers.*"], TIED),
]
PARTS: list[tuple[list[str], dict[str, Any]]] = [
    (["*.mlp.*"], {}),
    (["*.self_attn.*", "model.layers.1.*"], {}),
    (["*norm.weight"], {}),
]


class Counted(NamedTuple):
    """FLOPs and bytes of one block. The first block has the embedding, the last one has the norm and output layer."""

    forward: int
    backward: int
    """Of products with weights."""
    attention: int
    attention_back: int
    gradients: int
    """Bytes of matrices', of the block."""
    tables: dict[str, int]
    """And of tables."""


def config_of(freeze: list[str], model: dict[str, Any], ranks: int = 1, **parallel: Any) -> Config:
    sizes = {"dim": 64, "layers": LAYERS, "heads": 4, "kv_heads": 2, "intermediate_size": 192}
    train = {"micro_batch": BATCH, "global_batch": BATCH * ranks * LAYERS, "precision": "bf16"}
    return tiny_config(
        ranks, model=sizes | model, train=train, parallel=parallel, optimizer={"freeze": freeze},
        data={"sequence_length": LENGTH, "tokenizer": {"vocab_size": VOCAB}},
    )  # fmt: skip


def count_blocks(config: Config) -> list[Counted]:
    """Return what torch counts for one micro-batch, block by block, as in pipeline-parallel stages of one block."""
    frozen, found = find_frozen_names(config.optimizer.freeze, DecoderTask(config, VOCAB)), []
    parts = [Decoder(config.model, VOCAB, LENGTH, range(number, number + 1)) for number in range(LAYERS)]
    tokens, inputs, counts = torch.randint(VOCAB, (BATCH, LENGTH + 1)), [], []
    outputs: list[torch.Tensor] = []
    with sdpa_kernel(SDPBackend.MATH):  # whose products are counted, too
        for part in parts:
            for name, parameter in part.named_weights():
                parameter.requires_grad_(name not in frozen)
            before = outputs[-1].detach().requires_grad_(outputs[-1].requires_grad) if outputs else tokens[:, :-1]
            with FlopCounterMode(display=False) as forward:
                outputs.append(part(before))
            inputs.append(before)
            counts.append(forward.get_flop_counts()["Global"])
        outputs[-1] = cross_entropy_sum(outputs[-1], tokens[:, 1:])
        gradient = None
        for part, before, after, first in [*zip(parts, inputs, outputs, counts, strict=True)][::-1]:
            with FlopCounterMode(display=False) as backward:
                if after.requires_grad:
                    after.backward(gradient)
            gradient, second = before.grad, backward.get_flop_counts().get("Global", {})
            sizes = {n: p.grad.nbytes for n, p in part.named_weights() if p.grad is not None and p.ndim > 1}
            block = sum(size for name, size in sizes.items() if ".layers." in name)
            tables = {name: size for name, size in sizes.items() if ".layers." not in name}
            mm, bmm = torch.ops.aten.mm, torch.ops.aten.bmm
            found.append(Counted(first[mm], second.get(mm, 0), first[bmm], second.get(bmm, 0), block, tables))
    return found[::-1]


def work_of(config: Config) -> Workload:
    return workload_from_config(config, resolve_layout(config), VOCAB)


@pytest.mark.parametrize(
    ("freeze", "model", "off"), [*((*case, 1e-6) for case in BLOCKS), *((*case, 4e-3) for case in PARTS)]
)
def test_the_flops_of_each_block_equal_those_that_torch_counts(
    freeze: list[str], model: dict[str, Any], off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test compares each stage of one block, the whole step, and the FLOPs of MFU."""
    monkeypatch.setattr(predicting, "TILE", 0)
    same, wanted = partial(pytest.approx, rel=off), count_blocks(config_of(freeze, model))
    fast = Attention(portable=1e40, native=1e40)
    products = IDEAL.model_copy(update={"attention": fast})
    staged, alone = (work_of(config_of(freeze, model, ranks, pipeline=ranks)) for ranks in (LAYERS, 1))
    found = predict_step(staged, products, PERFECT)
    assert [time * 1e15 for time in found.forward] == [same(one.forward) for one in wanted]
    assert [time * 1e15 for time in found.backward] == [same(one.backward) for one in wanted]
    whole = predict_step(alone, products, PERFECT)
    assert whole.compute * 1e15 == same(alone.micro_batches * sum(one.forward + one.backward for one in wanted))
    found = predict_step(staged, IDEAL.model_copy(update={"achievable": {"bf16": 1e40}}), PERFECT)
    # backward of the usual kernel computes 2.5 times as much as forward; the plain one, which is counted, twice
    assert [2 * one.attention_back / one.attention for one in wanted] == [
        same(4 / 2.5 * back / ahead) for back, ahead in zip(found.backward, found.forward, strict=True)
    ]
    every = sum(one.forward + one.backward + one.attention + one.attention_back for one in wanted)
    assert alone.flops_per_token * BATCH * LENGTH == same(every)


@pytest.mark.parametrize(("freeze", "model"), BLOCKS)
def test_predicted_traffic_equals_the_gradients_that_torch_computes(freeze: list[str], model: dict[str, Any]) -> None:
    """On a slow network, traffic determines the step: DDP reduces once per step, ZeRO 3 after each micro-batch."""
    links = Link(bandwidth=1e8, latency=1e-30), Link(bandwidth=1e40, latency=1e-3)
    slow, late = (IDEAL.model_copy(update={"inside": link, "between": link}) for link in links)
    wanted = count_blocks(config_of(freeze, model))
    passed = sum(one.attention_back > 0 for one in wanted)
    staged = work_of(config_of(freeze, model, 2 * LAYERS, pipeline=LAYERS))
    found = predict_step(replace(staged, hide_data=False), slow, PERFECT)
    assert found.data * 1e8 == pytest.approx(max(one.gradients + sum(one.tables.values()) for one in wanted), rel=1e-6)
    message = BATCH * LENGTH * staged.hidden * 2
    assert found.pipeline * 1e8 == pytest.approx(message * staged.micro_batches * (1 + (passed > 0)), rel=1e-6)
    work = work_of(config_of(freeze, model, 8, zero=3, reduce="micro_batch"))
    block, table = work.attention_weights + work.expert_weights, VOCAB * work.hidden
    sent = work.micro_batches * (2 * block * (LAYERS + passed) + 2 * table + sum(one.gradients for one in wanted))
    sent += wanted[0].tables.get(EMBEDDING, 0)
    assert work.micro_batches > 1 and predict_step(work, slow, PERFECT).data * 1e8 == pytest.approx(
        sent * 7 / 8, rel=1e-3
    )
    calls = (
        LAYERS + 1 + passed + sum(one.gradients > 0 for one in wanted)
    )  # all gathered, the table, and again; reduced
    calls = work.micro_batches * calls + (EMBEDDING in wanted[0].tables)
    assert predict_step(work, late, PERFECT).data == pytest.approx(calls * 7e-3, rel=1e-3)


def test_one_trained_share_applies_to_all_blocks() -> None:
    """Machine files that were measured with older versions have one share for all blocks."""
    work = work_of(config_of([], {}))
    said = {name: value for name, value in asdict(work).items() if name != "trained_tables"} | {"trained": 1.0}
    step = Step.model_validate_json(json.dumps({"work": said, "ranks_per_node": 1, "seconds": 1.0}))
    assert predict_step(step.work, IDEAL) == predict_step(work, IDEAL)

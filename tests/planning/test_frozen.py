"""Tests of predictions with `optimizer.freeze`.

The predictions are compared with the FLOPs and gradients that torch counts in real forward and backward passes.
"""

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
from tests.planning.test_predict import IDEAL_MACHINE, PERFECT_CONSTANTS
from tests.support.tiny_training import tiny_config

VOCAB = 512
LAYERS = 4
LENGTH = 16
BATCH = 2
EMBEDDING_PATTERN = "model.embed_tokens.*"
OUTPUT_LAYER_PATTERN = "lm_head.*"
NORM_PATTERN = "model.norm.*"
TIED = {"tie_word_embeddings": True}

# Cases: frozen parameters, and keys of the model.
WHOLE_BLOCKS: list[tuple[list[str], dict[str, Any]]] = [
    ([], {}),
    ([EMBEDDING_PATTERN], {}),
    ([EMBEDDING_PATTERN, "model.layers.[01].*"], {}),
    (["model.layers.[01].*"], {}),
    ([EMBEDDING_PATTERN, "model.layers.[13].*"], {}),
    (["model.layers.[23].*", OUTPUT_LAYER_PATTERN], {}),
    ([EMBEDDING_PATTERN, "model.layers.*"], {}),
    ([EMBEDDING_PATTERN, "model.layers.*", NORM_PATTERN], {}),
    ([OUTPUT_LAYER_PATTERN], {}),
    ([EMBEDDING_PATTERN, "model.layers.0.*"], TIED),
    (["model.layers.*"], TIED),
]
PARTS_OF_BLOCKS: list[tuple[list[str], dict[str, Any]]] = [
    (["*.mlp.*"], {}),
    (["*.self_attn.*", "model.layers.1.*"], {}),
    (["*norm.weight"], {}),
]


class BlockCounts(NamedTuple):
    """What torch counts for one block. The first block includes the embedding, the last one the output layer."""

    forward: int
    """FLOPs of products with weights, forward."""
    backward: int
    """FLOPs of products with weights, backward."""
    attention_forward: int
    """FLOPs of attention, forward."""
    attention_backward: int
    """FLOPs of attention, backward."""
    gradients: int
    """Bytes of the gradients of the block's matrices."""
    table_gradients: dict[str, int]
    """Bytes of the gradients of the embedding and the output layer, by parameter name."""


def make_config(freeze: list[str], model: dict[str, Any], ranks: int = 1, **parallel: Any) -> Config:
    """Return the config of a tiny model on `ranks` ranks; `freeze` is the key `optimizer.freeze`."""
    sizes = {"dim": 64, "layers": LAYERS, "heads": 4, "kv_heads": 2, "intermediate_size": 192}
    train = {"micro_batch": BATCH, "global_batch": BATCH * ranks * LAYERS, "precision": "bf16"}
    return tiny_config(
        ranks, model=sizes | model, train=train, parallel=parallel, optimizer={"freeze": freeze},
        data={"sequence_length": LENGTH, "tokenizer": {"vocab_size": VOCAB}},
    )  # fmt: skip


def count_blocks(config: Config) -> list[BlockCounts]:
    """Return what torch counts for one micro-batch, for each block.

    Each block is a separate model, as in a pipeline-parallel stage of one block.
    """
    frozen = find_frozen_names(config.optimizer.freeze, DecoderTask(config, VOCAB))
    stages = [Decoder(config.model, VOCAB, LENGTH, range(number, number + 1)) for number in range(LAYERS)]
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1))
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    forward_counts = []
    blocks = []
    mm = torch.ops.aten.mm  # products with weights
    bmm = torch.ops.aten.bmm  # products of attention
    with sdpa_kernel(SDPBackend.MATH):  # this kernel computes attention with bmm, which torch counts
        for stage in stages:
            for name, parameter in stage.named_weights():
                parameter.requires_grad_(name not in frozen)
            stage_input = outputs[-1].detach().requires_grad_(outputs[-1].requires_grad) if outputs else tokens[:, :-1]
            with FlopCounterMode(display=False) as counter:
                outputs.append(stage(stage_input))
            inputs.append(stage_input)
            forward_counts.append(counter.get_flop_counts()["Global"])
        outputs[-1] = cross_entropy_sum(outputs[-1], tokens[:, 1:])
        gradient = None
        for stage, stage_input, output, forward in [*zip(stages, inputs, outputs, forward_counts, strict=True)][::-1]:
            with FlopCounterMode(display=False) as counter:
                if output.requires_grad:
                    output.backward(gradient)
            gradient = stage_input.grad
            backward = counter.get_flop_counts().get("Global", {})
            sizes = {
                name: parameter.grad.nbytes
                for name, parameter in stage.named_weights()
                if parameter.grad is not None and parameter.ndim > 1
            }
            counts = BlockCounts(
                forward=forward[mm],
                backward=backward.get(mm, 0),
                attention_forward=forward[bmm],
                attention_backward=backward.get(bmm, 0),
                gradients=sum(size for name, size in sizes.items() if ".layers." in name),
                table_gradients={name: size for name, size in sizes.items() if ".layers." not in name},
            )
            blocks.append(counts)
    return blocks[::-1]


def make_workload(config: Config) -> Workload:
    """Return the workload of a config, for predictions."""
    return workload_from_config(config, resolve_layout(config), VOCAB)


@pytest.mark.parametrize(
    ("freeze", "model", "tolerance"),
    [*((*case, 1e-6) for case in WHOLE_BLOCKS), *((*case, 4e-3) for case in PARTS_OF_BLOCKS)],
)
def test_predicted_flops_of_each_block_equal_those_that_torch_counts(
    freeze: list[str], model: dict[str, Any], tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test compares pipeline-parallel stages of one block, the whole step, and the FLOPs of the MFU.

    `IDEAL_MACHINE` computes 1e15 FLOP/s, so a predicted time in seconds times 1e15 is a number of FLOPs.
    """
    monkeypatch.setattr(predicting, "TILE", 0)
    approx = partial(pytest.approx, rel=tolerance)
    counted_blocks = count_blocks(make_config(freeze, model))
    pipeline_workload = make_workload(make_config(freeze, model, LAYERS, pipeline=LAYERS))
    one_rank_workload = make_workload(make_config(freeze, model))

    only_products = IDEAL_MACHINE.model_copy(update={"attention": Attention(portable=1e40, native=1e40)})
    predicted = predict_step(pipeline_workload, only_products, PERFECT_CONSTANTS)
    assert [seconds * 1e15 for seconds in predicted.forward] == [approx(block.forward) for block in counted_blocks]
    assert [seconds * 1e15 for seconds in predicted.backward] == [approx(block.backward) for block in counted_blocks]
    products = one_rank_workload.micro_batches * sum(block.forward + block.backward for block in counted_blocks)
    assert predict_step(one_rank_workload, only_products, PERFECT_CONSTANTS).compute * 1e15 == approx(products)

    only_attention = IDEAL_MACHINE.model_copy(update={"achievable": {"bf16": 1e40}})
    predicted = predict_step(pipeline_workload, only_attention, PERFECT_CONSTANTS)
    # In a fused attention kernel, backward computes 2.5 times as much as forward. In the counted kernel, it computes
    # twice as much.
    assert [block.attention_backward / block.attention_forward for block in counted_blocks] == [
        approx(2 / 2.5 * backward_s / forward_s)
        for backward_s, forward_s in zip(predicted.backward, predicted.forward, strict=True)
    ]
    attention = sum(block.attention_forward + block.attention_backward for block in counted_blocks)
    flops = sum(block.forward + block.backward for block in counted_blocks) + attention
    assert one_rank_workload.flops_per_token * BATCH * LENGTH == approx(flops)


@pytest.mark.parametrize(("freeze", "model"), WHOLE_BLOCKS)
def test_predicted_traffic_equals_the_gradients_that_torch_computes(freeze: list[str], model: dict[str, Any]) -> None:
    """On a slow network, traffic determines the step time.

    DDP reduces gradients once per step. ZeRO 3 gathers weights and reduces gradients in each micro-batch.
    """
    slow_link = Link(bandwidth=1e8, latency=1e-30)
    slow_machine = IDEAL_MACHINE.model_copy(update={"inside": slow_link, "between": slow_link})
    counted_blocks = count_blocks(make_config(freeze, model))
    backward_blocks = sum(block.attention_backward > 0 for block in counted_blocks)

    ddp = make_workload(make_config(freeze, model, 2 * LAYERS, pipeline=LAYERS))
    predicted = predict_step(replace(ddp, hide_data=False), slow_machine, PERFECT_CONSTANTS)
    reduced_bytes = max(block.gradients + sum(block.table_gradients.values()) for block in counted_blocks)
    assert predicted.data * 1e8 == pytest.approx(reduced_bytes, rel=1e-6)
    message_bytes = BATCH * LENGTH * ddp.hidden * 2
    messages = ddp.micro_batches * (1 + (backward_blocks > 0))
    assert predicted.pipeline * 1e8 == pytest.approx(message_bytes * messages, rel=1e-6)

    zero3 = make_workload(make_config(freeze, model, 8, zero=3, reduce="micro_batch"))
    assert zero3.micro_batches > 1
    block_bytes = 2 * (zero3.attention_weights + zero3.expert_weights)
    table_bytes = 2 * VOCAB * zero3.hidden
    gathered_bytes = block_bytes * (LAYERS + backward_blocks) + table_bytes
    sent_bytes = zero3.micro_batches * (gathered_bytes + sum(block.gradients for block in counted_blocks))
    sent_bytes += counted_blocks[0].table_gradients.get(EMBEDDING, 0)
    # in a ring of 8 ranks, a rank sends 7/8 of the bytes
    assert predict_step(zero3, slow_machine, PERFECT_CONSTANTS).data * 1e8 == pytest.approx(
        sent_bytes * 7 / 8, rel=1e-3
    )

    high_latency = Link(bandwidth=1e40, latency=1e-3)
    machine_with_latency = IDEAL_MACHINE.model_copy(update={"inside": high_latency, "between": high_latency})
    # the forward pass gathers each block and the embedding, and the backward pass gathers blocks again
    gathers = LAYERS + 1 + backward_blocks
    reductions = sum(block.gradients > 0 for block in counted_blocks)
    # in a ring of 8 ranks, a collective has 7 transfers, and each has the latency of 1 ms
    calls = zero3.micro_batches * (gathers + reductions) + (EMBEDDING in counted_blocks[0].table_gradients)
    assert predict_step(zero3, machine_with_latency, PERFECT_CONSTANTS).data == pytest.approx(calls * 7e-3, rel=1e-3)


def test_a_single_trained_share_applies_to_all_blocks() -> None:
    """Machine files of older versions have one share for all blocks, and no `trained_tables`."""
    work = make_workload(make_config([], {}))
    old_work = {name: value for name, value in asdict(work).items() if name != "trained_tables"} | {"trained": 1.0}
    step = Step.model_validate_json(json.dumps({"work": old_work, "ranks_per_node": 1, "seconds": 1.0}))
    assert predict_step(step.work, IDEAL_MACHINE) == predict_step(work, IDEAL_MACHINE)

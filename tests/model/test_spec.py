"""Tests that pipeline/model/spec.py describes the parameters that decoders really have, on all layouts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipeline.config.sections import Config
from pipeline.model.decoder import Decoder, apply_tensor_parallel, local_tensor
from pipeline.model.spec import count_block_parameters, decoder_parameters
from pipeline.parallel.mesh import Layout, LayoutError, resolve_layout
from pipeline.parallel.traffic import list_rank_parameters
from tests.support.tiny_training import tiny_config


@st.composite
def generate_model_sections(draw: st.DrawFn) -> dict[str, Any]:
    """Generate the section `model` of a config."""
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    return {
        "layers": draw(st.integers(1, 6)),
        "heads": kv_heads * draw(st.sampled_from([1, 2])),
        "kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from([2, 4])),
        "dim": draw(st.sampled_from([8, 12])),
        "intermediate_size": draw(st.sampled_from([8, 16, 24])),
        "attention_bias": draw(st.sampled_from(["none", "qkv", "all"])),
        "qk_norm": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
    }


def build_rank_parameters(
    config: Config, layout: Layout, pp_rank: int, vocab: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Build the pipeline-parallel stages of a rank of this layout. Return names and local shapes of the parameters."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.tp)
    try:
        mesh = init_device_mesh("cpu", (layout.tp,))
        parameters: list[tuple[str, tuple[int, ...]]] = []
        for stage in layout.stages_on_pipeline_rank(pp_rank):
            with torch.device("meta"):
                part = Decoder(config.model, vocab, config.data.sequence_length, layout.stage_layers[stage])
            if layout.tp > 1:
                sequence_parallel = layout.sequence_parallel
                apply_tensor_parallel(part, mesh, sequence_parallel=sequence_parallel, shard_logits=True)
            parameters += [
                (name, tuple(local_tensor(parameter.detach()).shape)) for name, parameter in part.named_weights()
            ]
        return parameters
    finally:
        dist.destroy_process_group()


@settings(max_examples=60)
@given(generate_model_sections(), st.data())
def test_described_parameters_equal_those_of_the_built_decoder(model: dict[str, Any], data: st.DataObject) -> None:
    schedule = data.draw(st.sampled_from(["gpipe", "zbv"]))
    pp = data.draw(st.sampled_from([1, 2, 3]))
    tp = data.draw(st.sampled_from([1, 2, 4]))
    parallel = {"pipeline": pp, "tensor": tp, "schedule": schedule, "virtual_stages": 2 if schedule == "zbv" else 1}
    vocab = 4 * data.draw(st.integers(2, 8))
    try:
        config = tiny_config(1, model=model)
        config = config.model_copy(update={"parallel": type(config.parallel).model_validate(parallel)})
        layout = resolve_layout(config, pp * tp, pp * tp, vocab)
    except LayoutError:
        assume(False)
    for pp_rank in range(pp):
        described_parameters = [
            (parameter.name, parameter.shape) for parameter in list_rank_parameters(config, layout, pp_rank, vocab)
        ]
        assert sorted(described_parameters) == sorted(build_rank_parameters(config, layout, pp_rank, vocab))


@given(generate_model_sections())
def test_parameter_counts_equal_the_sums_of_the_described_parameters(model: dict[str, Any]) -> None:
    config = tiny_config(1, model=model).model
    vocab = 16
    total = sum(parameter.numel for parameter in decoder_parameters(config, vocab))
    vocab_matrices = 1 if config.tie_word_embeddings else 2  # the embedding, and the output layer if it is not tied
    norm = config.dim
    vocab_parameters = vocab_matrices * vocab * config.dim
    assert total == config.layers * count_block_parameters(config) + norm + vocab_parameters
    layers_by_stage = [range(stage, stage + 1) for stage in range(config.layers)]
    parameters_of_stages = [
        parameter for layers in layers_by_stage for parameter in decoder_parameters(config, vocab, layers)
    ]
    # A tied output layer has a copy of the embedding if it is in another pipeline-parallel stage.
    copied = vocab * config.dim if config.tie_word_embeddings and config.layers > 1 else 0
    assert sum(parameter.numel for parameter in parameters_of_stages) == total + copied

"""Measure training steps of torchtitan 0.2.2, for a comparison with the steps of Sluice (benchmarks/gpu/speed.py).

    python -m benchmarks.gpu.titan STEPS MICRO_BATCH none|selective|full [key=value …]     print one measurement as JSON

This module uses the model, loss, optimizer, activation checkpointing and compilation of torchtitan. It combines them as
torchtitan's trainer does on one GPU (torchtitan/train.py, `forward_backward_step` and `train_step`). The shapes are
those of configs/lm-1b.yaml. Embeddings are not tied, because torchtitan's model does not support this. By torchtitan's
default, weights and moments are fp32, and matrix products are bf16 (autocast).
"""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType
from typing import Any

from benchmarks.gpu import ONE_GPU_OVERRIDES, ROOT
from benchmarks.gpu.speed import TOKENS, add_rates, time_steps

CONFIG = ROOT / "configs/lm-1b.yaml"
UNTIED = "model.tie_word_embeddings=false"


class _UnusedModule(ModuleType):
    """Replacement for a module that torchtitan imports for its data or plots, which this benchmark does not use."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def import_torchtitan(name: str) -> Any:
    """Import the module `torchtitan.NAME` at run time, so that this file can be type-checked without torchtitan."""
    for unused in ("datasets", "datasets.distributed", "torch.utils.tensorboard"):
        sys.modules.setdefault(unused, _UnusedModule(unused))
    return importlib.import_module(f"torchtitan.{name}")


def measure(micro: int, recompute: str, overrides: list[str], steps: int) -> dict[str, Any]:
    """Measure torchtitan's steps in this process. Return the result, as `time_steps` and `add_rates` return it.

    Args:
        micro: samples of a micro-batch.
        recompute: mode of torchtitan's activation checkpointing.
        overrides: overrides of Sluice's config, from which the shapes come.
        steps: minimum number of measured steps.
    """
    import torch

    from pipeline.config.read import load_config

    config = load_config(CONFIG, [*ONE_GPU_OVERRIDES, UNTIED, "train.global_batch=64", *overrides])
    model = config.model
    length = config.data.sequence_length
    vocab = config.data.tokenizer.vocab_size
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = max(4, TOKENS // length) if device.type == "cuda" else 4
    job = import_torchtitan("config").JobConfig()
    job.compile.enable = config.train.compile
    job.activation_checkpoint.mode = recompute
    job.activation_checkpoint.selective_ac_option = "op"  # as in Sluice. "2" would recompute every second block.
    job.training.seq_len = length
    dims = import_torchtitan("distributed").ParallelDims(
        dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1
    )
    llama3 = import_torchtitan("models.llama3")
    arguments = llama3.TransformerModelArgs(
        dim=model.dim, n_layers=model.layers, n_heads=model.heads, n_kv_heads=model.num_kv_heads, vocab_size=vocab,
        multiple_of=64, ffn_dim_multiplier=model.ffn_size / int(2 * 4 * model.dim / 3), rope_theta=model.rope_theta,
        max_seq_len=length,
    )  # fmt: skip
    with torch.device("meta"):
        network = llama3.Transformer(arguments)
    network = llama3.parallelize_llama(network, dims, job)
    network.to_empty(device=device)
    with torch.no_grad():
        network.init_weights(buffer_device=None)
    network.train()
    loss_function = import_torchtitan("components.loss").build_cross_entropy_loss(job)
    optimizers = import_torchtitan("components.optimizer").build_optimizers([network], job.optimizer, dims)
    utils = import_torchtitan("distributed.utils")
    precision = utils.maybe_enable_amp(dims, "bfloat16", device.type)
    tokens_BT1 = torch.randint(0, vocab, (batch, length + 1), generator=torch.Generator().manual_seed(1)).to(device)

    def step(_: int) -> float:
        """Run a training step and return its loss. The number of the step is not used."""
        optimizers.zero_grad()
        total = torch.zeros((), device=device)
        for micro_batch_BT1 in tokens_BT1.split(micro):
            with precision:
                outputs = network(micro_batch_BT1[:, :-1])
                loss = loss_function(outputs, micro_batch_BT1[:, 1:]) / (batch * length)
            del outputs
            loss.backward()
            total += loss.detach()
        utils.clip_grad_norm_(list(network.parameters()), 1.0, foreach=True)
        optimizers.step()
        return total.item()

    result = time_steps(step, steps)
    result["parameters"] = sum(p.numel() for p in network.parameters())
    return add_rates(result, model, vocab, length, batch * length)


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[2]), sys.argv[3], sys.argv[4:], int(sys.argv[1]))), flush=True)

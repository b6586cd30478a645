"""The same steps by torchtitan 0.2.2: its model, loss, optimizer, recomputation and compilation, put together as its
trainer does on one GPU (torchtitan/train.py, `forward_backward_step` and `train_step`).

    python -m benchmarks.gpu.titan STEPS MICRO_BATCH none|selective|full [key=value …]     one measurement, as JSON

The shapes are those of configs/lm-1b.yaml with weights of its own for the output layer: torchtitan's model has no tied
ones. Weights and moments are fp32, products bf16 by autocast, as it comes.
"""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType
from typing import Any

from benchmarks.gpu import ONE_GPU_OVERRIDES, ROOT
from benchmarks.gpu.speed import TOKENS, rates, timed

CONFIG = ROOT / "configs/lm-1b.yaml"
UNTIED = "model.tie_word_embeddings=false"


class _Unused(ModuleType):
    """In place of what torchtitan imports for its data and its plots, of which nothing is used here."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def part(name: str) -> Any:
    """A module of torchtitan, which need not be there to check this file."""
    for unused in ("datasets", "datasets.distributed", "torch.utils.tensorboard"):
        sys.modules.setdefault(unused, _Unused(unused))
    return importlib.import_module(f"torchtitan.{name}")


def measure(micro: int, recompute: str, overrides: list[str], steps: int) -> dict[str, Any]:
    """One measurement in this process."""
    import torch

    from pipeline.config.read import load_config

    config = load_config(CONFIG, [*ONE_GPU_OVERRIDES, UNTIED, "train.global_batch=64", *overrides])
    model, length, vocab = config.model, config.data.sequence_length, config.data.tokenizer.vocab_size
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = max(4, TOKENS // length) if device.type == "cuda" else 4
    job = part("config").JobConfig()
    job.compile.enable = config.train.compile
    job.activation_checkpoint.mode = recompute
    job.activation_checkpoint.selective_ac_option = "op"  # as ours; "2" would do every second block again, whole
    job.training.seq_len = length
    dims = part("distributed").ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    llama3 = part("models.llama3")
    arguments = llama3.TransformerModelArgs(
        dim=model.dim, n_layers=model.layers, n_heads=model.heads, n_kv_heads=model.num_kv_heads, vocab_size=vocab,
        multiple_of=64, ffn_dim_multiplier=model.ffn_size / int(2 * 4 * model.dim / 3), rope_theta=model.rope_theta,
        max_seq_len=length,
    )  # fmt: skip
    with torch.device("meta"):
        net = llama3.Transformer(arguments)
    net = llama3.parallelize_llama(net, dims, job)
    net.to_empty(device=device)
    with torch.no_grad():
        net.init_weights(buffer_device=None)
    net.train()
    loss_of = part("components.loss").build_cross_entropy_loss(job)
    optimizers = part("components.optimizer").build_optimizers([net], job.optimizer, dims)
    utils = part("distributed.utils")
    precision = utils.maybe_enable_amp(dims, "bfloat16", device.type)
    tokens_BT1 = torch.randint(0, vocab, (batch, length + 1), generator=torch.Generator().manual_seed(1)).to(device)

    def step(_: int) -> float:
        optimizers.zero_grad()
        total = torch.zeros((), device=device)
        for piece in tokens_BT1.split(micro):
            with precision:
                outputs = net(piece[:, :-1])
                loss = loss_of(outputs, piece[:, 1:]) / (batch * length)
            del outputs
            loss.backward()
            total += loss.detach()
        utils.clip_grad_norm_(list(net.parameters()), 1.0, foreach=True)
        optimizers.step()
        return total.item()

    found = timed(step, steps)
    found["parameters"] = sum(p.numel() for p in net.parameters())
    return rates(found, model, vocab, length, batch * length)


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[2]), sys.argv[3], sys.argv[4:], int(sys.argv[1]))), flush=True)

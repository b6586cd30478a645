"""Compare the memory of training all weights, an adapter (LoRA), and an adapter of quantized weights (QLoRA).

    python -m benchmarks.adapters

One process trains three steps of a decoder of 114 million parameters on a CPU, in bf16. The planned memory is that of
`plan` for a CPU. The measured memory is the largest number of bytes of all tensors during the third step. The memory of
a CPU process would not be useful, because libraries need hundreds of megabytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.table import write_table
from pipeline.base.dist_env import RankInfo
from pipeline.config.read import parse_config
from pipeline.config.sections import Config
from pipeline.parallel.mesh import resolve_layout
from pipeline.run.directory import Run
from planning.memory import MEMORY_KINDS, estimate_memory
from planning.timeline import rank_actions
from tests.publish.test_open_weights import save_random_model
from tests.support.ranks import run_ranks

VOCAB = 4096
SIZES: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 9, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": VOCAB, "max_position_embeddings": 256,
}  # fmt: skip
MATRICES = ["*.self_attn.*", "*.mlp.*"]
KINDS: list[tuple[str, dict[str, Any] | None]] = [
    ("all weights", None),
    ("LoRA, rank 16: q_proj, v_proj", {"rank": 16}),
    ("LoRA, rank 16: all layers", {"rank": 16, "targets": MATRICES}),
    ("QLoRA, rank 16: all layers", {"rank": 16, "targets": MATRICES, "base": "nf4"}),
]


def make_config(folder: Path, adapter: dict[str, Any] | None, checkpointing: str) -> Config:
    """Return the config of a run of one rank that starts from the model in `folder`."""
    return parse_config(
        {
            "run": {"name": "adapters"},
            "data": {"sequence_length": 256},
            "model": {"init_from": str(folder)},
            "adapter": adapter,
            "parallel": {"activation_checkpointing": checkpointing},
            "train": {"steps": 3, "global_batch": 4, "micro_batch": 4, "precision": "bf16"},
            "stages": {"train": {"tasks_per_node": 1}},
        },
        "adapters",
    )


def measure_on_rank(rank_info: RankInfo, path: Path, config: Config) -> int:
    """Train three steps. Return the largest number of bytes of all tensors in the third step."""
    import torch

    from pipeline.comm import groups
    from pipeline.model.open_weights import open_initial_weights
    from pipeline.model.task import DecoderTask
    from pipeline.train.engine import Engine
    from planning.rehearse import TensorAccount

    groups.configure_determinism(config)
    world = groups.join_process_group(rank_info, config)
    tokens = torch.randint(0, VOCAB, (4, 257), generator=torch.Generator().manual_seed(0))
    with TensorAccount() as account:
        task = DecoderTask(config, VOCAB)
        source = open_initial_weights(Run(path, config), task, groups.new_control_group())
        engine = Engine(config, resolve_layout(config), world, task, source=source)
        for step in (1, 2, 3):
            account.reset()
            engine.backward({"tokens": tokens}, step)
            engine.update_weights(engine.clip_gradients(1.0).item())
    return account.peak


def main() -> None:
    """Measure each kind of training, and write benchmarks/results/adapters.md."""
    rows = []
    with TemporaryDirectory() as folder:
        path = Path(folder)
        save_random_model(path, "llama", **SIZES)
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
        for checkpointing in ("none", "full"):
            for name, adapter in KINDS:
                config = make_config(path, adapter, checkpointing)
                layout = resolve_layout(config)
                memory = estimate_memory(config, layout, 0, VOCAB, rank_actions(layout)[0], on_cpu=True)
                measured = run_ranks(1, measure_on_rank, path, config, timeout=300)[0]
                sizes = [*(getattr(memory, kind) for kind in MEMORY_KINDS), memory.total, measured]
                rows.append([name, checkpointing, *(f"{size / 1e6:.0f}" for size in sizes)])
                rows[-1].append(f"{measured / memory.total:.2f}")
    write_table(
        "adapters",
        "Memory of adapters",
        "MB of one rank on a CPU, 114 million parameters, bf16, 4 sequences of 256 tokens. Method: "
        "`benchmarks/adapters.py`.",
        ["trained", "recomputed", *MEMORY_KINDS, "planned", "measured", "measured / planned"],
        rows,
    )


if __name__ == "__main__":
    main()

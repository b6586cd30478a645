"""Read a CSV file of published training runs, and convert each row to a `Workload` and a `Machine` for the prediction.

Missing values are replaced by the defaults of the framework that the run used. `TRAITS` describes how each framework
computes, according to public sources. Nothing in this module is fitted to the rows.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.footprint import estimate_footprint
from pipeline.base.errors import UserError
from planning.machine import Link, Machine, load_machine
from planning.predict import predict_step
from planning.workload import Workload

OTHER_MACHINES = Path(__file__).parent / "machines"
"""Machine files of devices that published runs used and that Sluice does not support: TPUs and Gaudi."""


class UnsupportedRowError(ValueError):
    """A row that cannot be predicted. The message gives the reason."""


@dataclass(frozen=True)
class Row:
    """One published run."""

    id: str
    source: str
    """Name of the publication, which usually contains the name of the framework."""
    model: str
    work: Workload
    machine: Machine
    tokens: float
    """Published tokens per second of one GPU. If only the MFU is published, they are computed from it."""
    gib: float | None
    """Published memory of the fullest rank in GiB; None if it is missing."""


DEFAULT_VOCAB = 50304
"""Vocabulary of a row that states none: that of GPT-2, padded to a multiple of 128."""
GPUS = (
    (r"GB300", "gb300"), (r"GB200", "gb200"), (r"B200|B100|B300", "b200"), (r"H200|GH200", "h200"), (r"H20\b", "h20"),
    (r"H800", "h800"), (r"H100.*(96GB|HBM2e)", "h100-96"), (r"H100.*PCI", "h100-pcie"), (r"H100", "h100"),
    (r"A800", "a800-80"), (r"A100.*40", "a100-40"), (r"A100", "a100-80"), (r"MI300|MI325", "mi300x"),
    (r"V100", "v100-32"), (r"MI350|MI355", "mi355x"), (r"gaudi", "gaudi2"), (r"MI250", "mi250x"),
    (r"v6e|trillium", "tpu-v6e"), (r"v5p", "tpu-v5p"),
    (r"v5e|v5.?lite", "tpu-v5e"), (r"TPU.?v?4", "tpu-v4"),
)  # fmt: skip
"""Pattern of a GPU's name, and its machine file. The first match counts."""
TRAITS: tuple[tuple[str, dict[str, Any]], ...] = (
    # These frameworks have hand-written fused kernels, Transformer Engine and cuDNN. Tensor-parallel communication
    # overlaps with matrix products.
    (r"nemo|dgxc|mlperf|megascale|megatron-bridge|transformer.?engine|deepseek",
     {"by_hand": True, "fused": True, "native": True, "hide_tensor": True, "each_micro_batch": False}),
    (r"zero bubble", {"by_hand": True, "fused": True, "scores": True, "each_micro_batch": False}),
    (r"megatron|deepspeed|axonn|gpt-neox|colossal|bloom", {"by_hand": True, "fused": True, "each_micro_batch": False}),
    (r"maxtext|jax|levanter|paxml", {"by_hand": True, "fused": True, "native": True, "hide_tensor": True}),
    (r"nanotron", {"hide_data": False, "each_micro_batch": False}),
    (r"", {}),
)  # fmt: skip
"""Pattern of a row's source, and fields of `Workload` that describe how this framework computes.

The first match counts. `by_hand` is not a field of `Workload`. It marks frameworks whose selective recomputation
recomputes attention.
"""


def read_rows(path: Path) -> tuple[list[Row], list[tuple[str, str]]]:
    """Return the rows of a CSV file that can be predicted, and the ids of all other rows with the reason."""
    supported: list[Row] = []
    unsupported: list[tuple[str, str]] = []
    with path.open(newline="") as file:
        for values in csv.DictReader(file):
            try:
                row = parse_row(values)
                try:
                    predict_step(row.work, row.machine)
                except (RuntimeError, LookupError, ValueError):
                    # The schedule does not support this number of micro-batches. 1f1b is the most similar schedule.
                    row = replace(row, work=replace(row.work, schedule="1f1b", virtual_stages=1, stage_layers=()))
                    predict_step(row.work, row.machine)
                supported.append(row)
            except (UserError, ValueError, ArithmeticError, LookupError, RuntimeError) as error:
                unsupported.append((values.get("id") or "?", str(error)))
    return supported, unsupported


def _parse_number(row: dict[str, str], key: str, default: float | None = None) -> float:
    """Return a number of a row. Raises UnsupportedRowError if it is missing or malformed and has no default."""
    text = (row.get(key) or "").strip()
    try:
        return float(text)
    except ValueError:
        if default is None:
            raise UnsupportedRowError(f"{key} is {text!r}" if text else f"{key} is missing") from None
        return default


def _find_machine(row: dict[str, str]) -> Machine:
    """Return the machine of a row, with the bandwidths and node size that the row states."""
    gpu = f"{row['gpu']} {row.get('gpu_mem_gb') or ''}"
    name = next((name for pattern, name in GPUS if re.search(pattern, gpu, re.IGNORECASE)), None)
    if name is None:
        raise UnsupportedRowError(f"no machine file for {row['gpu']}")
    other_file = OTHER_MACHINES / f"{name}.yaml"
    machine = load_machine(str(other_file) if other_file.exists() else name)
    inside = _parse_number(row, "intra_bw_GBps", machine.inside.bandwidth / 1e9) * 1e9
    between = _parse_number(row, "inter_bw_GBps_per_gpu", machine.between.bandwidth / 1e9) * 1e9
    # In machine files with more than 8 GPUs per node (GB200, TPUs), the links inside a node connect several hosts. A
    # row for such a machine may state only the GPUs of one host.
    node_size = int(_parse_number(row, "gpus_per_node", machine.gpus_per_node))
    return machine.model_copy(
        update={
            "gpus_per_node": max(node_size, machine.gpus_per_node if machine.gpus_per_node > 8 else 1),
            "inside": Link(bandwidth=inside, latency=machine.inside.latency),
            "between": Link(bandwidth=between, latency=machine.between.latency),
        }
    )


def parse_precision(text: str) -> str:
    """Return the precision of the matrix products that `text` names, for example bf16 for "bf16+fp32grad".

    Precisions of gradients, master weights, optimizer states or messages do not count. If several precisions remain,
    the products use the lowest ("fp16/fp32 mixed"). If the text names no precision, the result is bf16.
    """
    text = text.lower().replace("bfloat", "bf").replace("float", "fp")
    other_uses = r"grad|master|optim|state|reduc|accum|comm|gather|all"
    precisions = re.findall(r"(fp4|fp8|fp16|bf16|fp32)[\s_-]*(\w*)", text)
    product_precisions = [name for name, use in precisions if not re.match(other_uses, use)]
    order = ("fp4", "fp8", "fp16", "bf16", "fp32")
    return min(product_precisions or [name for name, _ in precisions] or ["bf16"], key=order.index)


def _parse_schedule(text: str, virtual_stages: int) -> str:
    """Return the pipeline schedule that `text` names; if it names none, 1f1b or interleaved_1f1b."""
    for pattern, name in (
        (r"dualpipe", "dualpipe_v"),
        (r"zb.?v", "zbv"),
        (r"zb-?2p", "zb2p"),
        (r"zb", "zb1p"),
        (r"gpipe|afab", "gpipe"),
    ):
        # A text that also contains "1F1B" names a variant of 1F1B.
        if re.search(pattern, text, re.IGNORECASE) and "1F1B" not in text:
            return name
    return "interleaved_1f1b" if virtual_stages > 1 else "1f1b"


def _parse_experts(row: dict[str, str], layers: int, hidden: int, attention_weights: int) -> dict[str, Any]:
    """Return the fields of `Workload` that describe a mixture of experts; empty for a dense model.

    The number of experts comes from the notes or the name of the model. The width of an expert follows from the total
    number of weights and from the number of weights that one token uses. Defaults: 64 experts. A token uses two of them
    if their number is known but the number of used weights is not.
    """
    notes = f"{row.get('moe_notes') or ''} {row.get('notes') or ''}"
    is_named_mixture = re.search(r"\d+x\d+b|moe|a\d+b\b", row["model"], re.I)
    if not (row.get("moe_notes") or _parse_number(row, "ep", 1) > 1 or is_named_mixture):
        return {}
    count_match = re.search(r"(\d+)\s*(?:routed\s*)?experts", notes, re.I) or re.search(r"(\d+)x\d", row["model"])
    active_match = re.search(r"top-?\s*(\d+)", notes, re.I)
    if not row.get("n_matmul_b") and count_match:  # The MLP width in the row is then the width of one expert.
        active = int(active_match.group(1)) if active_match else 2
        return {"experts": int(count_match.group(1)), "active": active}
    embedding_weights = _parse_number(row, "vocab", DEFAULT_VOCAB) * hidden
    all_weights = _parse_number(row, "params_b") * 1e9 - 2 * embedding_weights - layers * attention_weights
    used_weights = _parse_number(row, "n_matmul_b") * 1e9 - embedding_weights - layers * attention_weights
    count = int(count_match.group(1)) if count_match else 64
    active = int(active_match.group(1)) if active_match else max(1, round(count * used_weights / all_weights))
    return {"experts": count, "active": active, "ffn": max(1, round(used_weights / (active * layers * 3 * hidden)))}


def _balance_stages(work: Workload) -> tuple[int, ...]:
    """Return the number of blocks of each pipeline-parallel stage, so that the stages have similar numbers of weights.

    The weights of the output layer count as part of the last stage.
    """
    weights_per_block = work.attention_weights + work.expert_weights
    output_weights = work.vocab * work.hidden
    weights = [0] * (work.pipeline - 1) + [output_weights]
    block_counts = [0] * work.pipeline
    for _ in range(work.layers):
        lightest = weights.index(min(weights))
        block_counts[lightest] += 1
        weights[lightest] += weights_per_block
    return tuple(block_counts)


def _parse_recomputation(text: str, traits: dict[str, Any]) -> str:
    """Return the kind of activation recomputation of a row, as in `Workload.recompute`.

    Args:
        text: the row's description of the recomputation, in the terms of its framework.
        traits: properties of this framework (see `TRAITS`).
    """
    if re.search(r"full|block|uniform|yes", text, re.IGNORECASE):
        return "full"
    if re.search(r"selective\((op|layer)", text) or ("selective" in text and not traits.get("by_hand")):
        # Torch's selective recomputation recomputes every second matrix product, or every second block.
        return "half"
    return "attention" if re.search(r"selective|attn|attention|mlp|partial", text, re.IGNORECASE) else "none"


def parse_row(row: dict[str, str]) -> Row:
    """Return the run of one row of the CSV file.

    Raises:
        UnsupportedRowError: a value is missing or malformed, or there is no machine file for the GPU or the precision.
        ValueError: the values do not fit together.
    """
    tokens = _parse_number(row, "tokens_per_s_per_gpu", _parse_number(row, "tokens_per_s_per_gpu_derived", 0))
    if not tokens:
        raise UnsupportedRowError("tokens_per_s_per_gpu and tokens_per_s_per_gpu_derived are missing")
    layers, hidden, heads = (int(_parse_number(row, key)) for key in ("layers", "hidden", "heads"))
    kv_heads = int(_parse_number(row, "kv_heads", heads))
    matrices = int(_parse_number(row, "mlp_mats", 3))
    pipeline, tensor, context = (int(_parse_number(row, key, 1)) for key in ("pp", "tp", "cp"))
    gpus = int(_parse_number(row, "gpus"))
    data = int(_parse_number(row, "dp_total", gpus / pipeline / tensor / context))
    # Assume ZeRO 1 for runs in bf16 or fp8 that state no ZeRO level.
    zero = int(_parse_number(row, "zero_stage", 1 if row.get("precision") in ("fp8", "bf16") else 0))
    shard = int(_parse_number(row, "dp_shard_degree", data if zero else 1))
    if zero == 3 and context > 1 and shard == data * context:  # The row counts context-parallel ranks as shards.
        shard = data
    shard = shard if zero else 1
    # Torch's pipelines with ZeRO 3 use as many micro-batches as pipeline ranks.
    zero3_pipeline_batch = max(1, _parse_number(row, "global_batch_seqs", 0) / data / pipeline)
    micro = int(_parse_number(row, "micro_batch", zero3_pipeline_batch if zero == 3 and pipeline > 1 else 1))
    default_batch = data * micro * (8 * pipeline if pipeline > 1 else 1)
    batch = int(_parse_number(row, "global_batch_seqs", default_batch))
    batch = max(1, batch // (data * micro)) * data * micro  # whole micro-batches on each data-parallel rank
    source = f"{row['source']} {row.get('id') or ''}"
    if "megatron" in source.lower() and _parse_number(row, "year", 2024) >= 2024:
        # Since 2024, Megatron uses Transformer Engine and overlaps communication, as NeMo does. With "mlperf", the
        # first pattern of TRAITS matches.
        source += " mlperf"
    traits = next(fields for pattern, fields in TRAITS if re.search(pattern, source, re.IGNORECASE))
    traits = {"fused": row.get("compile") == "yes", **traits}
    notes = row.get("notes") or ""
    checkpointing = row.get("activation_ckpt") or ""
    schedule = row.get("schedule") or ""
    # Some rows name an interleaved schedule ("Interleaved" or "interleaved") without its number of stages per rank.
    virtual_stages = int(_parse_number(row, "virtual_stages", 1)) if pipeline > 1 else 1
    if "nterleaved" in schedule and virtual_stages == 1 and pipeline > 1:
        virtual_stages = 2
    if re.search("dualpipe|zb.?v", schedule, re.IGNORECASE):
        virtual_stages = 2
    ffn = int(_parse_number(row, "ffn", 8 / 3 * hidden if matrices == 3 else 4 * hidden))
    attention_weights = hidden * (hidden // heads) * 2 * (heads + kv_heads)
    traits["hide_tensor"] = traits.get("hide_tensor", False) or "AsyncTP" in notes
    # Assume that runs until 2022 have no fused attention.
    if _parse_number(row, "year", 2024) <= 2022:
        traits["scores"] = True
    # The mixed precision mode PURE of llm-foundry reduces gradients in 16 bits.
    if "mp mode pure" in notes.lower():
        traits["reduce_bytes"] = 2
    traits |= _parse_experts(row, layers, hidden, attention_weights)
    work = Workload(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn,
        vocab=int(_parse_number(row, "vocab", DEFAULT_VOCAB)), sequence=int(_parse_number(row, "seq_len")),
        micro_batch=micro, global_batch=batch, matrices=matrices, tied=row.get("tied_embeddings") == "1", tensor=tensor,
        pipeline=pipeline, context=context, expert=int(_parse_number(row, "ep", 1)), replicate=max(1, data // shard),
        shard=shard, zero=zero, schedule=_parse_schedule(schedule, virtual_stages), virtual_stages=virtual_stages,
        precision=parse_precision(row.get("precision") or "bf16"),
        recompute=_parse_recomputation(checkpointing, traits),
        split_sequence=tensor > 1 and row.get("sequence_parallel") != "no",
    )  # fmt: skip
    traits.pop("by_hand", None)
    work = replace(work, **traits)
    if "nanotron" in source:
        work = replace(work, stage_layers=_balance_stages(work))
    machine = _find_machine(row)
    if work.precision not in machine.achievable and work.precision not in ("bf16", "fp16"):
        raise UnsupportedRowError(f"{machine.gpu} has no {work.precision}")
    if not checkpointing:  # Assume the least recomputation with which the run fits into the GPU's memory.
        kinds_that_fit = [
            kind
            for kind in ("none", "selective", "full")
            if estimate_footprint(replace(work, recompute=kind)).total < machine.memory_gib * 2**30
        ]
        work = replace(work, recompute=kinds_that_fit[0] if kinds_that_fit else "full")
    return Row(
        id=row["id"], source=row["source"], model=row["model"], work=work, machine=machine, tokens=tokens,
        gib=_parse_number(row, "mem_gb", 0) or None,
    )  # fmt: skip

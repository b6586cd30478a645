"""Published training runs, row by row, as the prediction's `Workload` and `Machine`; or why a row cannot be taken.

What a row leaves open is filled in as the frameworks do by default; `TRAITS` are what is publicly known of how they
compute. Nothing here is fitted.
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
"""Machines that published runs used and that Sluice does not support: TPUs and Gaudi."""


class Refused(ValueError):
    """A row that cannot be taken, in words."""


@dataclass(frozen=True)
class Row:
    """One published run."""

    id: str
    source: str
    model: str
    work: Workload
    machine: Machine
    tokens: float
    """Tokens per second of one GPU, as printed; computed back from MFU where nothing is."""
    gib: float | None
    """Memory of the fullest rank."""


GPUS = (
    (r"GB300", "gb300"), (r"GB200", "gb200"), (r"B200|B100|B300", "b200"), (r"H200|GH200", "h200"), (r"H20\b", "h20"),
    (r"H800", "h800"), (r"H100.*(96GB|HBM2e)", "h100-96"), (r"H100.*PCI", "h100-pcie"), (r"H100", "h100"),
    (r"A800", "a800-80"), (r"A100.*40", "a100-40"), (r"A100", "a100-80"), (r"MI300|MI325", "mi300x"),
    (r"V100", "v100-32"), (r"MI350|MI355", "mi355x"), (r"gaudi", "gaudi2"), (r"MI250", "mi250x"),
    (r"v6e|trillium", "tpu-v6e"), (r"v5p", "tpu-v5p"),
    (r"v5e|v5.?lite", "tpu-v5e"), (r"TPU.?v?4", "tpu-v4"),
)  # fmt: skip
TRAITS: tuple[tuple[str, dict[str, Any]], ...] = (
    # fused kernels by hand, those of Transformer Engine and cuDNN, tensor parallelism beside products
    (r"nemo|dgxc|mlperf|megascale|megatron-bridge|transformer.?engine|deepseek",
     {"by_hand": True, "fused": True, "native": True, "hide_tensor": True, "each_micro_batch": False}),
    (r"zero bubble", {"by_hand": True, "fused": True, "scores": True, "each_micro_batch": False}),
    (r"megatron|deepspeed|axonn|gpt-neox|colossal|bloom", {"by_hand": True, "fused": True, "each_micro_batch": False}),
    (r"maxtext|jax|levanter|paxml", {"by_hand": True, "fused": True, "native": True, "hide_tensor": True}),
    (r"nanotron", {"hide_data": False, "each_micro_batch": False}),
    (r"", {}),
)  # fmt: skip
"""By words in a row's source, first match."""


def rows_of(path: Path) -> tuple[list[Row], list[tuple[str, str]]]:
    """The rows that can be taken, and ids of the others with the reason."""
    taken, refused = [], []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            try:
                made = row_of(row)
                try:
                    predict_step(made.work, made.machine)
                except (RuntimeError, LookupError, ValueError):  # batches that its schedule does not take: the nearest
                    made = replace(made, work=replace(made.work, schedule="1f1b", virtual_stages=1, stage_layers=()))
                    predict_step(made.work, made.machine)
                taken.append(made)
            except (UserError, ValueError, ArithmeticError, LookupError, RuntimeError) as error:
                refused.append((row.get("id") or "?", str(error)))
    return taken, refused


def _number(row: dict[str, str], key: str, otherwise: float | None = None) -> float:
    text = (row.get(key) or "").strip()
    try:
        return float(text)
    except ValueError:
        if otherwise is None:
            raise Refused(f"no {key} is printed" if not text else f"{key} is {text!r}") from None
        return otherwise


def _machine(row: dict[str, str]) -> Machine:
    gpu = f"{row['gpu']} {row.get('gpu_mem_gb') or ''}"
    name = next((name for pattern, name in GPUS if re.search(pattern, gpu, re.IGNORECASE)), None)
    if name is None:
        raise Refused(f"no machine file for {row['gpu']}")
    own_file = OTHER_MACHINES / f"{name}.yaml"
    machine = load_machine(str(own_file) if own_file.exists() else name)
    inside = _number(row, "intra_bw_GBps", machine.inside.bandwidth / 1e9) * 1e9
    between = _number(row, "inter_bw_GBps_per_gpu", machine.between.bandwidth / 1e9) * 1e9
    node = int(_number(row, "gpus_per_node", machine.gpus_per_node))
    return machine.model_copy(
        update={
            "gpus_per_node": max(node, machine.gpus_per_node if machine.gpus_per_node > 8 else 1),
            "inside": Link(bandwidth=inside, latency=machine.inside.latency),
            "between": Link(bandwidth=between, latency=machine.between.latency),
        }
    )


def parse_precision(text: str) -> str:
    """Return the precision of the matrix products that `text` names, for example bf16 for "bf16+fp32grad".

    Precisions of gradients, master weights, optimizer states or messages do not count. If several remain, the lowest
    is the one that products use ("fp16/fp32 mixed"). Without any name it is bf16.
    """
    text = text.lower().replace("bfloat", "bf").replace("float", "fp")
    others = r"grad|master|optim|state|reduc|accum|comm|gather|all"
    found = re.findall(r"(fp4|fp8|fp16|bf16|fp32)[\s_-]*(\w*)", text)
    products = [name for name, use in found if not re.match(others, use)]
    order = ("fp4", "fp8", "fp16", "bf16", "fp32")
    return min(products or [name for name, _ in found] or ["bf16"], key=order.index)


def _schedule(text: str, virtual: int) -> str:
    for pattern, name in (
        (r"dualpipe", "dualpipe_v"),
        (r"zb.?v", "zbv"),
        (r"zb-?2p", "zb2p"),
        (r"zb", "zb1p"),
        (r"gpipe|afab", "gpipe"),
    ):
        if re.search(pattern, text, re.IGNORECASE) and "1F1B" not in text:
            return name
    return "interleaved_1f1b" if virtual > 1 else "1f1b"


def _experts(row: dict[str, str], layers: int, hidden: int, attention: int) -> dict[str, Any]:
    """Experts of a mixture, from its notes and from how many weights it has and uses."""
    notes = f"{row.get('moe_notes') or ''} {row.get('notes') or ''}"
    if not (
        row.get("moe_notes") or _number(row, "ep", 1) > 1 or re.search(r"\d+x\d+b|moe|a\d+b\b", row["model"], re.I)
    ):
        return {}
    found = re.search(r"(\d+)\s*(?:routed\s*)?experts", notes, re.I) or re.search(r"(\d+)x\d", row["model"])
    top = re.search(r"top-?\s*(\d+)", notes, re.I)
    if not row.get("n_matmul_b") and found:  # the MLP's width is that of an expert
        return {"experts": int(found.group(1)), "active": int(top.group(1)) if top else 2}
    vocab = _number(row, "vocab", 50304) * hidden
    whole = _number(row, "params_b") * 1e9 - 2 * vocab - layers * attention
    used = _number(row, "n_matmul_b") * 1e9 - vocab - layers * attention
    count = int(found.group(1)) if found else 64
    active = int(top.group(1)) if top else max(1, round(count * used / whole))
    return {"experts": count, "active": active, "ffn": max(1, round(used / (active * layers * 3 * hidden)))}


def _balanced(work: Workload) -> tuple[int, ...]:
    """Blocks of each stage where the output layer counts as what it costs."""
    block, head = work.attention_weights + work.expert_weights, work.vocab * work.hidden
    costs, sizes = [0] * (work.pipeline - 1) + [head], [0] * work.pipeline
    for _ in range(work.layers):
        cheapest = costs.index(min(costs))
        sizes[cheapest] += 1
        costs[cheapest] += block
    return tuple(sizes)


def _recompute(text: str, traits: dict[str, Any]) -> str:
    """What a framework means by its word for recomputation."""
    if re.search(r"full|block|uniform|yes", text, re.IGNORECASE):
        return "full"
    if re.search(r"selective\((op|layer)", text) or ("selective" in text and not traits.get("by_hand")):
        return "half"  # torch's: every other product, or block
    return "attention" if re.search(r"selective|attn|attention|mlp|partial", text, re.IGNORECASE) else "none"


def row_of(row: dict[str, str]) -> Row:
    """One row. Raises Refused, and ValueError, for what cannot be taken."""
    tokens = _number(row, "tokens_per_s_per_gpu", _number(row, "tokens_per_s_per_gpu_derived", 0))
    if not tokens:
        raise Refused("no tokens/s is printed, nor can be computed back")
    layers, hidden, heads = (int(_number(row, key)) for key in ("layers", "hidden", "heads"))
    kv_heads, matrices = int(_number(row, "kv_heads", heads)), int(_number(row, "mlp_mats", 3))
    pipeline, tensor, context = (int(_number(row, key, 1)) for key in ("pp", "tp", "cp"))
    gpus = int(_number(row, "gpus"))
    data = int(_number(row, "dp_total", gpus / pipeline / tensor / context))
    zero = int(_number(row, "zero_stage", 1 if row.get("precision") in ("fp8", "bf16") else 0))
    shard = int(_number(row, "dp_shard_degree", data if zero else 1))
    if zero == 3 and context > 1 and shard == data * context:
        shard = data
    shard = shard if zero else 1
    each = _number(row, "global_batch_seqs", 0) / data / pipeline  # torch's pipelines: as many micro-batches as ranks
    micro = int(_number(row, "micro_batch", max(1, each) if zero == 3 and pipeline > 1 else 1))
    batch = int(_number(row, "global_batch_seqs", data * micro * (8 * pipeline if pipeline > 1 else 1)))
    batch = max(1, batch // (data * micro)) * data * micro
    source = f"{row['source']} {row.get('id') or ''}"
    if "megatron" in source.lower() and _number(row, "year", 2024) >= 2024:
        source += " mlperf"  # since then it has Transformer Engine and its overlaps, as NeMo
    traits = next(made for pattern, made in TRAITS if re.search(pattern, source, re.IGNORECASE))
    traits = {"fused": row.get("compile") == "yes", **traits}
    notes, checkpointing = row.get("notes") or "", row.get("activation_ckpt") or ""
    virtual = int(_number(row, "virtual_stages", 1)) if pipeline > 1 else 1
    if "nterleaved" in (row.get("schedule") or "") and virtual == 1 and pipeline > 1:
        virtual = 2
    if re.search("dualpipe|zb.?v", row.get("schedule") or "", re.IGNORECASE):
        virtual = 2
    ffn = int(_number(row, "ffn", 8 / 3 * hidden if matrices == 3 else 4 * hidden))
    attention = hidden * (hidden // heads) * 2 * (heads + kv_heads)
    traits["hide_tensor"] = traits.get("hide_tensor", False) or "AsyncTP" in notes
    if _number(row, "year", 2024) <= 2022:
        traits["scores"] = True
    if "mp mode pure" in notes.lower():
        traits["reduce_bytes"] = 2
    if made := _experts(row, layers, hidden, attention):
        traits |= made
    work = Workload(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=int(_number(row, "vocab", 50304)),
        sequence=int(_number(row, "seq_len")), micro_batch=micro, global_batch=batch, matrices=matrices,
        tied=row.get("tied_embeddings") == "1", tensor=tensor, pipeline=pipeline, context=context,
        expert=int(_number(row, "ep", 1)), replicate=max(1, data // shard), shard=shard, zero=zero,
        schedule=_schedule(row.get("schedule") or "", virtual), virtual_stages=virtual,
        precision=parse_precision(row.get("precision") or "bf16"), recompute=_recompute(checkpointing, traits),
        split_sequence=tensor > 1 and row.get("sequence_parallel") != "no",
    )  # fmt: skip
    traits.pop("by_hand", None)
    work = replace(work, **traits)
    if "nanotron" in source:
        work = replace(work, stage_layers=_balanced(work))
    machine = _machine(row)
    if work.precision not in machine.achievable and work.precision not in ("bf16", "fp16"):
        raise Refused(f"{machine.gpu} has no {work.precision}")
    if not checkpointing:  # the least that fits
        kinds = ("none", "selective", "full")
        fits = [
            kind
            for kind in kinds
            if estimate_footprint(replace(work, recompute=kind)).total < machine.memory_gib * 2**30
        ]
        work = replace(work, recompute=fits[0] if fits else "full")
    return Row(
        id=row["id"], source=row["source"], model=row["model"], work=work, machine=machine, tokens=tokens,
        gib=_number(row, "mem_gb", 0) or None,
    )  # fmt: skip

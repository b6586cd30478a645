"""Measure attention on packed documents: memory and CPU time of one attention layer, forward and backward.

    python -m benchmarks.attention

Each measurement runs in a separate process. `dense mask` is torch's attention with a mask of all pairs of tokens, as
in earlier versions of Sluice. The peak is the growth of the resident memory (VmHWM) above that before the forward pass.
To measure it, freed memory is returned to the system at once, which costs CPU time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.table import write_table

DOCUMENT = 512
"""Length of the documents in tokens."""
ROWS = [("ranges", 8192), ("ranges", 16384), ("ranges", 32768), ("dense mask", 8192), ("dense mask", 16384)]
REPEATS = 5
"""Number of measured passes of each row."""


def measure(kind: str, length: int) -> dict[str, float]:
    """Return the CPU seconds and the peak memory in MB of one layer, forward and backward, in this process."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from pipeline.config.sections import ModelConfig
    from pipeline.model.decoder import Attention, RotaryEmbedding, TokenPositions

    torch.manual_seed(0)
    config = ModelConfig(dim=512, heads=8, kv_heads=4)
    layer = Attention(config, None)
    starts_BT = (torch.arange(length) % DOCUMENT == 0).unsqueeze(0)
    positions = TokenPositions(RotaryEmbedding(config, length), starts_BT, [None])
    if kind == "dense mask":
        document_T = torch.arange(length) // DOCUMENT

        def attend(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, *_: object, **__: object) -> Tensor:
            """Return the attention with a mask of all pairs of tokens."""
            k_BHTK, v_BHTK = (x.repeat_interleave(layer.group_size, dim=1) for x in (k_BHTK, v_BHTK))
            mask_TT = (document_T.unsqueeze(1) == document_T).tril()
            out_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, mask_TT)
            return out_BHTK.transpose(1, 2).flatten(2)

        layer._attend = attend  # type: ignore[method-assign]
    short_positions = TokenPositions(RotaryEmbedding(config, DOCUMENT), starts_BT[:, :DOCUMENT], [None])
    if kind == "ranges":  # The first call loads libraries.
        layer(torch.randn(1, DOCUMENT, config.dim, requires_grad=True), short_positions).sum().backward()
    x_BTD = torch.randn(1, length, config.dim, requires_grad=True)
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to the present resident memory
    before = _read_kilobytes("VmHWM")
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        layer(x_BTD, positions).sum().backward()
        times.append(time.process_time() - start)
    return {"cpu_s": statistics.median(times), "peak_mb": (_read_kilobytes("VmHWM") - before) / 1e3}


def _read_kilobytes(name: str) -> int:
    """Return a value of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """Measure all rows, and write benchmarks/results/attention.md."""
    results: dict[tuple[str, int], dict[str, float]] = {}
    for kind, length in ROWS:
        command = [sys.executable, "-m", "benchmarks.attention", kind, str(length)]
        for name, env in (("cpu_s", {}), ("peak_mb", {"MALLOC_MMAP_THRESHOLD_": "65536"})):
            result = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=600, env={**os.environ, **env}
            )
            results.setdefault((kind, length), {})[name] = json.loads(result.stdout)[name]
    base = results["ranges", 8192]
    rows = [
        [
            kind,
            f"{length:,}",
            f"{row['peak_mb']:,.0f}",
            f"{row['peak_mb'] / base['peak_mb']:.2f}",
            f"{row['cpu_s']:.2f}",
            f"{row['cpu_s'] / base['cpu_s']:.2f}",
        ]
        for (kind, length), row in results.items()
    ]
    note = (
        f"One layer with 8 heads of 64 and 4 key heads, fp32, forward and backward, documents of {DOCUMENT} tokens. "
        f"Medians of {REPEATS} passes. Memory and time include the four projections."
    )
    header = ["attention", "tokens", "peak MB", "ratio", "CPU s", "ratio"]
    write_table("attention", "Attention on packed documents", note, header, rows)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    else:
        main()

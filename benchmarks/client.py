"""Measure the functions that a training script calls in each step: `sluice.step` and `sluice.should_stop`.

    python -m benchmarks.client

The script runs as the command of a run, so the calls are those of a real job. It also writes the same line to an open
file, for comparison. All functions are called in turn, in blocks, in one process.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.table import write_table
from cli.api import Run

SCRIPT = """
import json, time
import sluice

BLOCK = 1000
file = open("lines.txt", "w", buffering=1)
functions = {
    "write a line to a file": lambda n: file.write(json.dumps({"step": n, "loss": 0.5}) + chr(10)),
    "sluice.step(n, total, loss=0.5)": lambda n: sluice.step(n, 100000, loss=0.5),
    "sluice.should_stop()": lambda n: sluice.should_stop(),
}
times = {name: [] for name in functions}
for block in range(40):
    for name, function in functions.items():
        start = time.perf_counter()
        for number in range(BLOCK):
            function(BLOCK * block + number + 1)
        times[name].append((time.perf_counter() - start) / BLOCK * 1e6)
json.dump(times, open("times.json", "w"))
"""


def main() -> None:
    """Run the script, and write benchmarks/results/client.md."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {
            "run": {"name": "client", "root": str(folder / "runs")},
            "stages": {"measure": {"command": f"{sys.executable} script.py"}},
        }
        (folder / "source").mkdir()
        (folder / "source/script.py").write_text(SCRIPT)
        (folder / "config.yaml").write_text(json.dumps(config))
        os.chdir(folder / "source")
        run = Run.submit(folder / "config.yaml", executor="local")
        state = run.wait(timeout_s=300)
        if state != "done":
            raise RuntimeError(f"the run is {state}: {run.status()}")
        times = json.loads((run.path / "work/times.json").read_text())
        os.chdir("/")
    base = statistics.median(times["write a line to a file"])
    rows = [
        [name, f"{statistics.median(values):.1f}", f"{statistics.median(values) / base:.2f}"]
        for name, values in times.items()
    ]
    note = "Medians of 40 blocks of 1,000 calls each, in turn, in the command of a run."
    write_table("client", "Cost of the client in a training script", note, ["call", "µs", "ratio"], rows)


if __name__ == "__main__":
    main()

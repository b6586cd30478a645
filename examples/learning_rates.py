"""Compare learning rates: submit a run for each, wait for all, and print their losses.

python examples/learning_rates.py configs/quickstart.yaml 1.0e-3 3.0e-3
"""

from __future__ import annotations

import sys

from sluice import Run


def main(config: str, *rates: str) -> None:
    """Submit a run of `config` for each learning rate, wait for them, and print a table."""
    runs = {
        rate: Run.submit(config, **{"run.name": f"lr-{rate}", "optimizer.lr": float(rate)})  # the runs run side by side
        for rate in rates
    }
    print(f"{'rate':>8} {'state':>8} {'steps':>6} {'last loss':>10}")
    for rate, run in runs.items():
        state = run.wait()
        metrics = run.metrics()
        losses = metrics.get("loss") or [float("nan")]
        print(f"{rate:>8} {state:>8} {len(metrics.get('step', [])):>6} {losses[-1]:>10.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])

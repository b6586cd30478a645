"""Servers of others that tests talk to, on loopback, each started by its own program and ended by its own pid."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

START_S = 120.0


def find_free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def run_server(
    folder: Path, command: Sequence[str], health: str, more: Mapping[str, str] | None = None
) -> Iterator[None]:
    """While the block runs, `command` does, and the address `health` has answered; its log is `folder/log`."""
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **(more or {})}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_S
        while True:
            with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(health, timeout=10) as answer:
                if answer.status == 200:
                    break
            assert server.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(timeout=60)


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """MLflow's own server with SQLite; its address."""
    uri = f"http://127.0.0.1:{find_free_port()}"
    command = [sys.executable, "-m", "mlflow", "server", f"--backend-store-uri=sqlite:///{folder}/mlflow.sqlite"]
    command += [f"--artifacts-destination={folder}/artifacts", "--host=127.0.0.1", f"--port={uri.rsplit(':')[-1]}"]
    more = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with run_server(folder, [*command, "--workers=1"], f"{uri}/health", more):
        yield uri


@contextmanager
def prometheus_server(folder: Path, port: int) -> Iterator[str]:
    """Debian's Prometheus, which scrapes 127.0.0.1:`port` each second; its address."""
    (folder / "prometheus.yml").write_text(
        "scrape_configs:\n  - job_name: sluice\n    scrape_interval: 1s\n    static_configs:\n"
        f"      - targets: ['127.0.0.1:{port}']\n"
    )
    uri = f"http://127.0.0.1:{find_free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with run_server(folder, [*command, f"--web.listen-address={uri.removeprefix('http://')}"], f"{uri}/-/ready"):
        yield uri

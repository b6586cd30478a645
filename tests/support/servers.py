"""Run servers of other projects (MLflow, Prometheus) on the loopback interface for tests."""

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

START_TIMEOUT_S = 120.0


def find_free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def run_server(
    folder: Path, command: Sequence[str], health_url: str, env: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run a server during the block.

    Args:
        folder: working directory of the server. The log is written to `folder/log`.
        command: command that starts the server.
        health_url: the block starts when a request of this URL returns status 200.
        env: further environment variables.
    """
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **(env or {})}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(health_url, timeout=10) as response:
                if response.status == 200:
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
    """Run an MLflow server with an SQLite database during the block. Yield the URL of the server."""
    url = f"http://127.0.0.1:{find_free_port()}"
    command = [sys.executable, "-m", "mlflow", "server", f"--backend-store-uri=sqlite:///{folder}/mlflow.sqlite"]
    command += [f"--artifacts-destination={folder}/artifacts", "--host=127.0.0.1", f"--port={url.rsplit(':')[-1]}"]
    env = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with run_server(folder, [*command, "--workers=1"], f"{url}/health", env):
        yield url


@contextmanager
def prometheus_server(folder: Path, port: int) -> Iterator[str]:
    """Run Prometheus during the block. It scrapes 127.0.0.1:`port` every second. Yield the URL of Prometheus."""
    (folder / "prometheus.yml").write_text(
        "scrape_configs:\n  - job_name: sluice\n    scrape_interval: 1s\n    static_configs:\n"
        f"      - targets: ['127.0.0.1:{port}']\n"
    )
    url = f"http://127.0.0.1:{find_free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with run_server(folder, [*command, f"--web.listen-address={url.removeprefix('http://')}"], f"{url}/-/ready"):
        yield url

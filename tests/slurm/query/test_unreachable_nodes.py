"""Test how Sluice finds out that a node is not reachable, although Slurm has not noticed it yet."""

from __future__ import annotations

import socket

import pytest

from slurm.query import current_job
from slurm.query.current_job import find_unreachable_nodes


@pytest.mark.parametrize("shows_port", [True, False])
def test_a_node_is_unreachable_if_its_daemon_accepts_no_connection(
    monkeypatch: pytest.MonkeyPatch, shows_port: bool
) -> None:
    """scontrol shows the port of a node only if it differs from SlurmdPort, which may be a range."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        field = f" Port={port}" if shows_port else ""
        nodes = "\n".join(
            f"NodeName={name} Arch=x86_64 NodeAddr={address} NodeHostName={name}{field} Version=24.11"
            for name, address in (("n1", "127.0.0.1"), ("n2", "127.0.0.2"))
        )

        def run_slurm_command(*command: str, timeout_s: float | None = None) -> str:
            return (
                nodes if command[:3] == ("scontrol", "show", "node") else f"SlurmdPort              = {port}-{port + 2}"
            )

        monkeypatch.setattr(current_job, "run_slurm_command", run_slurm_command)
        monkeypatch.setattr("slurm.query.slurm_commands.run_slurm_command", run_slurm_command)
        monkeypatch.setattr(current_job, "_CONNECTION_TRIAL_S", 0.3)
        assert find_unreachable_nodes(["n1", "n2"]) == ["n2"]


def test_nothing_is_known_if_the_controller_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_job, "run_slurm_command", lambda *command, timeout_s=None: None)
    assert find_unreachable_nodes(["n1"]) is None
    assert find_unreachable_nodes([]) == []

"""Test the choice of TCP ports."""

from __future__ import annotations

import pytest

from pipeline.base import ports
from pipeline.base.ports import MASTER_PORTS, listen, listen_on_master_port


@pytest.mark.parametrize("local", [True, False])
def test_a_master_port_is_outside_the_range_of_outgoing_connections(local: bool) -> None:
    with listen_on_master_port(1, local=local) as server, pytest.raises(OSError):
        port = server.getsockname()[1]
        assert port in MASTER_PORTS
        listen(1, local=local, port=port)


def test_ports_in_use_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen_on_master_port(1, local=True) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(ports, "MASTER_PORTS", range(port, port + 1))
        monkeypatch.setattr(ports, "_MAX_ATTEMPTS", 1)
        with listen_on_master_port(1, local=True) as other_server:
            assert other_server.getsockname()[1] != port

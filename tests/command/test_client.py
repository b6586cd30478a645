"""Tests of the client, the package `sluice` that training scripts import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.command.client_files import CLIENT_PATH, ClientFiles


def run_script(script: str, **variables: str) -> str:
    """Run a script that imports the client, with a Python that has no other packages. Return its output."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(CLIENT_PATH), **variables}
    command = [sys.executable, "-S", "-c", f"import sluice\n{script}"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_without_sluice_nothing_happens(tmp_path: Path) -> None:
    script = (
        "sluice.step(1, 10, loss=0.5); sluice.saved('x'); sluice.saved(3)\n"
        "print(sluice.should_stop(), sluice.time_left(), sluice.last_saved(), sluice.is_running())"
    )
    assert run_script(script) == "False None None False"


def test_messages_arrive_in_order() -> None:
    with ClientFiles("test") as client:
        script = "sluice.step(7, 10, loss=float('nan'), lr=0.5)\nsluice.saved('a b')\nsluice.saved(7)"
        run_script(script, SLUICE_CLIENT=client.environment["SLUICE_CLIENT"])
        step, saved_path, saved_step = client.read_messages()
        assert (step["step"], step["total"], step["values"]) == (7, 10, {"loss": None, "lr": 0.5})
        assert saved_path["path"] == os.path.abspath("a b") and saved_step["step"] == 7
        assert client.read_messages() == []


def test_values_that_are_no_numbers_do_not_end_the_training() -> None:
    with ClientFiles("test") as client:
        script = "sluice.step(1, loss='x', a=None, b=[1, 2], c=2)"
        run_script(script, SLUICE_CLIENT=client.environment["SLUICE_CLIENT"])
        assert client.read_messages()[0]["values"] == {"loss": None, "a": None, "b": None, "c": 2}


def test_the_memory_of_messages_is_freed() -> None:
    with ClientFiles("test") as client:
        folder = client.environment["SLUICE_CLIENT"]
        run_script("for n in range(1, 60001): sluice.step(n)", SLUICE_CLIENT=folder)
        assert len(client.read_messages()) == 60000
        run_script("sluice.step(60001)", SLUICE_CLIENT=folder)
        assert [message["step"] for message in client.read_messages()] == [60001]
        assert Path(folder, "messages").stat().st_blocks * 512 < 1 << 20


def test_images_arrive_once_and_their_files_are_removed() -> None:
    """The script has no numpy, so it passes objects with the attributes of an array and of a tensor."""
    array = (
        "class Array:\n shape = (1, 2)\n dtype = 'uint8'\n def tobytes(self): return bytes([7, 8])\n"
        "class Tensor:\n def detach(self): return self\n def cpu(self): return self\n"
        " def numpy(self): return Array()\n"
    )
    script = (
        f"{array}sluice.add_image('a', 3, b'file')\nfor image in (Array(), Tensor()): sluice.add_image('b', 4, image)"
    )
    with ClientFiles("test") as client:
        folder = client.environment["SLUICE_CLIENT"]
        run_script(script, SLUICE_CLIENT=folder)
        run_script(script, SLUICE_CLIENT=folder, RANK="1")
        run_script("sluice.add_image('big', 5, bytes((1 << 24) + 1))", SLUICE_CLIENT=folder)
        *messages, too_large = client.read_messages()
        received = [(m["name"], m["step"], m["shape"], client.take_image(m["file"])) for m in messages]
        assert received == [("a", 3, None, b"file"), *[("b", 4, [1, 2], bytes([7, 8]))] * 2]
        assert too_large["size"] == (1 << 24) + 1 and "file" not in too_large
        assert sorted(path.name for path in Path(folder).iterdir()) == ["messages"]
    assert run_script(script) == ""


def test_only_rank_0_sends_values() -> None:
    with ClientFiles("test") as client:
        run_script("sluice.step(1, loss=2.0)", SLUICE_CLIENT=client.environment["SLUICE_CLIENT"], RANK="3")
        (message,) = client.read_messages()
        assert message["step"] == 1 and "values" not in message


def test_a_request_to_stop_is_seen() -> None:
    with ClientFiles("test") as client:
        folder = client.environment["SLUICE_CLIENT"]
        assert not client.is_polling
        assert run_script("print(sluice.should_stop())", SLUICE_CLIENT=folder) == "False"
        assert client.is_polling
        client.request_stop()
        assert run_script("print(sluice.should_stop())", SLUICE_CLIENT=folder) == "True"


def test_a_half_written_message_is_read_later() -> None:
    with ClientFiles("test") as client:
        file = Path(client.environment["SLUICE_CLIENT"], "messages")
        line = json.dumps({"kind": "step", "step": 1}).encode()
        file.write_bytes(line[:9])
        assert client.read_messages() == []
        file.write_bytes(line + b"\nnot JSON\n[1]\n")
        assert client.read_messages() == [{"kind": "step", "step": 1}]


def test_a_script_continues_if_the_directory_disappears(tmp_path: Path) -> None:
    assert run_script("sluice.step(1); print(sluice.should_stop())", SLUICE_CLIENT=str(tmp_path)) == "False"
    gone = str(tmp_path / "gone")
    assert run_script("sluice.step(1); sluice.should_stop(); print('on')", SLUICE_CLIENT=gone) == "on"


def test_the_last_checkpoint_must_exist(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    assert run_script("print(sluice.last_saved())", SLUICE_LAST_SAVED=str(path)) == "None"
    path.touch()
    assert run_script("print(sluice.last_saved())", SLUICE_LAST_SAVED=str(path)) == str(path)


def test_run_names_what_it_needs() -> None:
    output = run_script("try: sluice.Run\nexcept ImportError as error: print(error)")
    assert "Sluice" in output


@pytest.mark.parametrize("name", ["x", "__path"])
def test_an_unknown_name_is_an_attribute_error(name: str) -> None:
    assert run_script(f"print(hasattr(sluice, {name!r}))") == "False"

"""Tests of Lustre striping with a fake `lfs`, which is called only on Lustre and whose failure is a warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.data_folder import stripe_folder
from data_prep.text_folder import TextFolder
from pipeline.base.files import read_file_system_type
from pipeline.config.site import StripeConfig
from pipeline.data.manifest import load_manifest
from tests.data_prep.test_shards import discard_log, make_data_config, make_documents, write_jsonl


@pytest.fixture
def fake_lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a fake `lfs` first in PATH and return its folder.

    The fake `lfs` appends its arguments to the file `calls`, writes an error message to stderr, and exits with the
    code in the file `code`.
    """
    folder = tmp_path / "fake-lfs"
    folder.mkdir()
    (folder / "lfs").write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/calls\necho no such pool >&2\nexit $(cat {folder}/code)\n'
    )
    (folder / "lfs").chmod(0o755)
    (folder / "code").write_text("0")
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return folder


def test_stripes_are_set_only_on_lustre(fake_lfs: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    assert stripe_folder(tmp_path, StripeConfig(), lines.append, file_system=lambda _: "ext4") == ""
    assert not (fake_lfs / "calls").exists()
    stripe_folder(tmp_path, StripeConfig(), lines.append, file_system=lambda _: "lustre")
    stripe_folder(
        tmp_path, StripeConfig(count=-1, size_mb=16, pool="flash"), lines.append, file_system=lambda _: "lustre"
    )
    calls = (fake_lfs / "calls").read_text().splitlines()
    assert calls == [f"setstripe -c 1 {tmp_path}", f"setstripe -c -1 -S 16M -p flash {tmp_path}"]
    assert lines == []


def test_failure_of_lfs_is_a_warning(fake_lfs: Path, tmp_path: Path) -> None:
    (fake_lfs / "code").write_text("2")
    lines: list[str] = []
    stripe_folder(tmp_path, StripeConfig(), lines.append, file_system=lambda _: "lustre")
    assert len(lines) == 1 and lines[0].startswith("warning: ") and "no such pool" in lines[0]


def test_nothing_happens_without_lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    stripe_folder(tmp_path, StripeConfig(), lambda line: pytest.fail(line), file_system=lambda _: "lustre")


def test_shard_sets_the_stripe_before_it_writes(
    fake_lfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This `lfs` lists the folder (its last argument), which must be empty.
    (fake_lfs / "lfs").write_text(
        f"#!/bin/sh\nfor last; do :; done\nls $last >> {fake_lfs}/calls\necho done >> {fake_lfs}/calls\n"
    )
    monkeypatch.setattr(
        "data_prep.data_folder.stripe_folder",
        lambda path, stripe, log: stripe_folder(path, stripe, log, lambda _: "lustre"),
    )
    data = make_data_config([str(write_jsonl(tmp_path / "a.jsonl", make_documents(5)))], held_out=0.0)
    TextFolder(data, tmp_path / "data").prepare(discard_log)
    folder = TextFolder(data, tmp_path / "data")
    folder.shard(0, 1, discard_log, StripeConfig(count=2, size_mb=4, pool="flash"))
    assert (fake_lfs / "calls").read_text() == "done\n"
    # Another task may finalize the folder. It reads the stripe that the shard task recorded.
    assert TextFolder(data, tmp_path / "data").finalize(discard_log)
    assert load_manifest(tmp_path / "data").stripe == "-c 2 -S 4M -p flash"


def test_file_system_type_is_that_of_the_mount(tmp_path: Path) -> None:
    types = {fields[1]: fields[2] for line in Path("/proc/mounts").read_text().splitlines() if (fields := line.split())}
    for folder in ("/proc", "/dev/shm", "/"):
        assert read_file_system_type(Path(folder)) == types[folder]
    assert read_file_system_type(tmp_path / "no such file") == ""

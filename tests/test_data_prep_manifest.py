"""Manifests: damage and change are found and named; the login node's side imports nothing heavy."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_prep.inputs.seen import PACKAGE, code_sha256
from data_prep.text.prepare_text import prepare
from data_prep.text.state import prepare_key, prepare_missing, shard_missing, shard_progress
from data_prep.text.write import finalize, shard
from pipeline.base.errors import InputError
from pipeline.config.sections import DataConfig, TokenizerConfig
from pipeline.data.manifest import check_shard, load_manifest
from tests.test_data_prep import config, quiet, run_tasks, texts, write_jsonl

ROOT = Path(__file__).parent.parent


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """A config with a source of its own."""
    return config([str(write_jsonl(tmp_path / "a.jsonl", texts(80)))])


@pytest.fixture
def done(tmp_path: Path, data: DataConfig) -> Path:
    """A data folder with all shards."""
    run_tasks(data, tmp_path / "data")
    return tmp_path / "data"


def test_missing_and_progress_follow_the_stages(tmp_path: Path, data: DataConfig) -> None:
    folder = tmp_path / "data"
    assert "prepare.json is missing" in str(prepare_missing(data, folder))
    assert "prepare.json is missing" in str(shard_missing(data, folder))
    assert shard_progress(folder) == (0, 0)
    prepare(data, folder, quiet)
    assert prepare_missing(data, folder) is None
    assert "manifest.json is missing" in str(shard_missing(data, folder))
    total = shard_progress(folder)[1]
    shard(data, folder, 0, 2, quiet)
    assert shard_progress(folder) == ((total + 1) // 2, total)
    shard(data, folder, 1, 2, quiet)
    assert shard_progress(folder) == (total, total)
    written = finalize(data, folder, quiet)
    assert shard_missing(data, folder) is None and prepare_missing(data, folder) is None
    assert load_manifest(folder) == written
    assert written.train_tokens == sum(entry.tokens for entry in written.train)


def test_damaged_shard_is_named_with_the_way_out(done: Path, data: DataConfig) -> None:
    entry = load_manifest(done).train[1]
    path = done / entry.file
    whole = path.read_bytes()
    check_shard(done, entry, hashes=True)
    for place in (0, entry.offset, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        check_shard(done, entry, hashes=False)
        with pytest.raises(InputError, match=rf"{path} is damaged: its sha256 .*: .*python submit\.py resume RUN"):
            check_shard(done, entry, hashes=True)
    path.write_bytes(whole[:-1])
    with pytest.raises(InputError, match=rf"{path} has {len(whole) - 1} bytes, its manifest says {len(whole)}: run"):
        check_shard(done, entry, hashes=False)
    assert f"{path} has" in str(shard_missing(data, done))
    assert shard_progress(done)[0] == shard_progress(done)[1] - 1
    path.unlink()
    with pytest.raises(InputError, match=rf"{path} is missing: run the shard stage again"):
        check_shard(done, entry, hashes=False)
    run_tasks(data, done)
    assert path.read_bytes() == whole and shard_missing(data, done) is None


@pytest.mark.parametrize("name", ["manifest.json", "prepare.json"])
@pytest.mark.parametrize(
    "content", ["", "[]", "null", '{"key": 1}', '{"train": [{"file": 1}]}', '{"tokenizer": 3}', "\xff"]
)
def test_torn_manifest_is_an_input_error(done: Path, data: DataConfig, name: str, content: str) -> None:
    (done / name).write_bytes(content.encode("latin-1"))
    assert f"{name} is torn" in str(shard_missing(data, done))
    if name == "manifest.json":
        with pytest.raises(InputError, match=r"manifest\.json is torn"):
            load_manifest(done)


@pytest.mark.parametrize("name", ["tokenizer.json", "units.json"])
def test_damaged_output_of_prepare_is_found_and_made_again(done: Path, data: DataConfig, name: str) -> None:
    whole = (done / name).read_bytes()
    for damaged, message in ((whole[:-2], "its manifest says"), (whole.replace(b"1", b"2", 1), "is damaged")):
        (done / name).write_bytes(damaged)
        assert message in str(prepare_missing(data, done))
        with pytest.raises(InputError, match=rf"{name} is missing or damaged: run the prepare stage again"):
            shard(data, done, 0, 1, quiet)
        prepare(data, done, quiet)
        assert (done / name).read_bytes() == whole and shard_missing(data, done) is None


def test_changed_input_counts_until_the_shards_are_written(tmp_path: Path, data: DataConfig) -> None:
    source, folder = tmp_path / "a.jsonl", tmp_path / "data"
    prepare(data, folder, quiet)
    source.write_bytes(source.read_bytes() + b"\n")
    assert prepare_missing(data, folder) == f"input {source} has changed since it was prepared"
    run_tasks(data, folder)
    assert prepare_missing(data, folder) is None
    source.unlink()
    assert prepare_missing(data, folder) is None
    (folder / "manifest.json").unlink()
    assert prepare_missing(data, folder) == f"input {source} is gone since it was prepared"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"sequence_length": 7}, True),
        ({"verify": "sizes"}, True),
        ({"max_rejected": 0.5}, True),
        ({"source": "python-stdlib"}, True),  # the list ["python-stdlib"] in one word
        ({"source": "a.txt"}, False),
        ({"held_out": 0.5}, False),
        ({"shard_tokens": 4096}, False),
        ({"text_field": "body"}, False),
        ({"text_documents": "line"}, False),
        ({"tokenizer": TokenizerConfig(vocab_size=300)}, False),
    ],
)
def test_key_covers_what_changes_the_bytes(change: dict[str, Any], same: bool) -> None:
    data = DataConfig(source=["python-stdlib"])
    assert (prepare_key(data.model_copy(update=change)) == prepare_key(data)) is same


def test_other_code_makes_everything_missing(done: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.text.state.code_sha256", lambda package: "0" * 64)
    assert "other code" in str(prepare_missing(data, done)) and "other code" in str(shard_missing(data, done))


def test_code_hash_covers_names_and_contents(tmp_path: Path) -> None:
    original, copy = code_sha256(PACKAGE), tmp_path / "data_prep"
    shutil.copytree(PACKAGE, copy)
    assert code_sha256(copy) == original
    with open(copy / "text/units.py", "a") as file:
        file.write("# another rule\n")
    assert code_sha256(copy) != original
    shutil.copy(PACKAGE / "text/units.py", copy / "text/units.py")
    (copy / "text/lustre.py").rename(copy / "text/other.py")
    assert code_sha256(copy) != original


def test_manifest_of_another_tokenizer_does_not_fit(done: Path, data: DataConfig) -> None:
    prepared = json.loads((done / "prepare.json").read_text())
    prepared["tokenizer"]["sha256"] = "0" * 64
    (done / "prepare.json").write_text(json.dumps(prepared))
    assert "belongs to another tokenizer" in str(shard_missing(data, done))
    assert shard_progress(done)[0] == 0


def test_manifest_module_imports_nothing_heavy() -> None:
    script = (
        "import sys, data_prep.text.state\n"
        "print([n for n in ('numpy', 'h5py', 'tokenizers', 'torch', 'pyarrow', 'slurm') if n in sys.modules])"
    )
    child = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert child.stdout == "[]\n", child.stderr

"""Documents to shards, whole: the same bytes whatever the tasks, formats and cuts; and what goes wrong."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import work_units
from data_prep.text_folder import TextFolder
from data_prep.tokenizer import load_encoder
from data_prep.work_units import is_held_out
from pipeline.base.errors import InputError, UserError
from pipeline.config.datasets import DataConfig, TokenizerConfig
from pipeline.data.manifest import Manifest, ShardEntry, load_manifest
from pipeline.run.code import CODE_ROOT as ROOT
from tests.support.errors import raises_error


def quiet(_: str) -> None:
    """A log that nobody reads."""


def config(source: Any, **more: Any) -> DataConfig:
    """A small data config."""
    tokenizer = TokenizerConfig(vocab_size=more.pop("vocab_size", 300), train_bytes=20_000)
    return DataConfig(source=source, tokenizer=tokenizer, **{"shard_tokens": 1024, "held_out": 0.2, **more})


def texts(count: int) -> list[str]:
    """Different documents of 1 to about 2,000 characters, some not ASCII, one holding the end-of-text token's name."""
    words = ["def", "return", "self", "éü", "漢字", "<|endoftext|>", "\n\t", "{}", "0123", "import", "😀"]
    return [" ".join(words[(i * 7 + j * j) % len(words)] for j in range(i % 251 + 1)) + f"#{i}" for i in range(count)]


def write_jsonl(path: Path, documents: Sequence[str], field: str = "text") -> Path:
    """One object per line, a blank line after every tenth."""
    lines = [json.dumps({"id": i, field: text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(documents)]
    path.write_text("".join(line + ("\n\n" if i % 10 == 9 else "\n") for i, line in enumerate(lines)), "utf-8")
    return path


def run_tasks(data: DataConfig, data_dir: Path, tasks: int = 1) -> Manifest:
    """Prepare, shard in `tasks` tasks (the last one first), finalize."""
    prepare(data, data_dir, quiet)
    for task in reversed(range(tasks)):
        shard(data, data_dir, task, tasks, quiet)
    return finalize(data, data_dir, quiet)


def prepare(data: DataConfig, data_dir: Path, log: Callable[[str], None]) -> None:
    """The stage prepare."""
    TextFolder(data, data_dir).prepare(log)


def shard(data: DataConfig, data_dir: Path, task: int, tasks: int, log: Callable[[str], None]) -> None:
    """One task of the stage shard."""
    TextFolder(data, data_dir).shard(task, tasks, log)


def finalize(data: DataConfig, data_dir: Path, log: Callable[[str], None]) -> Manifest:
    """What the last task does."""
    assert TextFolder(data, data_dir).finalize(log)
    return load_manifest(data_dir)


def make(data: DataConfig, data_dir: Path, unit: int) -> bool:
    """One unit of a task."""
    (data_dir / "shards").mkdir(exist_ok=True)
    return TextFolder(data, data_dir).build_unit(unit)


def progress(data: DataConfig, data_dir: Path) -> tuple[int, int]:
    """Units that are done, and units in all."""
    return TextFolder(data, data_dir).measure_progress()[:2]


def all_bytes(data_dir: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {str(path.relative_to(data_dir)): path.read_bytes() for path in data_dir.rglob("*") if path.is_file()}


def mapped(data_dir: Path, entry: ShardEntry) -> np.ndarray:
    """A shard's tokens as a loader reads them: straight from the file, at the offset in the manifest."""
    return np.fromfile(data_dir / entry.file, entry.dtype, entry.tokens, offset=entry.offset)


def documents_of(data_dir: Path, manifest: Manifest, entries: Sequence[ShardEntry]) -> list[list[int]]:
    """The documents of a split as token lists without the end-of-text token, cut by the datasets `documents`.

    Checks on the way that HDF5 and the mapped file agree and that the offsets follow the rule for documents
    that run on in the next file.
    """
    unfinished: list[int] = []
    found: list[list[int]] = []
    for entry in entries:
        with h5py.File(data_dir / entry.file, "r") as file:
            tokens, starts = file["tokens"][:], file["documents"][:]
            assert file["tokens"].chunks is None and file["tokens"].compression is None
            assert (tokens.dtype, starts.dtype) == (np.dtype(entry.dtype), np.dtype(np.int64))
            assert file.attrs["tokenizer_sha256"].decode() == manifest.tokenizer_sha256
        np.testing.assert_array_equal(tokens, mapped(data_dir, entry))
        assert entry.offset % 8 == 0  # so that a map of it is aligned
        assert 0 < len(tokens) == entry.tokens == starts[-1] and len(starts) == entry.documents + 1
        if starts[0]:
            assert unfinished, "a file opens with the rest of a document that no file began"
        for start, end in zip([0, *starts] if starts[0] else starts, starts if starts[0] else starts[1:], strict=False):
            if start == end:
                continue
            unfinished += tokens[start:end].tolist()
            if unfinished[-1] == manifest.eos_id:
                found.append(unfinished[:-1])
                unfinished = []
    assert not unfinished
    return found


def check_content(data: DataConfig, data_dir: Path, manifest: Manifest, expected: Sequence[str]) -> None:
    """Each document stands once, in order, on the right side, with the tokens that encoding it alone gives."""
    encoder = load_encoder(data_dir / "tokenizer.json", data.tokenizer.eos_token)
    for entries, side in ((manifest.train, False), (manifest.held_out, True)):
        wanted = [text for text in expected if text and is_held_out(text.encode(), data.held_out) is side]
        tokens = [encoder.tokenizer.encode(text, add_special_tokens=False).ids for text in wanted]
        assert documents_of(data_dir, manifest, entries) == tokens
        assert sum(entry.documents for entry in entries) == len(wanted)
        assert sum(entry.bytes for entry in entries) == sum(len(text.encode()) for text in wanted)
        assert all(entry.tokens <= data.shard_tokens for entry in entries)


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few kilobytes make several units."""
    monkeypatch.setattr(work_units, "MIN_UNIT_BYTES", 64)


def test_any_number_of_tasks_writes_the_same_bytes(tmp_path: Path) -> None:
    expected = texts(150)
    write_jsonl(tmp_path / "a.jsonl", expected[:100])
    write_jsonl(tmp_path / "b.jsonl", expected[100:])
    data = config([str(tmp_path / "*.jsonl")])
    manifests = {tasks: run_tasks(data, tmp_path / f"{tasks}", tasks) for tasks in (1, 2, 5)}
    assert len(list((tmp_path / "1" / "shards").glob("unit-*.json"))) > 4
    assert all_bytes(tmp_path / "1") == all_bytes(tmp_path / "2") == all_bytes(tmp_path / "5")
    check_content(data, tmp_path / "1", manifests[1], expected)


def test_no_time_stands_in_a_shard(tmp_path: Path) -> None:
    data = config([str(write_jsonl(tmp_path / "a.jsonl", texts(20)))])
    run_tasks(data, tmp_path / "now")
    time.sleep(1.1)
    run_tasks(data, tmp_path / "later")
    assert all_bytes(tmp_path / "now") == all_bytes(tmp_path / "later")


def test_all_formats_give_the_same_tokens(tmp_path: Path) -> None:
    expected = texts(80)
    plain = write_jsonl(tmp_path / "a.jsonl", expected).read_bytes()
    half = len(plain) // 2
    with open(tmp_path / "a.jsonl.gz", "wb") as file:  # two members, two frames: what `cat a.gz b.gz` makes
        file.write(gzip.compress(plain[:half]) + gzip.compress(plain[half:]))
    with open(tmp_path / "a.jsonl.zst", "wb") as file:
        file.write(zstandard.compress(plain[:half]) + zstandard.compress(plain[half:]))
    for name, kind in (("a", pyarrow.string()), ("b", pyarrow.large_string())):
        table = pyarrow.table(
            {"id": range(80), "nested": [{"x": 1, "y": 2}] * 80, "text": pyarrow.array(expected, kind)}
        )
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=7)
    (tmp_path / "tokenizer").mkdir()
    prepare(config([str(tmp_path / "a.jsonl")]), tmp_path / "tokenizer", quiet)
    for ending in (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"):
        data = config([str(tmp_path / f"[a]{ending}"), str(tmp_path / "b.parquet")]).model_copy(
            update={"tokenizer": TokenizerConfig(kind="file", path=tmp_path / "tokenizer" / "tokenizer.json")}
        )
        manifest = run_tasks(data, tmp_path / ending, 2)
        check_content(data, tmp_path / ending, manifest, expected + expected)


text_lists = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), min_size=1, max_size=12)


@settings(deadline=None, max_examples=40)
@given(documents=text_lists, count=st.integers(1, 9))
def test_each_document_stands_once_wherever_the_file_is_cut(
    documents: list[str], count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    documents.append("x")
    write_jsonl(folder / "a.jsonl", documents)
    data = config([str(folder / "a.jsonl")], max_rejected=0.0)
    if all(is_held_out(text.encode(), 0.2) for text in documents if text):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_prep.prepare_text.count_units", lambda *_: count)
        manifest = run_tasks(data, folder / "data")
    check_content(data, folder / "data", manifest, documents)


def test_document_longer_than_a_shard_runs_through_several_files(tmp_path: Path) -> None:
    long = "".join(chr(0x4E00 + i * 37 % 20000) for i in range(3000))
    expected = ["short", long, "", "short", "last"]
    data = config([str(write_jsonl(tmp_path / "a.jsonl", expected))], held_out=0.0, vocab_size=257)
    manifest = run_tasks(data, tmp_path / "data")
    assert 0 in [entry.documents for entry in manifest.train]
    check_content(data, tmp_path / "data", manifest, expected)


def test_shard_that_ends_with_a_document_is_followed_by_no_empty_file(tmp_path: Path) -> None:
    expected = ["a" * 1023, "b" * 1023]
    data = config([str(write_jsonl(tmp_path / "a.jsonl", expected))], held_out=0.0, vocab_size=257)
    manifest = run_tasks(data, tmp_path / "data")
    assert [entry.tokens for entry in manifest.train] == [1024, 1024]
    assert manifest.held_out == ()
    check_content(data, tmp_path / "data", manifest, expected)


def test_second_run_writes_nothing_and_a_damaged_shard_is_written_again(tmp_path: Path) -> None:
    data = config([str(write_jsonl(tmp_path / "a.jsonl", texts(60)))])
    manifest = run_tasks(data, tmp_path / "data")
    before = all_bytes(tmp_path / "data")
    units_in_all = progress(data, tmp_path / "data")[1]
    assert not any(make(data, tmp_path / "data", unit) for unit in range(units_in_all))
    damaged = tmp_path / "data" / manifest.train[0].file
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert [make(data, tmp_path / "data", unit) for unit in range(units_in_all)].count(True) == 1
    assert all_bytes(tmp_path / "data") == before


def test_other_config_redoes_every_unit_and_removes_files_of_the_old_plan(tmp_path: Path) -> None:
    source = [str(write_jsonl(tmp_path / "a.jsonl", texts(150)))]
    old, new = config(source), config(source, shard_tokens=4096)
    run_tasks(old, tmp_path / "data")
    with pytest.raises(InputError, match=r"prepare\.json was made with another data config"):
        shard(new, tmp_path / "data", 0, 1, quiet)
    run_tasks(new, tmp_path / "data", 2)
    run_tasks(new, tmp_path / "fresh")
    assert all_bytes(tmp_path / "data") == all_bytes(tmp_path / "fresh")


def test_changed_input_is_named_and_prepared_again(tmp_path: Path, small_units: None) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(30))
    data = config([str(tmp_path / "*.jsonl")])
    prepare(data, tmp_path / "data", quiet)
    path.write_bytes(path.read_bytes() + b'{"text": "one more"}\n')
    with raises_error("data.input_changed", path, kind=InputError):
        shard(data, tmp_path / "data", 0, 1, quiet)
    write_jsonl(tmp_path / "b.jsonl", ["from a new file"])
    manifest = run_tasks(data, tmp_path / "data")
    check_content(data, tmp_path / "data", manifest, [*texts(30), "one more", "from a new file"])


lengths = st.lists(st.integers(0, 30), min_size=1, max_size=6)


@settings(deadline=None, max_examples=10)
@given(before=lengths, place=st.integers(0, 5), now=st.integers(0, 40), size=st.sampled_from([1024, 2048, 8192]))
def test_a_changed_input_costs_its_own_units_and_leaves_no_trace(
    before: list[int], place: int, now: int, size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What the shards are does not depend on what stood in the inputs before; what need not change is not written."""
    folder = tmp_path_factory.mktemp("mended")
    write_jsonl(folder / "vocabulary.jsonl", texts(40))
    prepare(config(str(folder / "vocabulary.jsonl")), folder / "tokenizer", quiet)
    for index, count in enumerate([20, *before]):
        write_jsonl(folder / f"part-{index}.jsonl", texts(count))
    tokenizer = TokenizerConfig(kind="file", path=folder / "tokenizer/tokenizer.json")
    data = config(str(folder / "part-*.jsonl"), shard_tokens=size).model_copy(update={"tokenizer": tokenizer})
    run_tasks(data, folder / "data", 2)
    (folder / "data/manifest.json").unlink()  # once all is done inputs may change
    old = work_units.read_plan(folder / "data/units.json")
    write_jsonl(folder / f"part-{place % len(before) + 1}.jsonl", texts(now))
    lines: list[str] = []
    prepare(data, folder / "data", quiet)
    shard(data, folder / "data", 0, 1, lines.append)
    finalize(data, folder / "data", quiet)
    run_tasks(data, folder / "fresh")
    assert all_bytes(folder / "data") == all_bytes(folder / "fresh")
    new = work_units.read_plan(folder / "data/units.json")
    read = [[[(plan.inputs[i], *piece) for i, *piece in unit] for unit in plan.units] for plan in (old, new)]
    kept = [unit for unit, (was, now_read) in enumerate(zip(*read, strict=False)) if was == now_read]
    assert [unit for unit, line in enumerate(lines) if "exists already" in line] == kept


def test_input_that_changes_while_it_is_read_fails_the_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from data_prep.tokenizer import Encoder

    path = write_jsonl(tmp_path / "a.jsonl", texts(5))
    data = config([str(path)])
    prepare(data, tmp_path / "data", quiet)
    encode = Encoder.encode

    def encode_and_touch(self: Encoder, batch: list[str]) -> list[np.ndarray]:
        os.utime(path, (1, 1))
        return encode(self, batch)

    monkeypatch.setattr(Encoder, "encode", encode_and_touch)
    with pytest.raises(InputError, match="has changed"):
        make(data, tmp_path / "data", 0)
    assert progress(data, tmp_path / "data")[0] == 0


def test_source_may_go_once_the_shards_are_written(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(20))
    data = config([str(path)])
    run_tasks(data, tmp_path / "data")
    before = all_bytes(tmp_path / "data")
    path.unlink()
    prepare(data, tmp_path / "data", quiet)
    shard(data, tmp_path / "data", 0, 1, quiet)
    finalize(data, tmp_path / "data", quiet)
    assert all_bytes(tmp_path / "data") == before


def test_rejected_documents_are_listed_with_file_and_line(tmp_path: Path, small_units: None) -> None:
    good = texts(40)
    lines = [json.dumps({"text": text}).encode() for text in good]
    bad: dict[int, tuple[bytes, str]] = {  # place in the list of lines, from 0
        0: (b"\xff", "invalid UTF-8: byte 0xff at byte 0"),
        7: (b'{"text": "cut', "broken JSON: Unterminated string"),
        8: (b'{"id": 3, "bo\\ud800dy": ""}', "no field 'text'; there are 'id', 'bo\\ud800dy'"),
        20: (b'{"text": null}', "field 'text' is not a string but NoneType"),
        33: (b'["text"]', "not a JSON object but list"),
        44: (b'{"text": "\\ud800"}', "field 'text' contains a lone surrogate"),
        45: (b"[" * 100_000, "JSON that nests more than 100 deep"),
    }
    for place in sorted(bad):
        lines.insert(place, bad[place][0])
    lines.insert(3, b"")  # a blank line is no document, but it is a line
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b.txt").write_bytes("first\nsecond é\n".encode() + b"third \xe9\nfourth")
    column = pyarrow.array(["one", None, "three"]).cast(pyarrow.binary())
    broken = pyarrow.array([b"ok", b"\xc3", "漢".encode()])
    table = pyarrow.table({"text": pyarrow.chunked_array([column, broken]).cast(pyarrow.binary())})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet", row_group_size=2)

    data = config([str(tmp_path / f"{name}*") for name in "abc"], max_rejected=0.5)
    wanted = [(tmp_path / "a.jsonl", place + 1 + (place >= 3), bad[place][1]) for place in sorted(bad)]
    wanted += [
        (tmp_path / "b.txt", 3, "invalid UTF-8: byte 0xe9 at byte 22"),
        (tmp_path / "c.parquet", 2, "field 'text' is null"),
        (tmp_path / "c.parquet", 5, "invalid UTF-8: byte 0xc3 at byte 0"),
    ]
    manifest = run_tasks(data, tmp_path / "data", 3)
    assert progress(data, tmp_path / "data")[1] >= 4
    rows = [json.loads(line) for line in (tmp_path / "data" / "rejected.jsonl").read_text().splitlines()]
    assert [(row["file"], row["line"]) for row in rows] == [(str(path), line) for path, line, _ in wanted]
    for row, (_, _, reason) in zip(rows, wanted, strict=True):
        assert row["reason"].startswith(reason)
    assert (manifest.rejected_documents, manifest.documents) == (10, 44)
    assert (
        TextFolder(data, tmp_path / "data").describe_result().endswith(", 10 documents rejected (data/rejected.jsonl)")
    )
    check_content(data, tmp_path / "data", manifest, [*good, "one", "three", "ok", "漢"])

    strict = data.model_copy(update={"max_rejected": 0.18})  # 10 of 54 are 18.5 %
    with pytest.raises(UserError, match=rf"10 of 54 documents \(18\.52%\).*{tmp_path}/a\.jsonl line 1: invalid UTF-8"):
        finalize(strict, tmp_path / "data", quiet)
    finalize(data.model_copy(update={"max_rejected": 10 / 54}), tmp_path / "data", quiet)


@pytest.mark.parametrize(
    ("good", "bad", "limit", "accepted"),
    [
        (30, 1, 0.001, True),
        (9, 5, 0.001, True),
        (3, 3, 0.001, True),
        (3, 4, 0.001, False),  # more than half
        (60, 6, 0.001, False),
        (30, 1, 0.0, False),
    ],
)
def test_a_few_unreadable_documents_are_accepted_in_small_inputs(
    good: int, bad: int, limit: float, accepted: bool, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(good))
    with open(path, "a") as file:
        file.write("{broken\n" * bad)
    data = config(str(path), max_rejected=limit, held_out=0.0)
    if accepted:
        assert run_tasks(data, tmp_path / "data").rejected_documents == bad
        return
    with pytest.raises(UserError, match=rf"{bad} of {good + bad} documents .*data\.max_rejected"):
        run_tasks(data, tmp_path / "data")
    assert len((tmp_path / "data/rejected.jsonl").read_text().splitlines()) == bad


def test_held_out_fraction_is_about_right_and_depends_on_the_text_alone(tmp_path: Path) -> None:
    expected = [f"document {i}" for i in range(2000)] * 2  # each twice, far apart
    data = config([str(write_jsonl(tmp_path / "a.jsonl", expected))], held_out=0.1)
    manifest = run_tasks(data, tmp_path / "data")
    fraction = manifest.held_out_documents / manifest.documents
    assert abs(fraction - 0.1) < 4 * (0.1 * 0.9 / 2000) ** 0.5  # four standard deviations
    check_content(data, tmp_path / "data", manifest, expected)
    assert is_held_out(b"document 12", 0.1030) and not is_held_out(b"document 12", 0.1029)  # sha256 1a5d…: 0.10299


@pytest.mark.parametrize(
    ("documents", "more", "facts"),
    [
        (["a", "b"], {"held_out": 0.999999}, ["data.held_out (0.999999)"]),
        (["", ""], {"held_out": 0.0}, ["a.jsonl", "data.held_out (0.0)"]),
        (["a", "b"], {"text_field": "body"}, ["a.jsonl line 1", "'body'", "'id', 'text'", "data.text_field"]),
        (None, {}, ["a.jsonl line 1", "JSON"]),
    ],
)
def test_inputs_without_a_training_document_are_refused(
    tmp_path: Path, documents: list[str] | None, more: Any, facts: list[str]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", documents or [])
    if documents is None:
        path.write_text("name,text\n1,a table\n")
    data = config([str(path)], **more)
    with raises_error("data.no_documents", *facts):
        prepare(data, tmp_path / "data", quiet)
    assert not (tmp_path / "data/prepare.json").exists()


def test_refused_write_leaves_no_half_written_names(tmp_path: Path) -> None:
    data = config([str(write_jsonl(tmp_path / "a.jsonl", texts(150)))], shard_tokens=100_000)
    prepare(data, tmp_path / "data", quiet)
    (tmp_path / "data/shards").mkdir()
    script = (
        "import resource, signal, sys; from pathlib import Path; from pipeline.config.sections import DataConfig\n"
        "from data_prep.text_folder import TextFolder\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "for limit in (0, 100, 2048, 4096, 20_000):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))\n"
        "    try: TextFolder(DataConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2])).build_unit(0)\n"
        "    except OSError as error: print(limit, error.errno)\n"
    )
    command = [sys.executable, "-c", script, data.model_dump_json(), str(tmp_path / "data")]
    child = subprocess.run(command, cwd=ROOT, timeout=240, capture_output=True, text=True)
    wanted = "".join(f"{limit} {errno.EFBIG}\n" for limit in (0, 100, 2048, 4096, 20_000))  # stands for a full disk
    assert (child.returncode, child.stdout, child.stderr) == (0, wanted, "")
    assert list((tmp_path / "data" / "shards").iterdir()) == []


def test_python_stdlib_gives_shards_without_tests_and_packages(tmp_path: Path) -> None:
    data = DataConfig(source="python-stdlib", tokenizer=TokenizerConfig(vocab_size=300, train_bytes=50_000))
    prepare(data, tmp_path / "data", quiet)
    plan = work_units.read_plan(tmp_path / "data" / "units.json")
    assert len(plan.units) == 4
    names = [Path(source.path).parts for source in plan.inputs]
    assert not [parts for parts in names if {"site-packages", "dist-packages", "test", "tests"} & set(parts)]
    assert any(parts[-2:] == ("json", "decoder.py") for parts in names)
    assert make(data, tmp_path / "data", 3)

"""Property tests over all formats of text: any split gives the same bytes, and damaged files are refused or read."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.data_folder import PACKAGE, DataFolder
from data_prep.documents import read_documents, read_row_group_sizes
from data_prep.find_inputs import find_inputs
from data_prep.mixture_folder import MixtureFolder
from data_prep.samples_folder import SamplesFolder
from data_prep.text_folder import TextFolder
from data_prep.tokens_folder import TokensFolder
from pipeline.base.errors import InputError, UserError
from pipeline.config.datasets import DataConfig, TokenizerConfig
from pipeline.config.user_model import UserModel
from pipeline.data.manifest import SampleManifest, load_manifest, read_manifest_file
from pipeline.data.samples import SampleDataset
from tests.data_prep.test_shards import discard_log, make_data_config, make_documents, read_all_files, run_prepare
from tests.data_prep.test_token_files import MAPPABLE, encode_documents, flatten, mutate, read_entries
from tests.data_prep.test_token_files import make_config as make_tokens_config
from tests.data_prep.test_unpacked_samples import LAYOUTS
from tests.data_prep.test_unpacked_samples import write_images as write_samples

MODEL = UserModel("own", Path("own.py"), frozenset(), ("images", "labels"), ("images",), ())


def lines_of(documents: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()


def tar_of(documents: list[str]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for number, text in enumerate(documents):
            member = tarfile.TarInfo(f"{number:04}.txt")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return content.getvalue()


def parquet_of(documents: list[str]) -> bytes:
    content = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(documents, "string")}), content, row_group_size=3)
    return content.getvalue()


def arrow_of(documents: list[str]) -> bytes:
    content, table = io.BytesIO(), pyarrow.table({"text": pyarrow.array(documents, "string")})
    with pyarrow.ipc.new_stream(content, table.schema) as stream:
        stream.write_table(table, max_chunksize=3)
    return content.getvalue()


def csv_of(documents: list[str], delimiter: str = ",") -> bytes:
    content = io.StringIO()
    rows = csv.writer(content, delimiter=delimiter)
    rows.writerows([("id", "text"), *((number, text) for number, text in enumerate(documents))])
    return content.getvalue().encode()


FORMATS: dict[str, Callable[[list[str]], bytes]] = {
    ".jsonl": lines_of,
    ".jsonl.gz": lambda documents: gzip.compress(lines_of(documents)),
    ".jsonl.zst": lambda documents: zstandard.ZstdCompressor(write_checksum=True).compress(lines_of(documents)),
    ".jsonl.bz2": lambda documents: bz2.compress(lines_of(documents)),
    ".jsonl.xz": lambda documents: lzma.compress(lines_of(documents)),
    ".json": lambda documents: json.dumps([{"text": text} for text in documents], indent=1).encode(),
    ".json.gz": lambda documents: gzip.compress(lines_of(documents)),
    ".csv": csv_of,
    ".tsv.xz": lambda documents: lzma.compress(csv_of(documents, "\t")),
    ".parquet": parquet_of,
    ".arrow": arrow_of,
    ".tar": tar_of,
    ".txt": lambda documents: "\n".join(documents).encode(),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "a.jsonl").write_bytes(lines_of(make_documents(60)))
    run_prepare(make_data_config(str(folder / "a.jsonl")), folder / "data", discard_log)
    return folder / "data/tokenizer.json"


def same_in_any_split(make: Callable[[Path], DataFolder[Any, Any]], folder: Path, tasks: int, draw: Random) -> None:
    """Tasks in any order, some twice, one before another has begun, write what one task writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_prep.work_units.MIN_UNIT_BYTES", 256)
        patch.setattr("data_prep.samples_folder._BLOCK_BYTES", 3000)
        patch.setattr(os, "fsync", lambda fd: None)  # slow, and no matter here
        dealt = [*range(tasks), draw.randrange(tasks)]
        draw.shuffle(dealt)
        for name, order, count in (("one", [0], 1), ("many", dealt, tasks)):
            make(folder / name).prepare(discard_log)
            for task in order:
                make(folder / name).shard(task, count, discard_log)
            assert make(folder / name).finalize(discard_log)
    assert read_all_files(folder / "one") == read_all_files(folder / "many")


SPLIT = {"tasks": st.integers(2, 7), "draw": st.randoms(use_true_random=False)}
few = settings(deadline=None, max_examples=6)


@few
@given(
    counts=st.tuples(*(st.integers(0, 12) for _ in FORMATS)),
    lines=st.booleans(),
    once=st.booleans(),
    **SPLIT,
)
def test_any_split_of_any_inputs_gives_the_same_bytes(
    counts: tuple[int, ...],
    tasks: int,
    lines: bool,
    once: bool,
    draw: Random,
    tokenizer: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "in").mkdir()
    files = [(".jsonl", 25), *zip(FORMATS, counts, strict=True)]
    draw.shuffle(files)
    for number, (ending, count) in enumerate(files):
        (folder / f"in/{number}{ending}").write_bytes(FORMATS[ending](make_documents(count)))
    data = DataConfig(
        source=str(folder / "in"),
        tokenizer=TokenizerConfig(kind="file", path=tokenizer),
        shard_tokens=8192,
        held_out=0.2,
        text_documents="line" if lines else "file",
        deduplicate=once,
    )
    same_in_any_split(lambda path: TextFolder(data, path), folder, tasks, draw)
    assert load_manifest(folder / "many").documents >= 25


def tokens_in(folder: Path, tokenizer: Path, count: int) -> list[int]:
    """Files of each format that is used where it lies; all their tokens, by the files' names."""
    documents = encode_documents(tokenizer, count)
    found = {write(folder, documents[number:]): documents[number:] for number, write in enumerate(MAPPABLE)}
    return [token for path in sorted(found) for token in flatten(found[path])]


@few
@given(count=st.integers(120, 300), limit=st.integers(1024, 3000), **SPLIT)
def test_any_split_of_files_of_tokens(
    count: int, limit: int, tasks: int, draw: Random, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The manifest is the same, and names each token of the files once, in order."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "in").mkdir()
    everything = tokens_in(folder / "in", tokenizer, count)
    data = make_tokens_config(str(folder / "in"), tokenizer, shard_tokens=limit)
    same_in_any_split(lambda path: TokensFolder(data, path), folder, tasks, draw)
    manifest = load_manifest(folder / "many")
    assert len(manifest.train) >= 2 * len(MAPPABLE)
    entries = sorted((*manifest.train, *manifest.held_out), key=lambda entry: (entry.file, entry.offset))
    assert read_entries(folder / "many", (*entries,)) == everything


@few
@given(ways=st.lists(st.sampled_from([{}, *LAYOUTS.values()]), min_size=1, max_size=5), **SPLIT)
def test_any_split_of_files_of_samples(
    ways: list[dict[str, Any]], tasks: int, draw: Random, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In one piece, in chunks, compressed: the rows that were written."""
    folder = tmp_path_factory.mktemp("inputs")
    for number, options in enumerate(ways):
        write_samples(folder / f"{number}.h5", **options)
    data = DataConfig(source=f"{folder}/*.h5", held_out=0)
    same_in_any_split(lambda path: SamplesFolder(data, path, PACKAGE, MODEL), folder, tasks, draw)
    read = SampleDataset(read_manifest_file(folder / "many/manifest.json", SampleManifest), folder / "many").read(
        np.arange(50 * len(ways))
    )
    for name, found in read.items():
        rows = [h5py.File(folder / f"{number}.h5")[name][...] for number in range(len(ways))]
        assert sorted(map(bytes, found)) == sorted(map(bytes, np.concatenate(rows)))


@few
@given(count=st.integers(60, 150), **SPLIT)
def test_any_split_of_a_mixture(
    count: int, tasks: int, draw: Random, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "in").mkdir()
    tokens_in(folder / "in", tokenizer, count)
    (folder / "a.jsonl").write_bytes(lines_of(make_documents(count)))
    sources = {
        "web": {"source": str(folder / "a.jsonl"), "held_out": 0.2},
        "code": {"source": str(folder / "in"), "records": "tokens", "held_out": 0.2},
    }
    mixture = {"sources": sources, "weights": [{"weights": {"web": 1, "code": 1}}]}
    data = DataConfig.model_validate(
        {"mixture": mixture, "tokenizer": {"kind": "file", "path": tokenizer}, "shard_tokens": 2048}
    )
    same_in_any_split(lambda path: MixtureFolder(data, path), folder, tasks, draw)
    assert [part.name for part in load_manifest(folder / "many").parts] == ["web", "code"]


@pytest.mark.parametrize("ending", FORMATS)
def test_damaged_texts_are_refused_or_read(ending: str, tmp_path: Path) -> None:
    """A thousand in all. What has a checksum is read right, or refused; the rest never crashes, or reads far more."""
    source, documents = Random(ending), make_documents(30)
    whole, refused, checked = FORMATS[ending](documents), 0, ending.endswith((".gz", ".zst", ".bz2", ".xz"))
    path = tmp_path / f"a{ending}"
    for _ in range(150):
        path.write_bytes(content := mutate(whole, source))
        try:
            (found,) = find_inputs(DataConfig(source=str(path)))
            end = len(read_row_group_sizes(str(path), "text")) if ending == ".parquet" else len(content)
            read = list(read_documents(found, 0, end, "text"))
        except UserError as error:
            assert str(path) in str(error)
            refused += 1
            continue
        good = [one.text for one in read if one.reason is None]
        assert sum(map(len, good)) <= 4 * sum(map(len, documents))
        assert all(one.reason is None or not one.text for one in read)
        if checked and content:
            assert good == documents
    assert refused > 30 or ending in (".jsonl", ".txt", ".csv")


@pytest.mark.parametrize("way", ["plain", *LAYOUTS])
def test_damaged_samples_are_refused_or_read(way: str, tmp_path: Path) -> None:
    """600 in all. What no checksum protects may read as other values, in the same shapes."""
    write_samples(path := tmp_path / "a.h5", **LAYOUTS.get(way, {}))
    source, whole, refused = Random(way), path.read_bytes(), 0
    data = DataConfig(source=str(path), held_out=0)
    for number in range(150):
        path.write_bytes(mutate(whole, source))
        folder = SamplesFolder(data, tmp_path / str(number), PACKAGE, MODEL)
        try:
            folder.prepare(discard_log)
            folder.shard(0, 1, discard_log)
            assert folder.finalize(discard_log)
            samples = SampleDataset(read_manifest_file(folder.path / "manifest.json", SampleManifest), folder.path)
            assert len(samples) <= 100
            samples.read(np.arange(len(samples)))
        except (UserError, InputError) as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 30

"""Tests of all input formats with random documents.

Any number of tasks writes the same bytes, and a damaged file is rejected or read without a crash.
"""

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
from tests.data_prep.test_token_files import MAPPABLE_WRITERS, damage_content, encode_documents, flatten, read_entries
from tests.data_prep.test_token_files import make_config as make_tokens_config
from tests.data_prep.test_unpacked_samples import LAYOUTS
from tests.data_prep.test_unpacked_samples import write_images as write_samples

IMAGE_MODEL = UserModel("own", Path("own.py"), frozenset(), ("images", "labels"), ("images",), ())


# Each of the following functions returns the content of a file with these documents, in one format.


def encode_jsonl(documents: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()


def encode_tar(documents: list[str]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for number, text in enumerate(documents):
            member = tarfile.TarInfo(f"{number:04}.txt")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return content.getvalue()


def encode_parquet(documents: list[str]) -> bytes:
    content = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(documents, "string")}), content, row_group_size=3)
    return content.getvalue()


def encode_arrow(documents: list[str]) -> bytes:
    content = io.BytesIO()
    table = pyarrow.table({"text": pyarrow.array(documents, "string")})
    with pyarrow.ipc.new_stream(content, table.schema) as stream:
        stream.write_table(table, max_chunksize=3)
    return content.getvalue()


def encode_csv(documents: list[str], delimiter: str = ",") -> bytes:
    content = io.StringIO()
    rows = csv.writer(content, delimiter=delimiter)
    rows.writerows([("id", "text"), *((number, text) for number, text in enumerate(documents))])
    return content.getvalue().encode()


FORMATS: dict[str, Callable[[list[str]], bytes]] = {
    ".jsonl": encode_jsonl,
    ".jsonl.gz": lambda documents: gzip.compress(encode_jsonl(documents)),
    ".jsonl.zst": lambda documents: zstandard.ZstdCompressor(write_checksum=True).compress(encode_jsonl(documents)),
    ".jsonl.bz2": lambda documents: bz2.compress(encode_jsonl(documents)),
    ".jsonl.xz": lambda documents: lzma.compress(encode_jsonl(documents)),
    ".json": lambda documents: json.dumps([{"text": text} for text in documents], indent=1).encode(),
    ".json.gz": lambda documents: gzip.compress(encode_jsonl(documents)),
    ".csv": encode_csv,
    ".tsv.xz": lambda documents: lzma.compress(encode_csv(documents, "\t")),
    ".parquet": encode_parquet,
    ".arrow": encode_arrow,
    ".tar": encode_tar,
    ".txt": lambda documents: "\n".join(documents).encode(),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a small tokenizer and return the path of its file."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "a.jsonl").write_bytes(encode_jsonl(make_documents(60)))
    run_prepare(make_data_config(str(folder / "a.jsonl")), folder / "data", discard_log)
    return folder / "data/tokenizer.json"


def check_that_tasks_write_the_same_bytes(
    open_data_folder: Callable[[Path], DataFolder[Any, Any]], folder: Path, tasks: int, generator: Random
) -> None:
    """Check that `tasks` tasks write the same files as a single task.

    The tasks run in random order, and one of them runs twice. The single task writes to `folder/one`, and the others
    write to `folder/many`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_prep.work_units.MIN_UNIT_BYTES", 256)
        patch.setattr("data_prep.samples_folder._BLOCK_BYTES", 3000)
        patch.setattr(os, "fsync", lambda fd: None)  # fsync is slow, and matters only if the machine crashes
        task_order = [*range(tasks), generator.randrange(tasks)]
        generator.shuffle(task_order)
        for name, order, count in (("one", [0], 1), ("many", task_order, tasks)):
            open_data_folder(folder / name).prepare(discard_log)
            for task in order:
                open_data_folder(folder / name).shard(task, count, discard_log)
            assert open_data_folder(folder / name).finalize(discard_log)
    assert read_all_files(folder / "one") == read_all_files(folder / "many")


TASKS_AND_GENERATOR = {"tasks": st.integers(2, 7), "generator": st.randoms(use_true_random=False)}
"""Arguments of `given`: the number of tasks, and the random generator that shuffles them."""
few_examples = settings(max_examples=6)


@few_examples
@given(
    counts=st.tuples(*(st.integers(0, 12) for _ in FORMATS)),
    documents_are_lines=st.booleans(),
    deduplicate=st.booleans(),
    **TASKS_AND_GENERATOR,
)
def test_any_split_of_any_inputs_gives_the_same_bytes(
    counts: tuple[int, ...],
    tasks: int,
    documents_are_lines: bool,
    deduplicate: bool,
    generator: Random,
    tokenizer: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Write one file of each format with the number of documents in `counts`, and one file that is never empty."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "in").mkdir()
    files = [(".jsonl", 25), *zip(FORMATS, counts, strict=True)]
    generator.shuffle(files)
    for number, (ending, count) in enumerate(files):
        (folder / f"in/{number}{ending}").write_bytes(FORMATS[ending](make_documents(count)))
    data = DataConfig(
        source=str(folder / "in"),
        tokenizer=TokenizerConfig(kind="file", path=tokenizer),
        shard_tokens=8192,
        held_out=0.2,
        text_documents="line" if documents_are_lines else "file",
        deduplicate=deduplicate,
    )
    check_that_tasks_write_the_same_bytes(lambda path: TextFolder(data, path), folder, tasks, generator)
    assert load_manifest(folder / "many").documents >= 25


def write_token_files(folder: Path, tokenizer: Path, count: int) -> list[int]:
    """Write `count` or fewer documents in each format that runs use in place.

    Return the tokens of all files, ordered by file name.
    """
    documents = encode_documents(tokenizer, count)
    documents_by_path = {
        write(folder, documents[number:]): documents[number:] for number, write in enumerate(MAPPABLE_WRITERS)
    }
    return [token for path in sorted(documents_by_path) for token in flatten(documents_by_path[path])]


@few_examples
@given(count=st.integers(120, 300), limit=st.integers(1024, 3000), **TASKS_AND_GENERATOR)
def test_any_split_of_token_files_gives_the_same_manifest_with_each_token_once(
    count: int, limit: int, tasks: int, generator: Random, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "in").mkdir()
    expected_tokens = write_token_files(folder / "in", tokenizer, count)
    data = make_tokens_config(str(folder / "in"), tokenizer, shard_tokens=limit)
    check_that_tasks_write_the_same_bytes(lambda path: TokensFolder(data, path), folder, tasks, generator)
    manifest = load_manifest(folder / "many")
    assert len(manifest.train) >= 2 * len(MAPPABLE_WRITERS), "the files were not split"
    entries = sorted((*manifest.train, *manifest.held_out), key=lambda entry: (entry.file, entry.offset))
    assert read_entries(folder / "many", (*entries,)) == expected_tokens


@few_examples
@given(layouts=st.lists(st.sampled_from([{}, *LAYOUTS.values()]), min_size=1, max_size=5), **TASKS_AND_GENERATOR)
def test_any_split_of_sample_files_gives_the_samples_that_were_written(
    layouts: list[dict[str, Any]], tasks: int, generator: Random, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The arrays of the files are contiguous (`{}`), chunked or compressed."""
    folder = tmp_path_factory.mktemp("inputs")
    for number, options in enumerate(layouts):
        write_samples(folder / f"{number}.h5", **options)
    data = DataConfig(source=f"{folder}/*.h5", held_out=0)
    check_that_tasks_write_the_same_bytes(
        lambda path: SamplesFolder(data, path, PACKAGE, IMAGE_MODEL), folder, tasks, generator
    )
    dataset = SampleDataset(read_manifest_file(folder / "many/manifest.json", SampleManifest), folder / "many")
    samples = dataset.read(np.arange(50 * len(layouts)))  # each file has 50
    for name, array in samples.items():
        written_arrays = [h5py.File(folder / f"{number}.h5")[name][...] for number in range(len(layouts))]
        assert sorted(map(bytes, array)) == sorted(map(bytes, np.concatenate(written_arrays)))


@few_examples
@given(count=st.integers(60, 150), **TASKS_AND_GENERATOR)
def test_any_split_of_a_mixture_of_text_and_tokens_gives_the_same_bytes(
    count: int, tasks: int, generator: Random, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "in").mkdir()
    write_token_files(folder / "in", tokenizer, count)
    (folder / "a.jsonl").write_bytes(encode_jsonl(make_documents(count)))
    sources = {
        "web": {"source": str(folder / "a.jsonl"), "held_out": 0.2},
        "code": {"source": str(folder / "in"), "records": "tokens", "held_out": 0.2},
    }
    mixture = {"sources": sources, "weights": [{"weights": {"web": 1, "code": 1}}]}
    data = DataConfig.model_validate(
        {"mixture": mixture, "tokenizer": {"kind": "file", "path": tokenizer}, "shard_tokens": 2048}
    )
    check_that_tasks_write_the_same_bytes(lambda path: MixtureFolder(data, path), folder, tasks, generator)
    assert [part.name for part in load_manifest(folder / "many").parts] == ["web", "code"]


@pytest.mark.parametrize("ending", FORMATS)
def test_a_damaged_text_file_is_rejected_or_read(ending: str, tmp_path: Path) -> None:
    """Damage a file of each format 150 times at random.

    If the format has checksums, the file must be rejected or read correctly. With other formats, other text may be
    read, but at most four times as much as the file contained, and reading must not crash.
    """
    generator = Random(ending)
    documents = make_documents(30)
    original_content = FORMATS[ending](documents)
    has_checksum = ending.endswith((".gz", ".zst", ".bz2", ".xz"))
    rejections = 0
    path = tmp_path / f"a{ending}"
    for _ in range(150):
        path.write_bytes(content := damage_content(original_content, generator))
        try:
            (text_input,) = find_inputs(DataConfig(source=str(path)))
            end = len(read_row_group_sizes(str(path), "text")) if ending == ".parquet" else len(content)
            documents_read = list(read_documents(text_input, 0, end, "text"))
        except UserError as error:
            assert str(path) in str(error)
            rejections += 1
            continue
        accepted_texts = [document.text for document in documents_read if document.reason is None]
        assert sum(map(len, accepted_texts)) <= 4 * sum(map(len, documents))
        assert all(document.reason is None or not document.text for document in documents_read)
        if has_checksum and content:
            assert accepted_texts == documents
    # In these three formats, damage makes only single documents unreadable. They are rejected without an error.
    assert rejections > 30 or ending in (".jsonl", ".txt", ".csv")


@pytest.mark.parametrize("layout", ["contiguous", *LAYOUTS])
def test_a_damaged_sample_file_is_rejected_or_read(layout: str, tmp_path: Path) -> None:
    """Damage a file of each layout 150 times at random. Values without a checksum may change, but not their shapes."""
    write_samples(path := tmp_path / "a.h5", **LAYOUTS.get(layout, {}))
    generator = Random(layout)
    original_content = path.read_bytes()
    rejections = 0
    data = DataConfig(source=str(path), held_out=0)
    for number in range(150):
        path.write_bytes(damage_content(original_content, generator))
        folder = SamplesFolder(data, tmp_path / str(number), PACKAGE, IMAGE_MODEL)
        try:
            folder.prepare(discard_log)
            folder.shard(0, 1, discard_log)
            assert folder.finalize(discard_log)
            samples = SampleDataset(read_manifest_file(folder.path / "manifest.json", SampleManifest), folder.path)
            assert len(samples) <= 100, "damage more than doubled the number of samples"
            samples.read(np.arange(len(samples)))
        except (UserError, InputError) as error:
            assert str(path) in str(error)
            rejections += 1
    assert rejections > 30

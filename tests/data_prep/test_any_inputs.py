"""Property tests over all formats of text: any split gives the same bytes, and damaged files are refused or read."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.inputs.listing import find_inputs
from data_prep.inputs.sources import parquet_groups, read_documents
from data_prep.text.text_folder import TextFolder
from pipeline.base.errors import UserError
from pipeline.config.datasets import DataConfig, TokenizerConfig
from tests.data_prep.test_shards import all_bytes, config, prepare, quiet, run_tasks, texts
from tests.data_prep.test_token_files import mutated


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


FORMATS: dict[str, Callable[[list[str]], bytes]] = {
    ".jsonl": lines_of,
    ".jsonl.gz": lambda documents: gzip.compress(lines_of(documents)),
    ".jsonl.zst": lambda documents: zstandard.ZstdCompressor(write_checksum=True).compress(lines_of(documents)),
    ".parquet": parquet_of,
    ".arrow": arrow_of,
    ".tar": tar_of,
    ".txt": lambda documents: "\n".join(documents).encode(),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "a.jsonl").write_bytes(lines_of(texts(60)))
    prepare(config(str(folder / "a.jsonl")), folder / "data", quiet)
    return folder / "data/tokenizer.json"


@settings(deadline=None, max_examples=6)
@given(
    files=st.lists(st.tuples(st.sampled_from([*FORMATS]), st.integers(0, 25)), min_size=1, max_size=4),
    tasks=st.integers(2, 7),
    lines=st.booleans(),
    once=st.booleans(),
    draw=st.randoms(use_true_random=False),
)
def test_any_split_of_any_inputs_gives_the_same_bytes(
    files: list[tuple[str, int]],
    tasks: int,
    lines: bool,
    once: bool,
    draw: random.Random,
    tokenizer: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Tasks in any order, some twice, one before another has begun."""
    folder = tmp_path_factory.mktemp("inputs")
    for number, (ending, count) in enumerate([(".jsonl", 9), *files]):
        (folder / "in").mkdir(exist_ok=True)
        (folder / f"in/{number}{ending}").write_bytes(FORMATS[ending](texts(count)))
    data = DataConfig(
        source=str(folder / "in"),
        tokenizer=TokenizerConfig(kind="file", path=tokenizer),
        shard_tokens=8192,
        held_out=0.2,
        text_documents="line" if lines else "file",
        deduplicate=once,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_prep.text.units.MIN_UNIT_BYTES", 256)
        patch.setattr(os, "fsync", lambda fd: None)  # slow, and no matter here
        run_tasks(data, folder / "one")
        prepare(data, folder / "many", quiet)
        dealt = [*range(tasks), draw.randrange(tasks)]
        draw.shuffle(dealt)
        for task in dealt:
            TextFolder(data, folder / "many").shard(task, tasks, quiet)
        assert TextFolder(data, folder / "many").finalize(quiet)
    assert all_bytes(folder / "one") == all_bytes(folder / "many")


@pytest.mark.parametrize("ending", FORMATS)
def test_damaged_texts_are_refused_or_read(ending: str, tmp_path: Path) -> None:
    """A thousand in all. What has a checksum is read right, or refused; the rest never crashes, or reads far more."""
    source, documents = random.Random(ending), texts(30)
    whole, refused, checked = FORMATS[ending](documents), 0, ending in (".jsonl.gz", ".jsonl.zst")
    path = tmp_path / f"a{ending}"
    for _ in range(150):
        path.write_bytes(content := mutated(whole, source))
        try:
            (found,) = find_inputs(DataConfig(source=str(path)))
            end = len(parquet_groups(str(path), "text")) if ending == ".parquet" else len(content)
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
    assert refused > 30 or ending in (".jsonl", ".txt")

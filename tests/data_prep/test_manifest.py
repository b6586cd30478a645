"""Manifests: damage and change are found and named; the login node's side imports nothing heavy."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.submit import start_run
from data_prep.data_folder import PACKAGE, PROGRESS_FILE, SHARED_MODULES, hash_code
from data_prep.text_folder import TextFolder
from pipeline.base.dist_env import RankInfo, read_rank_info
from pipeline.base.errors import ExitCode, InputError, UserError
from pipeline.base.files import add_checksum, sha256_json
from pipeline.config.datasets import DataConfig, TokenizerConfig
from pipeline.config.read import load_config
from pipeline.data.manifest import FORMAT_VERSION, load_manifest
from pipeline.run.code import CODE_ROOT as ROOT
from pipeline.run.directory import Run
from pipeline.run.stages import list_resume_notes, load_stage_module
from tests.data_prep.test_shards import (
    build_shards,
    count_units,
    discard_log,
    make_data_config,
    make_documents,
    run_finalize,
    run_prepare,
    run_shard_task,
    write_jsonl,
)
from tests.support.events import read_event_lines
from tests.support.ranks import run_ranks
from tests.support.tiny import HarmlessFlag, make_run, write_config

PREPARED = ("tokenizer.json", "units.json")


def finalize_quietly(data: DataConfig, folder: Path) -> bool:
    return TextFolder(data, folder).finalize(discard_log)


def prepare_missing(data: DataConfig, folder: Path) -> str | None:
    return TextFolder(data, folder).find_prepare_problem()


def shard_missing(data: DataConfig, folder: Path) -> str | None:
    return TextFolder(data, folder).find_shard_problem()


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """A config with a source of its own."""
    return make_data_config([str(write_jsonl(tmp_path / "a.jsonl", make_documents(80)))])


@pytest.fixture
def done(tmp_path: Path, data: DataConfig) -> Path:
    """A data folder with all shards."""
    build_shards(data, tmp_path / "data")
    return tmp_path / "data"


def test_missing_and_progress_follow_the_stages(tmp_path: Path, data: DataConfig) -> None:
    folder = tmp_path / "data"
    assert "prepare.json is missing" in str(prepare_missing(data, folder))
    assert "prepare.json is missing" in str(shard_missing(data, folder))
    assert count_units(data, folder) == (0, 0)
    first = "run the prepare stage first: `python -m pipeline prepare RUN`"
    for do in (
        lambda: run_shard_task(data, folder, 0, 1, discard_log),
        lambda: load_manifest(folder),
    ):  # what shard, and train, do
        with pytest.raises(InputError, match=rf"\.json is missing: {first}"):
            do()
    run_prepare(data, folder, discard_log)
    assert prepare_missing(data, folder) is None
    with pytest.raises(InputError, match=r"manifest\.json is missing: run the shard stage again"):
        load_manifest(folder)
    assert "manifest.json is missing" in str(shard_missing(data, folder))
    total = count_units(data, folder)[1]
    assert TextFolder(data, folder).measure_progress() == (0, total, None)
    run_shard_task(data, folder, 0, 2, discard_log)
    left_s = TextFolder(data, folder).measure_progress()[2]
    assert left_s is not None and 0 < left_s < 60
    assert count_units(data, folder) == ((total + 1) // 2, total)
    run_shard_task(data, folder, 1, 2, discard_log)
    assert count_units(data, folder) == (total, total)
    written = run_finalize(data, folder, discard_log)
    assert shard_missing(data, folder) is None and prepare_missing(data, folder) is None
    assert load_manifest(folder) == written
    assert written.train_tokens == sum(entry.tokens for entry in written.train)
    assert TextFolder(data, folder).describe_result() == (
        f": {written.documents} documents, {written.train_tokens:,} + {written.held_out_tokens:,} held-out tokens"
    )


def test_while_tasks_work_one_file_tells_how_far_they_are(
    tmp_path: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a login node nor the tasks that end first read what all tasks made."""
    folder = tmp_path / "data"
    run_prepare(data, folder, discard_log)
    run_shard_task(data, folder, 0, 2, discard_log)
    run_shard_task(data, folder, 0, 2, discard_log)  # a repeated task is not counted twice
    read: list[str] = []
    real = os.open

    def noted(path: Any, *more: Any, **how: Any) -> Any:
        read.append(str(path))
        return real(path, *more, **how)

    monkeypatch.setattr(os, "open", noted)
    done, total, _ = TextFolder(data, folder).measure_progress()
    assert (done, total) == ((total + 1) // 2, total) and not TextFolder(data, folder).finalize(discard_log)
    first = f"unit-{1:05d}.json"  # the first that no line names, and it is not there
    assert first in {Path(path).name for path in read} and not (folder / "shards" / first).exists()
    assert {Path(path).name for path in read} <= {"prepare.json", "progress.jsonl", *PREPARED, first} | {
        path.name
        for path in (*PACKAGE.rglob("*.py"), *map(Path, SHARED_MODULES))  # the hash of the code is part of the key
    }
    assert TextFolder(data.model_copy(update={"shard_tokens": 4096}), folder).measure_progress() == (0, 0, None)
    monkeypatch.undo()
    (folder / PROGRESS_FILE).write_text(
        '{"key": "of another config", "unit": 1}\n' + (folder / PROGRESS_FILE).read_text()
    )
    assert count_units(data, folder)[0] == done


def test_units_without_their_line_of_progress_are_asked(tmp_path: Path, data: DataConfig) -> None:
    """On a file system without locks a line may be written over."""
    folder = tmp_path / "data"
    run_prepare(data, folder, discard_log)
    run_shard_task(data, folder, 0, 2, discard_log)
    run_shard_task(data, folder, 1, 2, discard_log)
    _, *others = (folder / PROGRESS_FILE).read_text().splitlines(keepends=True)
    (folder / PROGRESS_FILE).write_text("".join(others))
    assert count_units(data, folder)[0] == len(others)
    assert run_finalize(data, folder, discard_log).documents == 80


def test_a_repeated_task_adds_a_line_only_where_there_is_none(tmp_path: Path, data: DataConfig) -> None:
    folder = tmp_path / "data"
    run_prepare(data, folder, discard_log)
    run_shard_task(data, folder, 0, 2, discard_log)
    told = (folder / PROGRESS_FILE).read_text()
    run_shard_task(data, folder, 0, 2, discard_log)
    assert (folder / PROGRESS_FILE).read_text() == told
    (folder / PROGRESS_FILE).write_text("")
    run_shard_task(data, folder, 0, 2, discard_log)
    assert len((folder / PROGRESS_FILE).read_text().splitlines()) == len(told.splitlines())


@pytest.mark.parametrize("records", ["text", "prompts"])
def test_the_key_of_a_folder_made_before_there_were_filters_still_fits(tmp_path: Path, records: str) -> None:
    """By the formula of then: `deduplicate` and `filter` were no keys, `records` of text was left out."""
    data = make_data_config(str(tmp_path / "a.jsonl"), records=records, sequence_length=512, add_special_tokens=False)
    left = {"verify", "max_rejected", "document_mask", "deduplicate", "filter", "add_special_tokens"}
    left |= {"chat_template", "long_dialogues", "format"}
    left |= {"sequence_length", "records"} if records == "text" else set()
    then = {**data.model_dump(mode="json", exclude=left), "source": data.sources}
    folder = TextFolder(data, tmp_path / "data")
    assert folder.key == sha256_json({"format": FORMAT_VERSION, "config": then, "code": folder.code_hash})
    others: list[dict[str, Any]] = [{"deduplicate": True}, {"filter": "quality:keep"}, {"add_special_tokens": "auto"}]
    for more in (*others, {"chat_template": Path("qwen3")}, {"long_dialogues": "drop"}, {"format": "jsonl"}):
        assert TextFolder(data.model_copy(update=more), tmp_path / "data").key != folder.key


def test_rejected_documents_are_told_at_the_end_of_shard(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with open(tmp_path / "corpus.jsonl", "a") as file:
        file.write("{\n")
    run = Run.create(load_config(config, ["data.max_rejected=0.1"]))
    for stage in ("prepare", "shard"):
        load_stage_module(stage).run_stage(run, read_rank_info({}), {}, HarmlessFlag())
    told = load_stage_module("shard").progress(run)
    assert re.fullmatch(
        r"(\d)/\1 units: 300 documents, 33,270 \+ 6,022 held-out tokens, 1 documents rejected \(data/rejected\.jsonl\)",
        told.description,
    ), told
    assert re.fullmatch(r"(\d)/\1 units", told.running_description)


def test_what_a_folder_holds_besides_is_told_by_prepare(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    for name in ("a.md", "deep/b.md", "c.json", "deep/LICENSE", ".hidden", ".git/d.md"):
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_text("x")
    (tmp_path / "corpus.jsonl").rename(tmp_path / "folder/corpus.jsonl")
    run = Run.create(load_config(config, [f"data.source={tmp_path}/folder"]))
    assert load_stage_module("prepare").progress(run).description == "-"
    load_stage_module("prepare").run_stage(run, read_rank_info({}), {}, HarmlessFlag())
    told = load_stage_module("prepare").progress(run).description
    wanted = r"1 file, about [\d,]+ bytes; left out 4 of other kinds: \.json, \.md, no ending"
    assert re.fullmatch(wanted, told), told


def test_what_is_new_since_the_shards_is_told_and_what_was_cleared_away_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = write_config(tmp_path), tmp_path / "texts"
    folder.mkdir()
    corpus = (tmp_path / "corpus.jsonl").rename(folder / "corpus.jsonl")
    (folder / "gone.jsonl").write_bytes(corpus.read_bytes())
    run = Run.create(load_config(config, [f"data.source={folder}"]))
    corpus.touch()
    for stage in ("prepare", "shard"):
        assert list_resume_notes(run) == []  # while there are shards to make, they are made of what there is
        load_stage_module(stage).run_stage(run, read_rank_info({}), {}, HarmlessFlag())
    (folder / "gone.jsonl").unlink()
    assert list_resume_notes(run) == []
    (folder / "more.jsonl").touch()
    assert [re.split(r"\. |note: ", told)[1] for told in list_resume_notes(run)] == [
        f"{folder}/more.jsonl (1 in all) is new or has changed since the shards were made"
    ]
    with open(corpus, "a") as file:
        file.write('{"text": "more"}\n')
    monkeypatch.setattr("slurm.submit.local_runner.run_chain_locally", lambda run, console: ExitCode.STOPPED)
    with pytest.raises(typer.Exit):
        start_run(run, "local", is_resumed=True)
    assert f"note: {corpus} (2 in all) is new or has changed" in capsys.readouterr().out
    shutil.rmtree(folder)
    assert list_resume_notes(run) == []


def test_too_little_text_to_train_on_is_refused_by_shard_and_mended_by_resume(tmp_path: Path) -> None:
    run = Run.create(load_config(write_config(tmp_path), ["data.sequence_length=40000", "data.shard_tokens=50000"]))
    load_stage_module("prepare").run_stage(run, read_rank_info({}), {}, HarmlessFlag())
    with pytest.raises(
        UserError, match=r"no training sample: a sample takes 40001 tokens .* reduce data\.sequence_length"
    ):
        load_stage_module("shard").run_stage(run, read_rank_info({}), {}, HarmlessFlag())
    assert load_stage_module("shard").missing_outputs(run) is not None
    run.apply_overrides(["data.sequence_length=10000"])
    load_stage_module("shard").run_stage(run, read_rank_info({}), {}, HarmlessFlag())
    assert load_stage_module("shard").missing_outputs(run) is None


def test_damaged_shard_is_named_with_the_way_out(done: Path, data: DataConfig) -> None:
    entry = load_manifest(done).train[1]
    path = done / entry.file
    whole = path.read_bytes()
    entry.check(done, hashes=True)
    for place in (0, entry.offset, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        entry.check(done, hashes=False)
        with pytest.raises(InputError, match=rf"{path} is damaged: its sha256 .*: .*python submit\.py resume RUN"):
            entry.check(done, hashes=True)
    path.write_bytes(whole[:-1])
    with pytest.raises(
        InputError, match=rf"{path} has {len(whole) - 1} bytes, not {len(whole)} as in its manifest: run"
    ):
        entry.check(done, hashes=False)
    assert f"{path} has" in str(shard_missing(data, done))
    assert count_units(data, done)[0] == count_units(data, done)[1] - 1
    path.unlink()
    with pytest.raises(InputError, match=rf"{path} is missing: run the shard stage again"):
        entry.check(done, hashes=False)
    build_shards(data, done)
    assert path.read_bytes() == whole and shard_missing(data, done) is None


@pytest.mark.parametrize("name", ["manifest.json", "prepare.json"])
@pytest.mark.parametrize(
    "content", ["", "[]", "null", '{"key": 1}', '{"train": [{"file": 1}]}', '{"tokenizer": 3}', "\xff"]
)
def test_torn_manifest_is_an_input_error(done: Path, data: DataConfig, name: str, content: str) -> None:
    (done / name).write_bytes(content.encode("latin-1"))
    assert f"{name} is incomplete" in str(shard_missing(data, done))
    if name == "manifest.json":
        with pytest.raises(InputError, match=r"manifest\.json is incomplete"):
            load_manifest(done)


def test_a_manifest_without_its_seal_is_not_believed(done: Path, data: DataConfig) -> None:
    values = json.loads((done / "manifest.json").read_text())
    del values["sha256"]
    (done / "manifest.json").write_text(json.dumps(values | {"held_out_bytes": 1}))
    with pytest.raises(InputError, match=r"manifest\.json is damaged: .* its own hash: run the shard stage again"):
        load_manifest(done)
    assert "manifest.json is damaged" in str(shard_missing(data, done))
    build_shards(data, done)
    assert load_manifest(done).held_out_bytes > 1


@pytest.mark.parametrize("name", ["tokenizer.json", "units.json"])
def test_damaged_output_of_prepare_is_found_and_made_again(done: Path, data: DataConfig, name: str) -> None:
    whole = (done / name).read_bytes()
    for damaged, message in ((whole[:-2], "as in its manifest"), (whole.replace(b"1", b"2", 1), "is damaged")):
        (done / name).write_bytes(damaged)
        assert message in str(prepare_missing(data, done))
        with pytest.raises(InputError, match=rf"{name} (has|is damaged).*: run the prepare stage again"):
            run_shard_task(data, done, 0, 1, discard_log)
        run_prepare(data, done, discard_log)
        assert (done / name).read_bytes() == whole and shard_missing(data, done) is None


def test_changed_input_counts_until_the_shards_are_written(tmp_path: Path, data: DataConfig) -> None:
    source, folder = tmp_path / "a.jsonl", tmp_path / "data"
    run_prepare(data, folder, discard_log)
    source.write_bytes(source.read_bytes() + b"\n")
    assert str(prepare_missing(data, folder)).startswith(f"input {source} has changed")
    build_shards(data, folder)
    assert prepare_missing(data, folder) is None
    source.unlink()
    assert prepare_missing(data, folder) is None
    (folder / "manifest.json").unlink()
    assert str(prepare_missing(data, folder)).startswith(f"input {source} has been removed")


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
    assert (TextFolder(data.model_copy(update=change), Path()).key == TextFolder(data, Path()).key) is same


def test_other_code_makes_everything_missing(done: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.data_folder.hash_code", lambda package: "0" * 64)
    assert "tokenizer or code" in str(prepare_missing(data, done))
    assert "tokenizer or code" in str(shard_missing(data, done))


def test_code_hash_covers_names_and_contents(tmp_path: Path) -> None:
    original, copy = hash_code(PACKAGE), tmp_path / "data_prep"
    shutil.copytree(PACKAGE, copy)
    assert hash_code(copy) == original
    with open(copy / "work_units.py", "a") as file:
        file.write("# another rule\n")
    assert hash_code(copy) != original
    shutil.copy(PACKAGE / "work_units.py", copy / "work_units.py")
    (copy / "duplicates.py").rename(copy / "other.py")
    assert hash_code(copy) != original


def test_modules_of_pipeline_that_shape_shards_are_part_of_the_key(tmp_path: Path, data: DataConfig) -> None:
    shutil.copytree(PACKAGE, tmp_path / "data_prep", ignore=shutil.ignore_patterns("__pycache__"))

    def key() -> str:
        return TextFolder(data, tmp_path, tmp_path / "data_prep").key

    assert "pipeline/data/chat_template_worker.py" in SHARED_MODULES, "it renders dialogues"
    keys = [key()]
    for name in SHARED_MODULES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE.parent / name, tmp_path / name)
        keys.append(key())
    assert keys[-1] == TextFolder(data, tmp_path).key
    for name in SHARED_MODULES:
        (tmp_path / name).write_text((tmp_path / name).read_text() + "# another rule\n")
        keys.append(key())
    assert len(set(keys)) == len(keys)


def test_manifest_of_another_tokenizer_does_not_fit(done: Path, data: DataConfig) -> None:
    prepared = json.loads((done / "prepare.json").read_text())
    prepared["tokenizer"]["sha256"] = "0" * 64
    (done / "prepare.json").write_text(json.dumps(add_checksum(prepared)))
    assert "was made with another data config, tokenizer or code" in str(shard_missing(data, done))
    assert count_units(data, done)[0] == 0


@pytest.mark.parametrize("name", ["manifest.json", "prepare.json", "shards/unit-00000.json"])
def test_a_number_that_changed_is_noticed_and_mended(done: Path, data: DataConfig, name: str) -> None:
    whole, shards = (done / name).read_bytes(), {p: p.stat().st_mtime_ns for p in (done / "shards").glob("*.h5")}
    key = {"manifest.json": "offset", "prepare.json": "eos_id"}.get(name, "offset")
    number = re.search(rb'"%s": (\d+)' % key.encode(), whole)
    assert number is not None
    (done / name).write_bytes(whole[: number.start(1)] + b"%d" % (int(number[1]) + 2) + whole[number.end(1) :])
    if name.startswith("shards"):  # the manifest of all does not need it any more
        assert not finalize_quietly(data, done) and shard_missing(data, done) is None
    else:
        reason = str(shard_missing(data, done))
        assert f"{done / name} is damaged: its content does not match its own hash: run the" in reason
    build_shards(data, done)
    assert (
        (done / name).read_bytes() == whole
        and shard_missing(data, done) is None
        and prepare_missing(data, done) is None
    )
    if not name.startswith("shards"):
        assert {path: path.stat().st_mtime_ns for path in shards} == shards, "no shard was written again"


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_ranks_compare_the_manifest_with_the_shards_themselves(tmp_path: Path, split: str) -> None:
    """Two digits, and every token that is trained on is another one; the shard and its hash are as they were."""
    run = make_run(tmp_path)
    values = json.loads((run.data_dir / "manifest.json").read_text())
    entry = values[split][0]
    entry["offset"] += 2
    entry["tokens"] -= 1
    (run.data_dir / "manifest.json").write_text(json.dumps(add_checksum(values)))
    shard_file = run.data_dir / entry["file"]
    message = rf"array tokens in {shard_file} is offset=.*offset={entry['offset']} .*Remove .*manifest\.json"
    with pytest.raises(AssertionError, match=message):
        run_ranks(1, checked_rank, run.path, split)
    assert shard_file.exists() and read_event_lines(run, None, "damaged") == []
    (run.data_dir / "manifest.json").unlink()
    load_stage_module("shard").run_stage(run, read_rank_info({}), {}, HarmlessFlag())
    run_ranks(1, checked_rank, run.path, split)


def test_cached_hashes_are_not_taken_again_while_a_file_is_as_it_was(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run_ranks(1, checked_rank, run.path, "train", "cached")
    shard_file = run.data_dir / load_manifest(run.data_dir).train[0].file
    content, seen = bytearray(shard_file.read_bytes()), shard_file.stat()
    content[-300] ^= 1
    with open(shard_file, "r+b") as file:  # the same inode
        file.write(content)
    os.utime(shard_file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    run_ranks(1, checked_rank, run.path, "train", "cached")  # nobody read it
    notes = (run.data_dir / "verified.json").read_text()
    (run.data_dir / "verified.json").write_text(notes.replace(str(seen.st_ino), str(seen.st_ino + 1), 1))
    with pytest.raises(AssertionError, match=r"is damaged: its sha256 is"):  # altered notes are none
        run_ranks(1, checked_rank, run.path, "train", "cached")
    assert not shard_file.exists() and shard_file.with_name(f"{shard_file.name}.damaged").exists()
    content[-300] ^= 1
    shard_file.write_bytes(content)
    run_ranks(1, checked_rank, run.path, "train", "cached")
    content[-300] ^= 1
    shard_file.write_bytes(content)  # another time
    with pytest.raises(AssertionError, match=r"is damaged: its sha256 is"):
        run_ranks(1, checked_rank, run.path, "train", "cached")


def checked_rank(where: RankInfo, path: Path, split: str, how: str = "hashes") -> None:
    import torch.distributed as dist

    from pipeline.data.verify_shards import load_run_manifest, verify_shards

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run = Run.open(path)
    assert dist.group.WORLD is not None
    verify_shards(run, getattr(load_run_manifest(run), split), dist.group.WORLD, how=how)


def test_manifest_module_imports_nothing_heavy() -> None:
    script = (
        "import sys, data_prep.shard\n"
        "print([n for n in ('numpy', 'h5py', 'tokenizers', 'torch', 'pyarrow', 'slurm') if n in sys.modules])"
    )
    child = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=240, capture_output=True, text=True)
    assert child.stdout == "[]\n", child.stderr

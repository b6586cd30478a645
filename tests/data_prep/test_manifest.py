"""Tests of the manifests and the progress of a data folder.

Damage and changes are detected, and the checks import no large package.
"""

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
from pipeline.base.errors import ExitCode, InputError
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
from tests.support.errors import raises_error
from tests.support.events import read_event_lines
from tests.support.ranks import run_ranks
from tests.support.tiny import PassiveStopFlag, make_run, write_config

PREPARED_FILES = ("tokenizer.json", "units.json")


def find_prepare_problem(data: DataConfig, folder: Path) -> str | None:
    """Return why the prepare stage is not done; None if it is."""
    return TextFolder(data, folder).find_prepare_problem()


def find_shard_problem(data: DataConfig, folder: Path) -> str | None:
    """Return why the shard stage is not done; None if it is."""
    return TextFolder(data, folder).find_shard_problem()


def run_stages(run: Run, *stages: str) -> None:
    """Run stages in this process."""
    for stage in stages:
        load_stage_module(run, stage).run_stage(run, read_rank_info({}), {}, PassiveStopFlag())


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """Return a config whose source is one file with 80 documents."""
    return make_data_config([str(write_jsonl(tmp_path / "a.jsonl", make_documents(80)))])


@pytest.fixture
def data_dir(tmp_path: Path, data: DataConfig) -> Path:
    """Return a data folder with all shards."""
    build_shards(data, tmp_path / "data")
    return tmp_path / "data"


def test_problems_and_progress_change_as_the_stages_finish(tmp_path: Path, data: DataConfig) -> None:
    folder = tmp_path / "data"
    assert "prepare.json is missing" in str(find_prepare_problem(data, folder))
    assert "prepare.json is missing" in str(find_shard_problem(data, folder))
    assert count_units(data, folder) == (0, 0)
    command = "`python -m pipeline prepare RUN`"
    with raises_error("data.missing_manifest", folder / "prepare.json", command, kind=InputError):
        run_shard_task(data, folder, 0, 1, discard_log)
    with raises_error("data.missing_manifest", folder / "manifest.json", command, kind=InputError):
        load_manifest(folder)  # The train stage does this.
    run_prepare(data, folder, discard_log)
    assert find_prepare_problem(data, folder) is None
    with raises_error("data.missing_manifest", folder / "manifest.json", "shard stage", kind=InputError):
        load_manifest(folder)
    assert "manifest.json is missing" in str(find_shard_problem(data, folder))
    total = count_units(data, folder)[1]
    assert TextFolder(data, folder).measure_progress() == (0, total, None)
    run_shard_task(data, folder, 0, 2, discard_log)
    remaining_s = TextFolder(data, folder).measure_progress()[2]
    assert remaining_s is not None and 0 < remaining_s < 60
    assert count_units(data, folder) == ((total + 1) // 2, total)
    run_shard_task(data, folder, 1, 2, discard_log)
    assert count_units(data, folder) == (total, total)
    manifest = run_finalize(data, folder, discard_log)
    assert find_shard_problem(data, folder) is None
    assert find_prepare_problem(data, folder) is None
    assert load_manifest(folder) == manifest
    assert manifest.train_tokens == sum(entry.tokens for entry in manifest.train)
    assert TextFolder(data, folder).describe_result() == (
        f": {manifest.documents} documents, {manifest.train_tokens:,} + {manifest.held_out_tokens:,} held-out tokens"
    )


def test_progress_is_read_from_one_file_while_tasks_run(
    tmp_path: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifests of all units are read neither to show the progress nor when a task finishes before the others."""
    folder = tmp_path / "data"
    run_prepare(data, folder, discard_log)
    run_shard_task(data, folder, 0, 2, discard_log)
    run_shard_task(data, folder, 0, 2, discard_log)  # A repeated task is not counted twice.
    opened_names: set[str] = set()
    real_open = os.open

    def record_name_and_open(path: Any, *arguments: Any, **options: Any) -> Any:
        opened_names.add(Path(path).name)
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", record_name_and_open)
    finished, total, _ = TextFolder(data, folder).measure_progress()
    assert finished == (total + 1) // 2
    assert not TextFolder(data, folder).finalize(discard_log)
    first_missing = "unit-00001.json"  # the first unit without a line in progress.jsonl
    assert first_missing in opened_names
    assert not (folder / "shards" / first_missing).exists()
    # the code is read because its hash is part of the key
    code_names = {path.name for path in (*PACKAGE.rglob("*.py"), *map(Path, SHARED_MODULES))}
    assert opened_names <= {"prepare.json", "progress.jsonl", *PREPARED_FILES, first_missing} | code_names
    assert TextFolder(data.model_copy(update={"shard_tokens": 4096}), folder).measure_progress() == (0, 0, None)
    monkeypatch.undo()
    outdated_line = '{"key": "of another config", "unit": 1}\n'
    (folder / PROGRESS_FILE).write_text(outdated_line + (folder / PROGRESS_FILE).read_text())
    assert count_units(data, folder)[0] == finished


def test_finalize_finds_units_without_a_line_of_progress(tmp_path: Path, data: DataConfig) -> None:
    """On a file system without locks, one task may overwrite the line of another task."""
    folder = tmp_path / "data"
    run_prepare(data, folder, discard_log)
    run_shard_task(data, folder, 0, 2, discard_log)
    run_shard_task(data, folder, 1, 2, discard_log)
    _, *other_lines = (folder / PROGRESS_FILE).read_text().splitlines(keepends=True)
    (folder / PROGRESS_FILE).write_text("".join(other_lines))
    assert count_units(data, folder)[0] == len(other_lines)
    assert run_finalize(data, folder, discard_log).documents == 80


def test_repeated_task_adds_a_line_of_progress_only_if_it_is_missing(tmp_path: Path, data: DataConfig) -> None:
    folder = tmp_path / "data"
    run_prepare(data, folder, discard_log)
    run_shard_task(data, folder, 0, 2, discard_log)
    lines = (folder / PROGRESS_FILE).read_text()
    run_shard_task(data, folder, 0, 2, discard_log)
    assert (folder / PROGRESS_FILE).read_text() == lines
    (folder / PROGRESS_FILE).write_text("")
    run_shard_task(data, folder, 0, 2, discard_log)
    assert len((folder / PROGRESS_FILE).read_text().splitlines()) == len(lines.splitlines())


@pytest.mark.parametrize("records", ["text", "prompts"])
def test_key_does_not_depend_on_newer_config_keys_with_default_values(tmp_path: Path, records: str) -> None:
    """Data folders that were prepared before these config keys existed stay valid."""
    data = make_data_config(str(tmp_path / "a.jsonl"), records=records, sequence_length=512, add_special_tokens=False)
    excluded = {"verify", "workers", "max_rejected", "document_mask", "deduplicate", "filter", "add_special_tokens"}
    excluded |= {"chat_template", "packing", "long_documents", "format"}
    excluded |= {"sequence_length", "records"} if records == "text" else set()
    old_config = {**data.model_dump(mode="json", exclude=excluded), "source": data.sources}
    folder = TextFolder(data, tmp_path / "data")
    assert folder.key == sha256_json({"format": FORMAT_VERSION, "config": old_config, "code": folder.code_hash})
    changes: list[dict[str, Any]] = [
        {"deduplicate": True},
        {"filter": "quality:keep"},
        {"add_special_tokens": "auto"},
        {"chat_template": Path("qwen3")},
        {"packing": "best_fit"},
        {"long_documents": "drop"},
        {"format": "jsonl"},
    ]
    for change in changes:
        assert TextFolder(data.model_copy(update=change), tmp_path / "data").key != folder.key
    # The former name of `long_documents` is part of the hash.
    key = TextFolder(data.model_copy(update={"long_documents": "drop"}), tmp_path / "data").key
    old_config["long_dialogues"] = "drop"
    assert key == sha256_json({"format": FORMAT_VERSION, "config": old_config, "code": folder.code_hash})


def test_the_key_of_packed_text_depends_on_the_sequence_length(tmp_path: Path) -> None:
    for packing, depends in (("cut", False), ("best_fit", True)):
        data = make_data_config(str(tmp_path / "a.jsonl"), packing=packing, sequence_length=512)
        other_data = data.model_copy(update={"sequence_length": 256})
        keys = {TextFolder(config, tmp_path / "data").key for config in (data, other_data)}
        assert len(keys) == 1 + depends


def test_progress_of_the_shard_stage_counts_rejected_documents(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with open(tmp_path / "corpus.jsonl", "a") as file:
        file.write("{\n")
    run = Run.create(load_config(config, ["data.max_rejected=0.1"]))
    run_stages(run, "prepare", "shard")
    progress = load_stage_module(run, "shard").progress(run)
    units, _, result = progress.description.partition(": ")
    assert re.fullmatch(r"(\d)/\1 units", units)
    for text in ("300 documents", "33,270 + 6,022 held-out tokens", "1 documents rejected", "data/rejected.jsonl"):
        assert text in result
    assert progress.running_description == units


def test_progress_of_prepare_counts_files_of_other_kinds_in_the_source(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    for name in ("a.md", "deep/b.md", "c.json", "deep/LICENSE", ".hidden", ".git/d.md"):
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_text("x")
    (tmp_path / "corpus.jsonl").rename(tmp_path / "folder/corpus.jsonl")
    run = Run.create(load_config(config, [f"data.source={tmp_path}/folder"]))
    assert load_stage_module(run, "prepare").progress(run).description == "-"
    run_stages(run, "prepare")
    description = load_stage_module(run, "prepare").progress(run).description
    files, _, left_out = description.partition("; ")
    assert re.fullmatch(r"1 file, an estimated [\d,]+ bytes of text", files), description
    for text in ("4", ".json", ".md", "no ending"):
        assert text in left_out


def test_resume_names_files_of_the_source_that_are_new_or_changed_but_not_removed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    folder = tmp_path / "texts"
    folder.mkdir()
    corpus = (tmp_path / "corpus.jsonl").rename(folder / "corpus.jsonl")
    (folder / "removed.jsonl").write_bytes(corpus.read_bytes())
    run = Run.create(load_config(config, [f"data.source={folder}"]))
    corpus.touch()
    for stage in ("prepare", "shard"):
        assert list_resume_notes(run) == []  # Shards that are still missing will be built from the current files.
        run_stages(run, stage)
    (folder / "removed.jsonl").unlink()
    assert list_resume_notes(run) == []
    (folder / "more.jsonl").touch()
    [note] = list_resume_notes(run)
    assert f"{folder}/more.jsonl (1 in all)" in note
    with open(corpus, "a") as file:
        file.write('{"text": "more"}\n')
    monkeypatch.setattr("slurm.submit.local_runner.run_chain_locally", lambda run, console: ExitCode.STOPPED)
    with pytest.raises(typer.Exit):
        start_run(run, "local", is_resumed=True)
    assert f"note: {corpus} (2 in all)" in capsys.readouterr().out
    shutil.rmtree(folder)
    assert list_resume_notes(run) == []


def test_shard_fails_if_no_sample_fits_and_succeeds_with_a_shorter_sequence_length(tmp_path: Path) -> None:
    run = Run.create(load_config(write_config(tmp_path), ["data.sequence_length=40000", "data.shard_tokens=50000"]))
    run_stages(run, "prepare")
    with raises_error("data.no_training_sample", "40001 tokens", "data.sequence_length"):
        run_stages(run, "shard")
    assert load_stage_module(run, "shard").describe_missing_outputs(run) is not None
    run.apply_overrides(["data.sequence_length=10000"])
    run_stages(run, "shard")
    assert load_stage_module(run, "shard").describe_missing_outputs(run) is None


def test_check_of_a_shard_names_the_damaged_file_and_the_command_that_repairs_it(
    data_dir: Path, data: DataConfig
) -> None:
    entry = load_manifest(data_dir).train[1]
    path = data_dir / entry.file
    content = path.read_bytes()
    entry.check(data_dir, hashes=True)
    for position in (0, entry.offset, len(content) - 1):
        path.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
        entry.check(data_dir, hashes=False)
        with raises_error("data.damaged_file", path, "sha256", "python submit.py resume RUN", kind=InputError):
            entry.check(data_dir, hashes=True)
    path.write_bytes(content[:-1])
    sizes = (f"{len(content) - 1} bytes", f"not {len(content)}")
    with raises_error("data.damaged_file", path, *sizes, kind=InputError):
        entry.check(data_dir, hashes=False)
    assert str(path) in str(find_shard_problem(data, data_dir))
    assert count_units(data, data_dir)[0] == count_units(data, data_dir)[1] - 1
    path.unlink()
    with raises_error("data.damaged_file", path, "missing", "shard stage", kind=InputError):
        entry.check(data_dir, hashes=False)
    build_shards(data, data_dir)
    assert path.read_bytes() == content
    assert find_shard_problem(data, data_dir) is None


@pytest.mark.parametrize("name", ["manifest.json", "prepare.json"])
@pytest.mark.parametrize(
    "content", ["", "[]", "null", '{"key": 1}', '{"train": [{"file": 1}]}', '{"tokenizer": 3}', "\xff"]
)
def test_incomplete_manifest_is_an_input_error(data_dir: Path, data: DataConfig, name: str, content: str) -> None:
    (data_dir / name).write_bytes(content.encode("latin-1"))
    assert f"{name} is incomplete" in str(find_shard_problem(data, data_dir))
    if name == "manifest.json":
        with raises_error("data.damaged_manifest", data_dir / name, kind=InputError):
            load_manifest(data_dir)


def test_manifest_without_its_checksum_counts_as_damaged(data_dir: Path, data: DataConfig) -> None:
    values = json.loads((data_dir / "manifest.json").read_text())
    del values["sha256"]
    (data_dir / "manifest.json").write_text(json.dumps(values | {"held_out_bytes": 1}))
    with raises_error("data.damaged_manifest", data_dir / "manifest.json", "shard stage", kind=InputError):
        load_manifest(data_dir)
    assert "manifest.json is damaged" in str(find_shard_problem(data, data_dir))
    build_shards(data, data_dir)
    assert load_manifest(data_dir).held_out_bytes > 1


@pytest.mark.parametrize("name", ["tokenizer.json", "units.json"])
def test_damaged_output_of_prepare_is_detected_and_written_again(data_dir: Path, data: DataConfig, name: str) -> None:
    content = (data_dir / name).read_bytes()
    for damaged, expected_text in ((content[:-2], "bytes"), (content.replace(b"1", b"2", 1), "sha256")):
        (data_dir / name).write_bytes(damaged)
        problem = str(find_prepare_problem(data, data_dir))
        assert name in problem
        assert expected_text in problem
        with raises_error("data.damaged_file", data_dir / name, expected_text, "prepare stage", kind=InputError):
            run_shard_task(data, data_dir, 0, 1, discard_log)
        run_prepare(data, data_dir, discard_log)
        assert (data_dir / name).read_bytes() == content
        assert find_shard_problem(data, data_dir) is None


def test_changed_input_makes_prepare_outdated_only_while_shards_are_missing(tmp_path: Path, data: DataConfig) -> None:
    source = tmp_path / "a.jsonl"
    folder = tmp_path / "data"
    run_prepare(data, folder, discard_log)
    source.write_bytes(source.read_bytes() + b"\n")
    assert str(find_prepare_problem(data, folder)).startswith(f"input {source} has changed")
    build_shards(data, folder)
    assert find_prepare_problem(data, folder) is None
    source.unlink()
    assert find_prepare_problem(data, folder) is None
    (folder / "manifest.json").unlink()
    assert str(find_prepare_problem(data, folder)).startswith(f"input {source} has been removed")


@pytest.mark.parametrize(
    ("change", "keeps_key"),
    [
        ({"sequence_length": 7}, True),
        ({"verify": "sizes"}, True),
        ({"max_rejected": 0.5}, True),
        ({"source": "python-stdlib"}, True),  # the same as the list ["python-stdlib"]
        ({"source": "a.txt"}, False),
        ({"held_out": 0.5}, False),
        ({"shard_tokens": 4096}, False),
        ({"text_field": "body"}, False),
        ({"text_documents": "line"}, False),
        ({"tokenizer": TokenizerConfig(vocab_size=300)}, False),
    ],
)
def test_key_changes_only_with_config_keys_that_affect_the_shards(change: dict[str, Any], keeps_key: bool) -> None:
    data = DataConfig(source=["python-stdlib"])
    assert (TextFolder(data.model_copy(update=change), Path()).key == TextFolder(data, Path()).key) is keeps_key


def test_changed_code_makes_all_outputs_outdated(
    data_dir: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.data_folder.hash_code", lambda package: "0" * 64)
    for problem in (find_prepare_problem(data, data_dir), find_shard_problem(data, data_dir)):
        assert f"{data_dir}/prepare.json" in str(problem)
        assert "code" in str(problem)


def test_code_hash_changes_with_the_names_and_contents_of_files(tmp_path: Path) -> None:
    original = hash_code(PACKAGE)
    copy = tmp_path / "data_prep"
    shutil.copytree(PACKAGE, copy)
    assert hash_code(copy) == original
    with open(copy / "work_units.py", "a") as file:
        file.write("# changed\n")
    assert hash_code(copy) != original
    shutil.copy(PACKAGE / "work_units.py", copy / "work_units.py")
    (copy / "duplicates.py").rename(copy / "other.py")
    assert hash_code(copy) != original


def test_key_changes_with_the_modules_of_pipeline_that_affect_shards(tmp_path: Path, data: DataConfig) -> None:
    shutil.copytree(PACKAGE, tmp_path / "data_prep", ignore=shutil.ignore_patterns("__pycache__"))

    def compute_key() -> str:
        return TextFolder(data, tmp_path, tmp_path / "data_prep").key

    assert "pipeline/data/chat_template_worker.py" in SHARED_MODULES  # It renders dialogues.
    keys = [compute_key()]
    for name in SHARED_MODULES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE.parent / name, tmp_path / name)
        keys.append(compute_key())
    assert keys[-1] == TextFolder(data, tmp_path).key
    for name in SHARED_MODULES:
        (tmp_path / name).write_text((tmp_path / name).read_text() + "# changed\n")
        keys.append(compute_key())
    assert len(set(keys)) == len(keys)


def test_manifest_of_another_tokenizer_is_outdated(data_dir: Path, data: DataConfig) -> None:
    prepared = json.loads((data_dir / "prepare.json").read_text())
    prepared["tokenizer"]["sha256"] = "0" * 64
    (data_dir / "prepare.json").write_text(json.dumps(add_checksum(prepared)))
    problem = str(find_shard_problem(data, data_dir))
    assert f"{data_dir}/manifest.json" in problem
    assert "tokenizer" in problem
    assert count_units(data, data_dir)[0] == 0


@pytest.mark.parametrize("name", ["manifest.json", "prepare.json", "shards/unit-00000.json"])
def test_manifest_with_a_changed_number_is_detected_and_written_again(
    data_dir: Path, data: DataConfig, name: str
) -> None:
    content = (data_dir / name).read_bytes()
    shard_times = {path: path.stat().st_mtime_ns for path in (data_dir / "shards").glob("*.h5")}
    key = {"manifest.json": "offset", "prepare.json": "eos_id"}.get(name, "offset")
    number = re.search(rb'"%s": (\d+)' % key.encode(), content)
    assert number is not None
    changed = b"%d" % (int(number[1]) + 2)
    (data_dir / name).write_bytes(content[: number.start(1)] + changed + content[number.end(1) :])
    is_unit = name.startswith("shards")
    if is_unit:  # The finished manifest.json does not need the manifests of the units.
        assert not TextFolder(data, data_dir).finalize(discard_log)
        assert find_shard_problem(data, data_dir) is None
    else:
        problem = str(find_shard_problem(data, data_dir))
        assert f"{data_dir / name} is damaged" in problem
        assert "hash" in problem
    build_shards(data, data_dir)
    assert (data_dir / name).read_bytes() == content
    assert find_shard_problem(data, data_dir) is None
    assert find_prepare_problem(data, data_dir) is None
    if not is_unit:
        assert {path: path.stat().st_mtime_ns for path in shard_times} == shard_times, "a shard was written again"


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_ranks_fail_if_the_manifest_has_another_offset_than_the_shard(tmp_path: Path, split: str) -> None:
    """The manifest has a valid checksum and the shard is intact, but training would read each token one too late."""
    run = make_run(tmp_path)
    values = json.loads((run.data_dir / "manifest.json").read_text())
    entry = values[split][0]
    entry["offset"] += 2
    entry["tokens"] -= 1
    (run.data_dir / "manifest.json").write_text(json.dumps(add_checksum(values)))
    shard_file = run.data_dir / entry["file"]
    message = rf"array tokens in {shard_file} .*offset={entry['offset']} .*{run.data_dir}/manifest\.json"
    with pytest.raises(AssertionError, match=message):
        run_ranks(1, verify_shards_on_rank, run.path, split)
    assert shard_file.exists()
    assert read_event_lines(run, None, "damaged") == []
    (run.data_dir / "manifest.json").unlink()
    run_stages(run, "shard")
    run_ranks(1, verify_shards_on_rank, run.path, split)


def test_cached_hash_is_used_until_the_file_or_the_cache_changes(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run_ranks(1, verify_shards_on_rank, run.path, "train", "cached")
    shard_file = run.data_dir / load_manifest(run.data_dir).train[0].file
    content = bytearray(shard_file.read_bytes())
    status = shard_file.stat()
    damage_message = rf"{shard_file} is damaged: its sha256"

    # Damage that changes neither inode nor size nor time is not noticed, because the file is not read again.
    content[-300] ^= 1
    with open(shard_file, "r+b") as file:
        file.write(content)
    os.utime(shard_file, ns=(status.st_atime_ns, status.st_mtime_ns))
    run_ranks(1, verify_shards_on_rank, run.path, "train", "cached")

    # A modified cache has a wrong checksum and is ignored.
    cache = (run.data_dir / "verified.json").read_text()
    (run.data_dir / "verified.json").write_text(cache.replace(str(status.st_ino), str(status.st_ino + 1), 1))
    with pytest.raises(AssertionError, match=damage_message):
        run_ranks(1, verify_shards_on_rank, run.path, "train", "cached")
    assert not shard_file.exists()
    assert shard_file.with_name(f"{shard_file.name}.damaged").exists()

    # A file with another modification time is hashed again.
    content[-300] ^= 1
    shard_file.write_bytes(content)
    run_ranks(1, verify_shards_on_rank, run.path, "train", "cached")
    content[-300] ^= 1
    shard_file.write_bytes(content)
    with pytest.raises(AssertionError, match=damage_message):
        run_ranks(1, verify_shards_on_rank, run.path, "train", "cached")


def verify_shards_on_rank(rank_info: RankInfo, path: Path, split: str, verify: str = "hashes") -> None:
    """Verify the shards of a split in a process group of one rank. `verify` is a value of `data.verify`."""
    import torch.distributed as dist

    from pipeline.data.verify_shards import load_run_manifest, verify_shards

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run = Run.open(path)
    assert dist.group.WORLD is not None
    verify_shards(run, getattr(load_run_manifest(run), split), dist.group.WORLD, mode=verify)


def test_shard_module_imports_no_large_package() -> None:
    script = (
        "import sys, data_prep.shard\n"
        "print([name for name in ('numpy', 'h5py', 'tokenizers', 'torch', 'pyarrow', 'slurm') if name in sys.modules])"
    )
    child = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=240, capture_output=True, text=True)
    assert child.stdout == "[]\n", child.stderr

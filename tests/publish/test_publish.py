"""Tests of the publish stage.

The stage writes one complete version or none, even if a rule fails or the stage is killed at any moment.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode, UserError
from pipeline.base.files import add_checksum, sha256_file, write_json
from pipeline.config.read import ConfigError, load_config
from pipeline.publish import publish_stage
from pipeline.publish.card import escape_markdown, write_card
from pipeline.run.directory import Run
from tests.support.errors import raises_error
from tests.support.ranks import PORTS, make_rank_info, run_ranks
from tests.support.requirements import skip_or_fail_in_ci
from tests.support.servers import mlflow_server
from tests.support.tiny import PassiveStopFlag, make_run, run_stage_on_rank, write_config

KILLED_EXIT_CODE = 9
"""Exit code of a process that a test ends before its work is done."""


@pytest.fixture(scope="module")
def evaluated_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train three steps, evaluate the checkpoint, and return the run."""
    run = make_run(tmp_path_factory.mktemp("trained"), "tiny", ("train.steps=3", "stages.train.tasks_per_node=1"))
    assert run_ranks(1, run_stage_on_rank, run.path, "train") == [ExitCode.DONE]
    assert run_ranks(1, run_stage_on_rank, run.path, "evaluate") == [ExitCode.DONE]
    return run


@pytest.fixture
def configure_publish(evaluated_run: Run, tmp_path: Path) -> Any:
    """Return a function that changes the section `publish` of the run's config.

    The function also deletes published.json, and returns the run with the new config.
    """

    def configure(**values: Any) -> Run:
        (evaluated_run.path / "published.json").unlink(missing_ok=True)
        evaluated_run.apply_overrides(["publish=null"])
        evaluated_run.apply_overrides([f"publish={json.dumps({'to': str(tmp_path / 'models'), **values})}"])
        return Run.open(evaluated_run.path)

    return configure


def run_publish(run: Run) -> ExitCode:
    """Run the publish stage in this process."""
    return publish_stage.run_stage(run, make_rank_info(0, 1, 1), {}, PassiveStopFlag())


def is_intact(version: Path) -> bool:
    """Return True if all files of a version match its SHA256SUMS."""
    command = ["sha256sum", "--status", "-c", "SHA256SUMS"]
    return subprocess.run(command, cwd=version, timeout=30).returncode == 0


def read_card_metadata(folder: Path) -> Any:
    """Return the YAML at the start of a model card."""
    return yaml.safe_load((folder / "README.md").read_text().split("---")[1])


def test_published_version_is_complete_and_its_card_describes_the_run(configure_publish: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    rules = {"bits_per_byte": {"max": 50}, "loss": {"min": 0.1}}
    run = configure_publish(license="apache-2.0", data_license="CC0", description="A test.", rules=rules, name="small")
    assert "step 3" in str(publish_stage.describe_missing_outputs(run))
    measurements = [  # 360 kW for 10 s are 1 kWh
        {"time": time_s, "host": "n1", "gpus": [{"index": 0, "power_w": 360e3}]} for time_s in (100.0, 110.0)
    ]
    (run.path / "telemetry-n1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in measurements))
    assert run_publish(run) == ExitCode.DONE
    assert publish_stage.describe_missing_outputs(run) is None
    version = tmp_path / "models/small/step-00000003"
    assert publish_stage.progress(run).description == str(version)
    assert is_intact(version)
    listed_names = {line.split("  ")[1] for line in (version / "SHA256SUMS").read_text().splitlines()}
    assert listed_names == {path.name for path in version.iterdir()} - {"SHA256SUMS"}
    card = (version / "README.md").read_text()
    metadata = read_card_metadata(version)
    assert metadata["license"] == "apache-2.0"
    assert metadata["pipeline_tag"] == "text-generation"
    metrics = {metric["name"]: metric["value"] for metric in metadata["model-index"][0]["results"][0]["metrics"]}
    result = json.loads((run.evaluation_dir / "step-00000003.json").read_text())
    assert metrics["bits_per_byte"] == result["bits_per_byte"]
    step_times = [json.loads(line)["step_time_s"] for line in run.metrics_file.read_text().splitlines()]
    hours = f"{sum(step_times) / 3600:.3g} hours"
    for text in ("max 50", "CC0", "corpus.jsonl", "3 steps", "![training loss", hours, "1 kWh"):
        assert text in card
    assert str(tmp_path) not in card
    assert str(run.data_dir.parent) not in card
    assert "<polyline" in (version / "loss.svg").read_text()
    assert "base_model" not in metadata
    assert run.commit is None or f"code: {run.commit}" in card
    (corpus,) = (Path(name) for name in run.config.data.sources)
    assert f"corpus.jsonl: {corpus.stat().st_size:,} bytes, sha256 {sha256_file(corpus)}" in card
    AutoModelForCausalLM.from_pretrained(version)
    published_files = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in version.iterdir()}
    assert run_publish(run) == ExitCode.DONE
    assert published_files == {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in version.iterdir()}


@given(st.text(st.sampled_from(" _*`[](){}<>|!&#~$\\\\-+.0aZé\n\t:/\"'"), min_size=1))
def test_markdown_in_a_file_name_is_rendered_as_plain_text(name: str) -> None:
    """No file name in the card may become a link, image, heading, list, table or HTML."""
    renderer = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    escaped = html.escape(f"x {name}: 3").replace("&#x27;", "'")
    expected = f"<ul>\n<li>{' '.join(escaped.split())}</li>\n</ul>\n"
    assert renderer.render(f"- {escape_markdown(f'x {name}: 3')}\n") == expected


def test_the_card_of_a_run_has_the_last_finite_loss(configure_publish: Any, tmp_path: Path) -> None:
    """If the loss of a skipped step is not finite, metrics.jsonl has null."""
    run = configure_publish()
    line = json.loads(run.metrics_file.read_text().splitlines()[0])
    lines = [line | {"loss": 2.25}, line | {"step": 2, "loss": None, "skipped": "loss"}]
    result = json.loads((run.evaluation_dir / "step-00000003.json").read_text())
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_card(run, tmp_path, 3, result, [])
    assert "2 steps, last loss 2.2500" in (tmp_path / "README.md").read_text()
    run.metrics_file.write_text(json.dumps(lines[1]) + "\n")
    write_card(run, tmp_path, 3, result, [])
    card = (tmp_path / "README.md").read_text()
    assert "1 steps" in card and "last loss" not in card


def test_standard_errors_and_counts_are_not_listed_as_metrics_of_a_card(configure_publish: Any, tmp_path: Path) -> None:
    run = configure_publish()
    result = json.loads((run.evaluation_dir / "step-00000003.json").read_text())
    metrics = {"sums.accuracy": 0.25, "sums.accuracy_norm": 0.5, "items.accuracy": 0.75, "web.loss": 1.5}
    errors_and_counts = {
        "sums.accuracy_stderr": 0.09,
        "sums.accuracy_norm_stderr": 0.1,
        "sums.items": 2300,
        "items.items": 4,
    }
    write_card(run, tmp_path, 3, {**result, **metrics, **errors_and_counts}, [])
    [model] = read_card_metadata(tmp_path)["model-index"]
    names = {metric["name"] for metric in model["results"][0]["metrics"]}
    assert names == {"loss", "perplexity", "bits_per_byte", "unigram_bits_per_byte", *metrics}
    lines = [line for line in (tmp_path / "README.md").read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    table = {name: cells for name, *cells in rows}  # for each metric: value, standard error, number of items
    assert table["sums.accuracy"] == ["0.25", "0.09", "2,300"]
    assert table["items.accuracy"] == ["0.75", "", "4"]
    assert table["loss"] == [f"{result['loss']:.6g}", "", ""]
    assert not errors_and_counts.keys() & table.keys()

    user_model_result = {"step": 3, "loss": 2.0, "error": 0.5, "error_stderr": 0.1, "samples": 10, "entries": 10}
    write_card(run, tmp_path, 3, user_model_result, [])
    [model] = read_card_metadata(tmp_path)["model-index"]
    assert {metric["name"] for metric in model["results"][0]["metrics"]} == {"loss", "error"}


def test_nothing_is_published_if_a_rule_fails_and_the_error_names_the_metric(
    configure_publish: Any, tmp_path: Path
) -> None:
    run = configure_publish(rules={"bits_per_byte": {"max": 0.01}, "loss": {"max": 100.0}})
    with raises_error("publish.rules_failed", "step 3", "bits_per_byte", "max 0.01"):
        run_publish(run)
    with raises_error("publish.unknown_metric", "publish.rules.accuracy", "loss, perplexity, bits_per_byte"):
        run_publish(configure_publish(rules={"accuracy": {"min": 0.5}}))
    assert not (tmp_path / "models").exists()
    assert run_publish(configure_publish(no_worse_than=str(run.path))) == ExitCode.DONE  # it is compared with itself
    better_run = tmp_path / "better"
    (better_run / "evaluation").mkdir(parents=True)
    (better_run / "checkpoints").symlink_to(run.checkpoints_dir)
    result = json.loads((run.evaluation_dir / "step-00000003.json").read_text())
    result = publish_stage.add_checksum({**result, "bits_per_byte": result["bits_per_byte"] / 2})
    (better_run / "evaluation/step-00000003.json").write_text(json.dumps(result))
    with raises_error("publish.rules_failed", "bits per byte", "better"):
        run_publish(configure_publish(no_worse_than=str(better_run), name="second"))
    with raises_error("publish.no_evaluation", "publish.no_worse_than"):
        publish_stage.check_inputs(configure_publish(no_worse_than=str(tmp_path)))


def publish_until_killed(rank_info: RankInfo, path: Path, calls: int) -> int:
    """Publish a run. After `calls` calls of fsync, rename or replace, exit instead of the next such call."""
    remaining_calls = calls

    def limit_calls(function: Any) -> Any:
        """Return a function that calls `function`, or exits if no calls remain."""

        def call_or_exit(*arguments: Any, **options: Any) -> Any:
            nonlocal remaining_calls
            remaining_calls -= 1
            if remaining_calls < 0:
                os._exit(KILLED_EXIT_CODE)
            return function(*arguments, **options)

        return call_or_exit

    os.fsync = limit_calls(os.fsync)
    os.rename = limit_calls(os.rename)
    os.replace = limit_calls(os.replace)
    return run_stage_on_rank(rank_info, path, "publish")


def test_publishing_killed_at_any_moment_leaves_one_complete_version_or_none(
    configure_publish: Any, tmp_path: Path
) -> None:
    """Process n exits instead of its call number n + 1 of fsync, rename or replace. The last process finishes."""
    run = configure_publish()
    folder = tmp_path / "models/tiny"
    killed_processes = 0
    while True:
        child = os.fork()
        if child == 0:
            os._exit(publish_until_killed(make_rank_info(0, 1, 1), run.path, killed_processes))
        exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        versions = [name for name in names if not name.startswith(".")]
        if exit_code == ExitCode.DONE:
            break
        assert exit_code == KILLED_EXIT_CODE
        assert versions in ([], ["step-00000003"])
        if versions:
            assert publish_stage.describe_missing_outputs(run) is None
        killed_processes += 1
    assert killed_processes > 12
    assert names == ["step-00000003"]
    assert is_intact(folder / "step-00000003")


def test_publish_command_is_run_again_until_it_succeeds(configure_publish: Any, tmp_path: Path) -> None:
    command = f"cat README.md > /dev/null && echo x >> {tmp_path}/calls && test -e {tmp_path}/succeed"
    run = configure_publish(run=command)
    with raises_error("publish.command_failed", "publish.run", "code 1", "step-00000003"):
        run_publish(run)
    assert "publish.run" in str(publish_stage.describe_missing_outputs(run))
    (tmp_path / "succeed").touch()
    assert run_publish(run) == run_publish(run) == ExitCode.DONE
    assert publish_stage.describe_missing_outputs(run) is None
    assert (tmp_path / "calls").read_text() == "x\nx\n"


@pytest.fixture(scope="module")
def registry_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start an MLflow server, which has a model registry, and yield its URL."""
    with mlflow_server(tmp_path_factory.mktemp("registry")) as url:
        yield url


@pytest.mark.story
def test_version_is_registered_once_if_the_registry_is_unreachable_at_first(
    configure_publish: Any, registry_url: str, tmp_path: Path
) -> None:
    """The first attempt writes a complete version. Later attempts only register it, without a second entry."""
    from mlflow import MlflowClient

    run = configure_publish(mlflow={"uri": f"http://127.0.0.1:{next(PORTS)}", "model": "tiny-model"})
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        with raises_error("publish.registry_failed", "publish.mlflow", "http://127"):
            run_publish(run)
    version = tmp_path / "models/tiny/step-00000003"
    file_times = {path.name: path.stat().st_mtime_ns for path in version.iterdir()}
    assert "publish.mlflow" in str(publish_stage.describe_missing_outputs(run))
    assert "SHA256SUMS" in file_times
    run.apply_overrides([f"publish.mlflow.uri={registry_url}"])
    run = Run.open(run.path)
    for _ in range(2):
        assert run_publish(run) == ExitCode.DONE
        assert publish_stage.describe_missing_outputs(run) is None
        (run.path / "published.json").unlink()  # as if the stage was killed before it wrote this file
    assert file_times == {path.name: path.stat().st_mtime_ns for path in version.iterdir()}
    client = MlflowClient(tracking_uri=registry_url, registry_uri=registry_url)
    [registered] = client.search_model_versions("name = 'tiny-model'")
    result = json.loads((run.evaluation_dir / "step-00000003.json").read_text())
    sums = subprocess.run(
        "grep safetensors SHA256SUMS | sha256sum", shell=True, cwd=version, capture_output=True, text=True, timeout=30
    )
    assert registered.source == f"folder://{version}"
    assert registered.tags["weights_sha256"] == sums.stdout.split()[0]
    assert (registered.tags["run"], registered.tags["step"]) == ("tiny", "3")
    assert float(registered.tags["bits_per_byte"]) == result["bits_per_byte"]

    # Different weights become another version of the same registered model.
    bf16_run = configure_publish(mlflow={"uri": registry_url, "model": "tiny-model"}, dtype="bf16", name="bf16")
    assert run_publish(bf16_run) == ExitCode.DONE
    assert {entry.version for entry in client.search_model_versions("name = 'tiny-model'")} == {"1", "2"}
    assert run_publish(configure_publish(mlflow={"uri": registry_url}, name="third")) == ExitCode.DONE
    assert [model.name for model in client.search_registered_models()] == ["tiny", "tiny-model"]
    with pytest.raises(ConfigError) as error:
        configure_publish(mlflow={"uri": "http://me:secret@host"})
    assert [problem.key for problem in error.value.problems] == ["publish.mlflow.uri"]


@pytest.mark.parametrize("code", ["run.foreign_owner", "run.writable_by_others"])
def test_command_is_not_run_in_a_folder_that_other_users_can_write(
    configure_publish: Any, tmp_path: Path, code: str
) -> None:
    """The published folder is the command's working directory, so the command could execute files of other users."""
    run = configure_publish(run=f"touch {tmp_path}/executed; exit 1")
    version = tmp_path / "models/tiny/step-00000003"
    with raises_error("publish.command_failed", "code 1"):
        run_publish(run)
    (tmp_path / "executed").unlink()
    if code == "run.foreign_owner":
        if os.geteuid() != 0:
            skip_or_fail_in_ci("changing the owner of a folder needs root")
        os.chown(version, 1234, 1234)
    else:
        version.chmod(0o775)
    with raises_error(code, version):
        run_publish(run)
    assert not (tmp_path / "executed").exists()
    assert publish_stage.describe_missing_outputs(run) is not None


def test_publish_fails_and_changes_nothing_if_the_folder_exists_but_is_no_version(
    configure_publish: Any, tmp_path: Path
) -> None:
    existing = tmp_path / "models/tiny/step-00000003"
    existing.mkdir(parents=True)
    (existing / "other").touch()
    with raises_error("publish.version_conflict", "publish.name"):
        run_publish(configure_publish())
    assert [path.name for path in existing.iterdir()] == ["other"]


def test_version_with_a_damaged_file_counts_as_missing_and_is_not_replaced(
    configure_publish: Any, tmp_path: Path
) -> None:
    run = configure_publish()
    assert run_publish(run) == ExitCode.DONE
    (tmp_path / "models/tiny/step-00000003/model.safetensors").write_bytes(b"damaged")
    assert "model.safetensors" in str(publish_stage.describe_missing_outputs(run))
    assert publish_stage.progress(run).description == "-"
    with raises_error("publish.version_conflict", "model.safetensors"):
        run_publish(run)
    with raises_error("publish.unknown_metric", "publish.rules.acuracy", "loss, perplexity"):
        publish_stage.check_inputs(configure_publish(rules={"acuracy": {"min": 0.5}}))


def publish_at_the_same_time(rank_info: RankInfo, runs: list[Path], folder: Path) -> str:
    """Publish the run of this rank, and wait before the last steps until all ranks have their temporary folders.

    Return the error message; "" if there is no error.
    """
    original_function = publish_stage._add_card_and_checksums

    def wait_for_all_temporary_folders(*arguments: Any) -> None:
        deadline = time.monotonic() + 60
        while len([*folder.glob(".step-*.tmp")]) < len(runs) and not (folder / "step-00000003").exists():
            assert time.monotonic() < deadline, "a temporary folder is missing"
            time.sleep(0.01)
        original_function(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(publish_stage, "_add_card_and_checksums", wait_for_all_temporary_folders)
        try:
            assert run_publish(Run.open(runs[rank_info.rank])) == ExitCode.DONE
        except UserError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("dtypes", [["fp32"] * 4, ["fp32", "bf16", "fp32", "bf16"]])
def test_if_ranks_publish_at_the_same_time_only_those_with_the_published_weights_succeed(
    configure_publish: Any, tmp_path: Path, dtypes: list[str]
) -> None:
    """The error of a rank with other weights names the folder. No rank removes the temporary folder of another rank."""
    run = configure_publish()
    folder = tmp_path / "models/tiny"
    run_copies = []
    for number, dtype in enumerate(dtypes):
        shutil.copytree(run.path, tmp_path / f"copy-{number}", symlinks=True)
        Run.open(tmp_path / f"copy-{number}").apply_overrides([f"publish.dtype={dtype}"])
        run_copies.append(tmp_path / f"copy-{number}")
    errors = run_ranks(4, publish_at_the_same_time, run_copies, folder)
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]
    model_config = json.loads((folder / "step-00000003/config.json").read_text())
    published_dtype = model_config.get("dtype", model_config.get("torch_dtype"))
    published_weights = "bf16" if published_dtype == "bfloat16" else "fp32"
    for path, dtype, error in zip(run_copies, dtypes, errors, strict=True):
        if dtype == published_weights:
            assert error == ""
            assert publish_stage.describe_missing_outputs(Run.open(path)) is None
        else:
            assert str(folder / "step-00000003") in error
            assert "publish.name" in error
    assert is_intact(folder / "step-00000003")


def test_publish_removes_temporary_folders_of_this_run_but_not_of_others(
    configure_publish: Any, tmp_path: Path
) -> None:
    run = configure_publish()
    folder = tmp_path / "models/tiny"
    other_folder = folder / ".step-00000003.0123456789ab-cdef.tmp"
    other_folder.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(publish_stage, "_add_card_and_checksums", lambda *_: os._exit(KILLED_EXIT_CODE))
        if (child := os.fork()) == 0:
            run_publish(run)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED_EXIT_CODE
    assert len([*folder.glob(".step*.tmp")]) == 2
    assert run_publish(run) == ExitCode.DONE
    assert sorted(path.name for path in folder.iterdir()) == [other_folder.name, "step-00000003"]


def replace_folder(version: Path, target: str | None = None) -> None:
    """Replace the folder of a version by an empty file, or by a symbolic link to `target`."""
    shutil.rmtree(version)
    if target is None:
        version.touch()
    else:
        version.symlink_to(target)


def change_description(version: Path, **changes: Any) -> None:
    """Change values of a version's sluice.json and give it a matching checksum."""
    description = json.loads((version / "sluice.json").read_text())
    write_json(version / "sluice.json", add_checksum({**description, **changes}))


def record_size_only(version: Path) -> None:
    """List README.md in sluice.json with its size instead of its size and hash."""
    change_description(version, files={"README.md": (version / "README.md").stat().st_size})


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda version: (version / "sluice.json").write_text("[" * 990 + "]" * 990), "not this run's checkpoint"),
        (lambda version: (version / "sluice.json").write_text('{"sha256": '), "not this run's checkpoint"),
        (lambda version: change_description(version, checkpoint="0" * 64), "not this run's checkpoint"),
        (lambda version: change_description(version, files=["README.md"]), r"sluice\.json: 'files'"),
        (lambda version: change_description(version, files={"README.md": "1"}), r"sluice\.json: 'files'"),
        (lambda version: change_description(version, files={}), r"sluice\.json: 'files'"),
        (record_size_only, r"sluice\.json: 'files'"),
        (lambda version: (version / "SHA256SUMS").write_text("no hash\n"), "SHA256SUMS"),
        (lambda version: (version / "SHA256SUMS").write_bytes(b"\xff\n"), "SHA256SUMS"),
        (lambda version: (version / "SHA256SUMS").unlink(), "SHA256SUMS"),
        (replace_folder, "is not a folder"),
        (lambda version: replace_folder(version, "nowhere"), "is not a folder"),
    ],
)  # fmt: skip
def test_version_with_a_malformed_or_changed_description_is_rejected(
    configure_publish: Any, tmp_path: Path, damage: Any, problem: str
) -> None:
    run = configure_publish()
    assert run_publish(run) == ExitCode.DONE
    version = tmp_path / "models/tiny/step-00000003"
    damage(version)
    assert re.search(problem, str(publish_stage.describe_missing_outputs(run)))
    assert publish_stage.progress(run).description == "-"
    with raises_error("publish.version_conflict", version):
        run_publish(run)


@pytest.mark.parametrize("keeps_time", [False, True])
def test_changed_weights_of_the_same_size_are_not_passed_to_the_command(
    configure_publish: Any, tmp_path: Path, keeps_time: bool
) -> None:
    """`describe_missing_outputs` compares only sizes and times.

    The stage also compares hashes before it runs the command. If `keeps_time`, the changed file gets its old time back.
    """
    run = configure_publish(run=f"touch {tmp_path}/called; test -e {tmp_path}/succeed")
    with raises_error("publish.command_failed", "code 1"):
        run_publish(run)
    (tmp_path / "called").unlink()
    weights = tmp_path / "models/tiny/step-00000003/model.safetensors"
    status = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    if keeps_time:
        os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    else:
        assert str(weights) in str(publish_stage.describe_missing_outputs(run))
    (tmp_path / "succeed").touch()
    with raises_error("publish.version_changed", "model.safetensors", "SHA256SUMS"):
        run_publish(run)
    assert not (tmp_path / "called").exists()

    # The original content with another time is accepted.
    content[-1] ^= 1
    weights.write_bytes(content)
    assert run_publish(run) == ExitCode.DONE
    assert publish_stage.describe_missing_outputs(run) is None
    os.utime(weights)
    assert publish_stage.describe_missing_outputs(run) is not None
    assert run_publish(run) == ExitCode.DONE
    assert publish_stage.describe_missing_outputs(run) is None

    # A change after the stage is done is also detected.
    content[-1] ^= 1
    weights.write_bytes(content)
    assert publish_stage.describe_missing_outputs(run) is not None
    with raises_error("publish.version_changed"):
        run_publish(run)


def test_a_published_model_counts_as_published_if_the_run_has_no_published_json(configure_publish: Any) -> None:
    """Older releases of Sluice did not write published.json, which has the sizes and times of the published files."""
    run = configure_publish()
    assert run_publish(run) == ExitCode.DONE
    (run.path / "published.json").unlink()
    assert publish_stage.describe_missing_outputs(run) is None
    assert run_publish(run) == ExitCode.DONE


def test_publish_stage_exists_only_if_the_config_has_the_section_publish(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert "publish" not in load_config(config).active_stages
    assert list(load_config(config, ["publish.to=models"]).active_stages)[-1] == "publish"
    with pytest.raises(ConfigError) as error:
        load_config(config, ["publish.to=models", "sweep={grid: {optimizer.lr: [0.1, 0.2]}}"])
    assert "publish" in str(error.value)
    assert "sweep" in str(error.value)
    with pytest.raises(ConfigError) as error:
        load_config(config, ["publish={to: models, rules: {loss: {}}}"])
    assert [problem.key for problem in error.value.problems] == ["publish.rules.loss"]

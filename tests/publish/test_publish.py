"""Publishing: one whole version or none, whatever rule fails and wherever it is killed."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
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
from tests.support.tiny import HarmlessFlag, make_run, stage_rank, write_config

KILLED = 9


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of a few steps, evaluated."""
    run = make_run(tmp_path_factory.mktemp("trained"), "tiny", ("train.steps=3", "stages.train.tasks_per_node=1"))
    assert run_ranks(1, stage_rank, run.path, "train") == [ExitCode.DONE]
    assert run_ranks(1, stage_rank, run.path, "evaluate") == [ExitCode.DONE]
    return run


@pytest.fixture
def wanted(trained: Run, tmp_path: Path) -> Any:
    """The run with other values under `publish`, and nothing published."""

    def change(**values: Any) -> Run:
        (trained.path / "published.json").unlink(missing_ok=True)
        trained.apply_overrides(["publish=null"])
        trained.apply_overrides([f"publish={json.dumps({'to': str(tmp_path / 'models'), **values})}"])
        return Run.open(trained.path)

    return change


def publish(run: Run) -> ExitCode:
    return publish_stage.run_stage(run, make_rank_info(0, 1, 1), {}, HarmlessFlag())


def test_a_version_is_whole_and_tells_what_it_is(wanted: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    rules = {"bits_per_byte": {"max": 50}, "loss": {"min": 0.1}}
    run = wanted(license="apache-2.0", data_license="CC0", description="A test.", rules=rules, name="small")
    assert publish_stage.missing_outputs(run) == "step 3 is not published"
    looks = [{"time": float(second), "host": "n1", "gpus": [{"index": 0, "power_w": 360e3}]} for second in (100, 110)]
    (run.path / "telemetry-n1.jsonl").write_text("".join(json.dumps(look) + "\n" for look in looks))
    assert publish(run) == ExitCode.DONE
    assert publish_stage.missing_outputs(run) is None
    version = tmp_path / "models/small/step-00000003"
    assert publish_stage.progress(run).description == str(version)
    checked = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=version, capture_output=True, timeout=30)
    assert checked.returncode == 0
    named = {line.split("  ")[1] for line in (version / "SHA256SUMS").read_text().splitlines()}
    assert named == {path.name for path in version.iterdir()} - {"SHA256SUMS"}
    card = (version / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["license"] == "apache-2.0" and front["pipeline_tag"] == "text-generation"
    found = {each["name"]: each["value"] for each in front["model-index"][0]["results"][0]["metrics"]}
    result = json.loads((run.evaluation_dir / "step-00000003.json").read_text())
    assert found["bits_per_byte"] == result["bits_per_byte"] and f"max {50}" in card and "CC0" in card
    assert str(tmp_path) not in card and str(run.data_dir.parent) not in card and "corpus.jsonl" in card
    assert (
        "3 steps, last loss" in card and "![training loss" in card and "<polyline" in (version / "loss.svg").read_text()
    )
    steps = [json.loads(line)["step_time_s"] for line in run.metrics_file.read_text().splitlines()]
    assert f"{sum(steps) / 3600:.3g} hours of steps" in card and "1 kWh of the GPUs" in card
    assert "base_model" not in front
    assert run.commit is None or f"code: {run.commit}" in card
    (corpus,) = (Path(name) for name in run.config.data.sources)
    assert f"corpus.jsonl: {corpus.stat().st_size:,} bytes, sha256 {sha256_file(corpus)}" in card
    AutoModelForCausalLM.from_pretrained(version)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in version.iterdir()}
    assert publish(run) == ExitCode.DONE
    assert before == {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in version.iterdir()}


@given(st.text(st.sampled_from(" _*`[](){}<>|!&#~$\\\\-+.0aZé\n\t:/\"'"), min_size=1))
def test_a_file_name_in_a_card_is_text(name: str) -> None:
    """A reader of Markdown shows it as it is: no link, picture, heading, list, table or HTML."""
    page = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    shown = html.escape(f"x {name}: 3").replace("&#x27;", "'")
    assert page.render(f"- {escape_markdown(f'x {name}: 3')}\n") == f"<ul>\n<li>{' '.join(shown.split())}</li>\n</ul>\n"


def test_standard_errors_and_counts_are_no_metrics_of_a_card(wanted: Any, tmp_path: Path) -> None:
    run = wanted()
    result = json.loads((run.evaluation_dir / "step-00000003.json").read_text())
    measured = {"sums.accuracy": 0.25, "sums.accuracy_norm": 0.5, "items.accuracy": 0.75, "web.loss": 1.5}
    beside = {"sums.accuracy_stderr": 0.09, "sums.accuracy_norm_stderr": 0.1, "sums.items": 2300, "items.items": 4}
    write_card(run, tmp_path, 3, {**result, **measured, **beside}, [])
    text = (tmp_path / "README.md").read_text()
    metrics = yaml.safe_load(text.split("---")[1])["model-index"][0]["results"][0]["metrics"]
    names = {metric["name"] for metric in metrics}
    assert names == {"loss", "perplexity", "bits_per_byte", "unigram_bits_per_byte", *measured}
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    table = {name: cells for name, *cells in rows}
    assert table["sums.accuracy"] == ["0.25", "0.09", "2,300"] and table["items.accuracy"] == ["0.75", "", "4"]
    assert not beside.keys() & table.keys() and table["loss"] == [f"{result['loss']:.6g}", "", ""]
    own = {"step": 3, "loss": 2.0, "error": 0.5, "error_stderr": 0.1, "samples": 10, "entries": 10}
    write_card(run, tmp_path, 3, own, [])
    (model,) = yaml.safe_load((tmp_path / "README.md").read_text().split("---")[1])["model-index"]
    assert {metric["name"] for metric in model["results"][0]["metrics"]} == {"loss", "error"}


def test_a_rule_that_fails_says_its_number_and_leaves_nothing(wanted: Any, tmp_path: Path) -> None:
    run = wanted(rules={"bits_per_byte": {"max": 0.01}, "loss": {"max": 100.0}})
    with raises_error("publish.rules_failed", "step 3", "bits_per_byte", "max 0.01"):
        publish(run)
    with raises_error("publish.unknown_metric", "publish.rules.accuracy", "loss, perplexity, bits_per_byte"):
        publish(wanted(rules={"accuracy": {"min": 0.5}}))
    assert not (tmp_path / "models").exists()
    assert publish(wanted(no_worse_than=str(run.path))) == ExitCode.DONE, "as good as itself"
    better = tmp_path / "better"
    (better / "evaluation").mkdir(parents=True)
    (better / "checkpoints").symlink_to(run.checkpoints_dir)
    result = json.loads((run.evaluation_dir / "step-00000003.json").read_text())
    result = publish_stage.add_checksum({**result, "bits_per_byte": result["bits_per_byte"] / 2})
    (better / "evaluation/step-00000003.json").write_text(json.dumps(result))
    with raises_error("publish.rules_failed", "bits per byte", "better"):
        publish(wanted(no_worse_than=str(better), name="second"))
    with raises_error("publish.no_evaluation", "publish.no_worse_than"):
        publish_stage.check_inputs(wanted(no_worse_than=str(tmp_path)))


def killed_rank(where: RankInfo, path: Path, after: int) -> int:
    """Publish, and die in place of the call number `after` that makes something durable or gives it its name."""
    left = after

    def dying(call: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(KILLED)
            return call(*arguments, **options)

        return counted

    os.fsync, os.rename, os.replace = dying(os.fsync), dying(os.rename), dying(os.replace)
    return stage_rank(where, path, "publish")


def test_killed_anywhere_there_is_one_version_or_none(wanted: Any, tmp_path: Path) -> None:
    """In every call that makes a file durable or names it, one process after the other, until one gets through."""
    run = wanted()
    folder, died = tmp_path / "models/tiny", 0
    while True:
        child = os.fork()
        if child == 0:
            os._exit(killed_rank(make_rank_info(0, 1, 1), run.path, died))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        whole = [name for name in names if not name.startswith(".")]
        if code == ExitCode.DONE:
            break
        assert code == KILLED and whole in ([], ["step-00000003"])
        if whole:
            assert publish_stage.missing_outputs(run) is None
        died += 1
    assert died > 12 and names == ["step-00000003"]
    assert (
        subprocess.run(["sha256sum", "--status", "-c", "SHA256SUMS"], cwd=folder / names[0], timeout=30).returncode == 0
    )


def test_a_command_of_ones_own_runs_once_it_is_published_until_it_ends_well(wanted: Any, tmp_path: Path) -> None:
    command = f"cat README.md > /dev/null && echo x >> {tmp_path}/calls && test -e {tmp_path}/works"
    run = wanted(run=command)
    with raises_error("publish.command_failed", "publish.run", "code 1", "step-00000003"):
        publish(run)
    assert publish_stage.missing_outputs(run) == "publish.run has not succeeded yet"
    (tmp_path / "works").touch()
    assert publish(run) == publish(run) == ExitCode.DONE and publish_stage.missing_outputs(run) is None
    assert (tmp_path / "calls").read_text() == "x\nx\n"


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of MLflow's own server, with SQLite, on loopback."""
    folder, uri = tmp_path_factory.mktemp("registry"), f"http://127.0.0.1:{next(PORTS)}"
    command = [sys.executable, "-m", "mlflow", "server", f"--backend-store-uri=sqlite:///{folder}/registry.sqlite"]
    command += ["--host=127.0.0.1", f"--port={uri.rsplit(':')[-1]}", "--workers=1"]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while True:
            with suppress(requests.ConnectionError):
                if requests.get(f"{uri}/health", timeout=10).ok:
                    break
            assert server.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        yield uri
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(timeout=60)


@pytest.mark.story
def test_a_version_is_entered_into_the_registry_once(wanted: Any, registry: str, tmp_path: Path) -> None:
    """The server is away at first: the folder is whole, and the next attempt makes only the entry, and one."""
    from mlflow import MlflowClient

    away = {"uri": f"http://127.0.0.1:{next(PORTS)}", "model": "tiny-model"}
    run = wanted(mlflow=away)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        with raises_error("publish.registry_failed", "publish.mlflow", "http://127"):
            publish(run)
    version = tmp_path / "models/tiny/step-00000003"
    before = {path.name: path.stat().st_mtime_ns for path in version.iterdir()}
    assert "publish.mlflow" in (publish_stage.missing_outputs(run) or "") and "SHA256SUMS" in before
    run.apply_overrides([f"publish.mlflow.uri={registry}"])
    run = Run.open(run.path)
    for _ in range(2):
        assert publish(run) == ExitCode.DONE and publish_stage.missing_outputs(run) is None
        (run.path / "published.json").unlink()  # as if it had been killed before that was noted
    assert before == {path.name: path.stat().st_mtime_ns for path in version.iterdir()}
    server = MlflowClient(tracking_uri=registry, registry_uri=registry)
    (entry,) = server.search_model_versions("name = 'tiny-model'")
    result = json.loads((run.evaluation_dir / "step-00000003.json").read_text())
    sums = subprocess.run(
        "grep safetensors SHA256SUMS | sha256sum", shell=True, cwd=version, capture_output=True, text=True, timeout=30
    )
    assert entry.source == f"folder://{version}" and entry.tags["weights_sha256"] == sums.stdout.split()[0]
    assert (entry.tags["run"], entry.tags["step"]) == ("tiny", "3")
    assert float(entry.tags["bits_per_byte"]) == result["bits_per_byte"]
    # another version of the same model, from other weights
    assert publish(wanted(mlflow={"uri": registry, "model": "tiny-model"}, dtype="bf16", name="half")) == ExitCode.DONE
    assert {each.version for each in server.search_model_versions("name = 'tiny-model'")} == {"1", "2"}
    assert publish(wanted(mlflow={"uri": registry}, name="third")) == ExitCode.DONE
    assert [each.name for each in server.search_registered_models()] == ["tiny", "tiny-model"]
    with pytest.raises(ConfigError, match=r"publish.mlflow.uri: .*write http"):
        wanted(mlflow={"uri": "http://me:secret@host"})


@pytest.mark.parametrize("whose", ["not ours", "others may write it"])
def test_the_command_is_not_run_in_a_folder_that_others_could_have_filled(
    wanted: Any, tmp_path: Path, whose: str
) -> None:
    """It may execute what is there: its working directory is the published folder."""
    run, version = wanted(run=f"touch {tmp_path}/executed; exit 1"), tmp_path / "models/tiny/step-00000003"
    with raises_error("publish.command_failed", "code 1"):
        publish(run)
    (tmp_path / "executed").unlink()
    if whose == "not ours":
        if os.geteuid() != 0:
            skip_or_fail_in_ci("giving a folder to somebody else needs root")
        os.chown(version, 1234, 1234)
    else:
        version.chmod(0o775)
    with pytest.raises(UserError, match=rf"{version} .*(uid 1234|mode 775)"):
        publish(run)
    assert not (tmp_path / "executed").exists() and publish_stage.missing_outputs(run) is not None


def test_what_is_in_the_way_is_left_alone(wanted: Any, tmp_path: Path) -> None:
    taken = tmp_path / "models/tiny/step-00000003"
    taken.mkdir(parents=True)
    (taken / "precious").touch()
    with raises_error("publish.version_conflict", "publish.name"):
        publish(wanted())
    assert [path.name for path in taken.iterdir()] == ["precious"]


def test_what_lost_a_file_is_no_version(wanted: Any, tmp_path: Path) -> None:
    run = wanted()
    assert publish(run) == ExitCode.DONE
    (tmp_path / "models/tiny/step-00000003/model.safetensors").write_bytes(b"torn")
    assert "model.safetensors" in (publish_stage.missing_outputs(run) or "")
    assert publish_stage.progress(run).description == "-"
    with raises_error("publish.version_conflict", "model.safetensors"):
        publish(run)
    with raises_error("publish.unknown_metric", "publish.rules.acuracy", "loss, perplexity"):
        publish_stage.check_inputs(wanted(rules={"acuracy": {"min": 0.5}}))


def publish_together(where: RankInfo, runs: list[Path], folder: Path) -> str:
    """Publish one of the runs once the temporary folders of all of them are there; the error, if there is one."""
    complete = publish_stage._add_card_and_checksums

    def wait_for_all(*arguments: Any) -> None:
        deadline = time.monotonic() + 60
        while len([*folder.glob(".step-*.tmp")]) < len(runs) and not (folder / "step-00000003").exists():
            assert time.monotonic() < deadline, "a temporary folder is missing"
            time.sleep(0.01)
        complete(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(publish_stage, "_add_card_and_checksums", wait_for_all)
        try:
            assert publish(Run.open(runs[where.rank])) == ExitCode.DONE
        except UserError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("dtypes", [["fp32"] * 4, ["fp32", "bf16", "fp32", "bf16"]])
def test_runs_that_publish_to_one_place_at_once(wanted: Any, tmp_path: Path, dtypes: list[str]) -> None:
    """Those with the winner's weights succeed, the others name the folder, and nobody removes what another one fills"""
    run, folder = wanted(), tmp_path / "models/tiny"
    copies = []
    for number, dtype in enumerate(dtypes):
        shutil.copytree(run.path, tmp_path / f"copy-{number}", symlinks=True)
        Run.open(tmp_path / f"copy-{number}").apply_overrides([f"publish.dtype={dtype}"])
        copies.append(tmp_path / f"copy-{number}")
    told = run_ranks(4, publish_together, copies, folder)
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]
    won = json.loads((folder / "step-00000003/config.json").read_text())
    winner = "bf16" if won.get("dtype", won.get("torch_dtype")) == "bfloat16" else "fp32"
    for path, dtype, error in zip(copies, dtypes, told, strict=True):
        if dtype == winner:
            assert error == "" and publish_stage.missing_outputs(Run.open(path)) is None
        else:
            assert str(folder / "step-00000003") in error and "publish.name" in error
    done = subprocess.run(["sha256sum", "--status", "-c", "SHA256SUMS"], cwd=folder / "step-00000003", timeout=30)
    assert done.returncode == 0


def test_leftovers_of_this_run_are_removed_and_no_others(wanted: Any, tmp_path: Path) -> None:
    run = wanted()
    folder = tmp_path / "models/tiny"
    foreign = folder / ".step-00000003.0123456789ab-cdef.tmp"
    foreign.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(publish_stage, "_add_card_and_checksums", lambda *_: os._exit(KILLED))
        if (child := os.fork()) == 0:
            publish(run)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    assert len([*folder.glob(".step*.tmp")]) == 2
    assert publish(run) == ExitCode.DONE
    assert sorted(path.name for path in folder.iterdir()) == [foreign.name, "step-00000003"]


def replace_folder(version: Path, target: str | None = None) -> None:
    """Put a file, or a link to `target`, in the place of a version."""
    shutil.rmtree(version)
    if target is None:
        version.touch()
    else:
        version.symlink_to(target)


def forge(version: Path, **changes: Any) -> None:
    """Write another sluice.json, with a hash that fits."""
    write_json(version / "sluice.json", add_checksum({**json.loads((version / "sluice.json").read_text()), **changes}))


@pytest.mark.parametrize(
    ("harm", "match"),
    [
        (lambda v: (v / "sluice.json").write_text("[" * 990 + "]" * 990), "not this run's checkpoint"),
        (lambda v: (v / "sluice.json").write_text('{"sha256": '), "not this run's checkpoint"),
        (lambda v: forge(v, checkpoint="0" * 64), "not this run's checkpoint"),
        (lambda v: forge(v, files=["README.md"]), r"sluice\.json: 'files'"),
        (lambda v: forge(v, files={"README.md": "1"}), r"sluice\.json: 'files'"),
        (lambda v: forge(v, files={}), r"sluice\.json: 'files'"),
        (lambda v: forge(v, files={"README.md": (v / "README.md").stat().st_size}), r"sluice\.json: 'files'"),
        (lambda v: (v / "SHA256SUMS").write_text("no hash\n"), "SHA256SUMS"),
        (lambda v: (v / "SHA256SUMS").write_bytes(b"\xff\n"), "SHA256SUMS"),
        (lambda v: (v / "SHA256SUMS").unlink(), "SHA256SUMS"),
        (replace_folder, "is not a folder"),
        (lambda v: replace_folder(v, "nowhere"), "is not a folder"),
    ],
)  # fmt: skip
def test_a_version_with_a_malformed_or_forged_description_is_rejected(
    wanted: Any, tmp_path: Path, harm: Any, match: str
) -> None:
    run = wanted()
    assert publish(run) == ExitCode.DONE
    harm(version := tmp_path / "models/tiny/step-00000003")
    assert re.search(match, publish_stage.missing_outputs(run) or "") and publish_stage.progress(run).description == "-"
    with raises_error("publish.version_conflict", version):
        publish(run)


@pytest.mark.parametrize("keep_time", [False, True])
def test_altered_weights_of_the_same_size_are_not_registered(wanted: Any, tmp_path: Path, keep_time: bool) -> None:
    """If the time was set back, `missing` cannot notice it, but nothing is done with the version."""
    run = wanted(run=f"touch {tmp_path}/called; test -e {tmp_path}/works")
    with raises_error("publish.command_failed", "code 1"):
        publish(run)
    (tmp_path / "called").unlink()
    weights = tmp_path / "models/tiny/step-00000003/model.safetensors"
    seen, content = weights.stat(), bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    if keep_time:
        os.utime(weights, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    else:
        assert f"{weights} has changed" in (publish_stage.missing_outputs(run) or "")
    (tmp_path / "works").touch()
    with raises_error("publish.version_changed", "model.safetensors", "SHA256SUMS"):
        publish(run)
    assert not (tmp_path / "called").exists()
    content[-1] ^= 1
    weights.write_bytes(content)  # put back: only the time differs
    assert publish(run) == ExitCode.DONE and publish_stage.missing_outputs(run) is None
    os.utime(weights)
    assert publish_stage.missing_outputs(run) is not None
    assert publish(run) == ExitCode.DONE and publish_stage.missing_outputs(run) is None
    content[-1] ^= 1
    weights.write_bytes(content)  # after all was done
    assert publish_stage.missing_outputs(run) is not None
    with raises_error("publish.version_changed"):
        publish(run)


def test_a_version_of_an_older_sluice_stays_published(wanted: Any) -> None:
    run = wanted()
    assert publish(run) == ExitCode.DONE
    (run.path / "published.json").unlink(missing_ok=True)  # it noted no sizes and times
    assert publish_stage.missing_outputs(run) is None and publish(run) == ExitCode.DONE


def test_there_is_no_such_stage_without_its_section(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert "publish" not in load_config(config).active_stages
    assert list(load_config(config, ["publish.to=models"]).active_stages)[-1] == "publish"
    with pytest.raises(ConfigError, match="publish is for one training, not for a sweep"):
        load_config(config, ["publish.to=models", "sweep={grid: {optimizer.lr: [0.1, 0.2]}}"])
    with pytest.raises(ConfigError) as error:
        load_config(config, ["publish={to: models, rules: {loss: {}}}"])
    assert [problem.key for problem in error.value.problems] == ["publish.rules.loss"]

"""Test the section `site` without a cluster: validation, batch scripts, masked secrets, rank placement, `doctor`."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import submitit
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.doctor import ClusterFacts, Finding, assess_cluster, check_file_system
from cli.submit import print_plan
from pipeline.base.console import PlainConsole
from pipeline.base.dist_env import read_granted_tasks
from pipeline.base.errors import UserError
from pipeline.config.masking import describe_exposed_setup, mask_secrets, mask_shell_line
from pipeline.config.read import ConfigError, dump_config, load_config
from pipeline.config.sections import Config, SiteConfig
from pipeline.config.site import OWN_OPTIONS
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from slurm.query import capacity, current_job
from slurm.query.capacity import assign_ranks_to_nodes, describe_placement_problem
from slurm.submit import submitit_job
from slurm.submit.sbatch import _extract_sbatch_reason, build_sbatch_parameters, render_batch_script
from slurm.submit.site_environment import apply_site_environment, check_job_environment
from tests.support.errors import raises_error
from tests.support.events import read_event_lines
from tests.support.tiny import write_config

PROFILES = CODE_ROOT / "configs" / "sites"


def make_config(folder: Path, *overrides: str, profile: str | None = None) -> Config:
    """Load the tiny config with overrides. `profile` is the name of a file in configs/sites, which `site` extends."""
    path = write_config(folder)
    if profile:
        path.write_text(path.read_text() + f"site: {{extends: {PROFILES / profile}}}\n")
    return load_config(path, overrides)


def parse_sbatch_options(text: str) -> dict[str, str]:
    """Return the options in the #SBATCH lines of a script, without quotes and leading dashes."""
    lines = [shlex.split(line.removeprefix("#SBATCH "))[0] for line in text.splitlines() if line.startswith("#SBATCH")]
    return {key.removeprefix("--"): value for key, _, value in (line.partition("=") for line in lines)}


def read_exported_variables(text: str, *, before: str = "# command") -> dict[str, str]:
    """Run the set-up lines of a batch script in bash, up to the line `before`. Return the environment variables."""
    setup = text[text.index("# setup") : text.index(before)].replace("module ", ": ")  # `module` is not installed
    shell = subprocess.run(["bash", "-c", f"{setup}\nenv -0"], capture_output=True, text=True, timeout=10, check=True)
    return dict(item.split("=", 1) for item in shell.stdout.split("\0") if "=" in item)


def render_site_script(folder: Path, site: dict[str, Any], stage: str = "train", *overrides: str) -> str:
    """Return the batch script of a stage for these site settings."""
    config = make_config(folder, *overrides)
    config = config.model_copy(update={"site": SiteConfig.model_validate(site)})
    return render_batch_script(Run(folder / "runs/tiny"), config, stage)


def test_slurm_mails_each_failure_and_the_end_of_the_last_stage(tmp_path: Path) -> None:
    """`track.mail` sets the sbatch options --mail-user and --mail-type."""
    mail_types = {}
    for stage in ("prepare", "train", "evaluate"):
        options = parse_sbatch_options(render_site_script(tmp_path, {}, stage, "track.mail=me@example.org"))
        assert options["mail-user"] == "me@example.org"
        mail_types[stage] = options["mail-type"]
    assert mail_types == {
        "prepare": "FAIL,INVALID_DEPEND",
        "train": "FAIL,INVALID_DEPEND",
        "evaluate": "FAIL,INVALID_DEPEND,END",
    }
    assert "mail-user" not in parse_sbatch_options(render_site_script(tmp_path, {}))
    site = {"sbatch": {"mail-type": "ALL", "mail-user": "you@example.org"}}
    script = render_site_script(tmp_path, site, "train", "track.mail=me@example.org")
    assert parse_sbatch_options(script)["mail-type"] == "ALL", "site.sbatch must override track.mail"


# -- profiles ----------------------------------------------------------------------------------------------------------


def test_the_gpu_profile_sets_the_options_of_its_jobs(tmp_path: Path) -> None:
    """The stages prepare and shard run in the partition `cpu`, without GPUs."""
    layout = ("train.global_batch=32", "stages.train.nodes=8", "stages.train.tasks_per_node=4")
    config = make_config(tmp_path, "site.account=x", *layout, profile="gpu-cluster.yaml")
    text = render_batch_script(Run(tmp_path / "runs/tiny"), config, "train")
    expected_options = {
        "gres": "gpu:h100:4", "cpus-per-task": "16", "mem": "491520M", "constraint": "ib&scratch", "account": "x",
        "distribution": "block:block", "switches": "1@00:05:00", "exclusive": "", "mail-type": "FAIL,TIME_LIMIT",
        "signal": "USR2@300", "nodes": "8", "ntasks-per-node": "4", "partition": "gpu", "requeue": "",
    }  # fmt: skip
    assert expected_options.items() <= parse_sbatch_options(text).items()
    variables = read_exported_variables(text)
    assert variables["NCCL_SOCKET_IFNAME"] == variables["GLOO_SOCKET_IFNAME"] == "ib0"
    assert variables["TMPDIR"] == "/local" and variables["NCCL_IB_HCA"] == "mlx5"
    shard_options = parse_sbatch_options(render_batch_script(Run(tmp_path / "runs/tiny"), config, "shard"))
    assert shard_options["partition"] == "cpu" and shard_options["mem"] == "65536M"
    assert shard_options["mail-type"] == "FAIL,TIME_LIMIT"
    assert not {"gres", "exclusive", "constraint"} & shard_options.keys()


def test_the_cpu_profile_sets_the_options_of_its_jobs(tmp_path: Path) -> None:
    config = make_config(tmp_path, profile="cpu-cluster.yaml")
    options = parse_sbatch_options(render_batch_script(Run(tmp_path / "runs/tiny"), config, "train"))
    assert options["hint"] == "nomultithread" and options["licenses"] == "lustre" and "gres" not in options
    assert config.site.stripe.count == 2


STAGE_OVERRIDES = (
    "stages.evaluate={partition: small, account: other, qos: short, constraint: '', cpus_per_task: 2, mem_gb: 8, "
    "sbatch: {nice: 7, exclusive: false}}",
    "stages.shard={partition: io, gpus_per_node: 1, sbatch: {nice: 9}}",
)


def test_the_keys_of_a_stage_override_those_of_the_site(tmp_path: Path) -> None:
    """Keys of a stage override those of `site.data_jobs`, which override those of `site`.

    A stage requests no more GPUs than it has ranks, unless it sets `gpus_per_node`.
    """
    layout = ("train.global_batch=32", "stages.train.tasks_per_node=4", "site.account=x", "stages.train.qos=long")
    config = make_config(tmp_path, *layout, *STAGE_OVERRIDES, profile="gpu-cluster.yaml")
    run = Run(tmp_path / "runs/tiny")
    stages = ("prepare", "shard", "train", "evaluate")
    options_by_stage = {stage: parse_sbatch_options(render_batch_script(run, config, stage)) for stage in stages}
    keys = ("partition", "account", "qos", "constraint", "cpus-per-task", "mem", "gres", "nice", "exclusive")
    assert {stage: tuple(options.get(key) for key in keys) for stage, options in options_by_stage.items()} == {
        "prepare": ("cpu", "x", None, None, "16", "65536M", None, None, None),
        "shard": ("io", "x", None, None, "16", "65536M", "gpu:h100:1", "9", None),
        "train": ("gpu", "x", "long", "ib&scratch", "16", "491520M", "gpu:h100:4", None, ""),
        "evaluate": ("small", "other", "short", None, "2", "8192M", "gpu:h100:1", "7", None),
    }
    cpu_evaluation = make_config(tmp_path, *layout, "stages.evaluate.gpus_per_node=0", profile="gpu-cluster.yaml")
    assert "gres" not in parse_sbatch_options(render_batch_script(run, cpu_evaluation, "evaluate"))
    with raises_error("parallel.too_few_gpus", "stages.train.tasks_per_node (4)", "stages.train.gpus_per_node (2)"):
        make_config(tmp_path, *layout, "stages.train.gpus_per_node=2", profile="gpu-cluster.yaml")


def test_the_saved_config_has_only_the_keys_that_a_stage_sets(tmp_path: Path) -> None:
    config = make_config(tmp_path, *STAGE_OVERRIDES)
    text = dump_config(config)
    assert yaml.safe_load(text)["stages"]["prepare"] == {"time": "01:00:00"}
    (tmp_path / "saved.yaml").write_text(text)
    assert load_config(tmp_path / "saved.yaml") == config


def test_bad_nodes_are_looked_up_in_the_partition_of_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded bad node is excluded only if the partition of the stage contains it."""
    run = Run.create(make_config(tmp_path, *STAGE_OVERRIDES, "site.partition=big"))
    listed_partitions: list[str | None] = []

    def list_no_nodes(partition: str | None) -> dict[str, bool]:
        listed_partitions.append(partition)
        return {}

    monkeypatch.setattr(current_job, "_list_nodes", list_no_nodes)
    current_job.record_bad_node(run, "n1", "a failed GPU")
    assert [current_job.excluded_nodes_at_submission([run], stage) for stage in ("train", "evaluate")] == [None, None]
    assert listed_partitions == ["big", "small"]


def test_setup_lines_override_variables_of_the_site(tmp_path: Path) -> None:
    text = render_site_script(tmp_path, {"network_interface": "ib0", "setup": ["export NCCL_SOCKET_IFNAME=eth7"]})
    variables = read_exported_variables(text)
    assert variables["NCCL_SOCKET_IFNAME"] == "eth7" and variables["GLOO_SOCKET_IFNAME"] == "ib0"


def test_an_sbatch_option_with_the_value_false_is_not_written(tmp_path: Path) -> None:
    site = {"sbatch": {"exclusive": True, "hold": False, "nice": 100}}
    options = parse_sbatch_options(render_site_script(tmp_path, site))
    assert options["exclusive"] == "" and options["nice"] == "100" and "hold" not in options


@pytest.mark.parametrize(
    ("override", "code", "facts"),
    [
        ("site.sbatch.time=10", "config.conflict", ["time", "stages.STAGE.time"]),
        ("site.sbatch.gpus=1", "config.conflict", ["gpus", "site.gpus_per_node"]),
        ("site.sbatch.part=x", "config.conflict", ["part", "site.partition"]),
        ("site.sbatch.requeue=true", "config.conflict", ["site.requeue"]),
        ("site.sbatch.output=/x", "config.conflict", ["--output"]),
        ("site.sbatch.clusters=b", "config.conflict", ["clusters"]),
        ("stages.train.sbatch.partition=x", "config.conflict", ["site.partition"]),
        ("site.sbatch.--nice=1", "config.conflict", ["'--nice'"]),
        ("site.sbatch.mail_type=END", "config.conflict", ["'mail_type'"]),
        ("site.sbatch.nice=[1]", "config.wrong_type", ["nice: [1]"]),
        ("site.distribution=arbitrary", "config.invalid_value", ['"arbitrary"', "plane=4"]),
        ("site.switches=two", "config.invalid_value", ['"two"', "COUNT@TIME"]),
        ("site.network_interface=ib0; rm", "config.invalid_value", ['"ib0; rm"', "ib0,ib1"]),
        ("site.scratch=tmp/$USER", "config.invalid_value", ['"tmp/$USER"', "site.setup", "TMPDIR"]),
        ("site.stripe.count=-2", "config.out_of_range", ["-2", "-1"]),
        ("site.stripe.pool=a b", "config.invalid_value", ['"a b"', "lfs pool_list"]),
    ],
)
def test_an_invalid_site_setting_is_an_error(tmp_path: Path, override: str, code: str, facts: list[str]) -> None:
    key = override.partition("=")[0].rsplit(".", 1)[1] if "sbatch" not in override else "sbatch"
    with raises_error(code, "command line", key, *facts, kind=ConfigError):
        make_config(tmp_path, override)


def test_site_sbatch_accepts_no_option_that_a_script_sets(tmp_path: Path) -> None:
    """`site.sbatch` must not override options that Sluice or submitit write. `OWN_OPTIONS` must contain all of them.

    submitit may also write `wckey`, which a user may set.
    """
    site = {"partition": "p", "account": "a", "qos": "q", "constraint": "c", "gpus_per_node": 1, "cpus_per_task": 2}
    site |= {"mem_gb": 1.0, "distribution": "block", "switches": "1"}
    text = render_site_script(tmp_path, site) + render_site_script(tmp_path, {**site, "gpus_as": "gres"})
    assert parse_sbatch_options(text).keys() - {"wckey"} <= OWN_OPTIONS.keys()


@pytest.mark.parametrize(
    ("key", "value"), [("partition", "a\nb"), ("qos", "a\\b"), ("account", "a\rb"), ("constraint", "\0")]
)
def test_a_character_that_sbatch_would_misread_is_an_error(tmp_path: Path, key: str, value: str) -> None:
    with raises_error("slurm.invalid_character", key, repr(value)):
        render_site_script(tmp_path, {key: value})


# -- dry run -----------------------------------------------------------------------------------------------------------


def test_a_dry_run_shows_scripts_and_config_but_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of `secrets` contains the secret "hunter2" in another syntax."""
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm, no git
    secrets = [
        "export WANDB_API_KEY=hunter2", "HF_TOKEN='hunter2 hunter2' cmd", "login -u me --password hunter2",
        'curl -H "Authorization: Bearer hunter2" x', "git clone https://me:hunter2@example.com", "export\tPASS=hunter2",
        "docker login --username me hunter2", 'export SECRET="one\nhunter2"', "aws_secret_access_key : hunter2",
        "export GH_PAT=hunter2", "curl -u me:hunter2 x", "curl https://hooks.example.com/services/hunter2",
        "X=hunter2; export TOKEN=$X", "set -- hunter2 && export TOKEN=$1", "echo hunter2 | docker login -u me",
        "module load git && git clone https://hunter2@example.com", "[ -f x ] || export A=hunter2",
    ]  # fmt: skip
    sbatch = {"nice": 5, "admin-comment": "token=hunter2", "spank-hook": "https://hooks.example.com/hunter2"}
    site = {"setup": [*secrets, "module load cuda/12.4"], "sbatch": sbatch, "data_jobs": {"sbatch": sbatch}}
    stage_secret = "stages.evaluate.sbatch={spank-pat: hunter2}"
    config = make_config(tmp_path, "stages.train.nodes=2", "stages.train.time=00:20:00", stage_secret)
    output = io.StringIO()
    config = config.model_copy(update={"site": SiteConfig.model_validate(site)})
    print_plan(config, "slurm", PlainConsole(file=output, width=80), scripts=True)
    text = output.getvalue()
    assert "hunter2" not in text
    assert text.count("module load cuda/12.4") == 6, "the line must be in 5 scripts and in the config"
    assert "export WANDB_API_KEY=*****" in text
    assert text.count("#!/bin/bash") == 5 and "--array=0-1%2" in text
    assert re.search(r"^train +2 × 2 = 4 processes, 00:20:00, after shard; requests ", text, re.M)
    assert "sequence_length: 32" in text and "#SBATCH --nice=5" in text
    assert not (tmp_path / "runs").exists()


def render_dry_run(config: Config) -> dict[str, str]:
    """Return the scripts that a dry run for Slurm prints, by heading."""
    output = io.StringIO()
    print_plan(config, "slurm", PlainConsole(file=output, width=80), scripts=True)
    _, *headings_and_scripts = re.split(r"^# ---- on Slurm: (.*)\n", output.getvalue(), flags=re.M)
    return dict(zip(headings_and_scripts[::2], headings_and_scripts[1::2], strict=True))


def test_a_dry_run_shows_the_size_of_each_array(tmp_path: Path) -> None:
    """An array of a sweep has one task per point. A successor job is shown only for runs without a sweep.

    The stage shard has two jobs: an array, and a job without an array that completes the stage.
    """
    scripts = render_dry_run(make_config(tmp_path, "stages.shard.tasks=300"))
    assert parse_sbatch_options(scripts["shard"])["array"] == "0-299%300"
    assert "array" not in parse_sbatch_options(scripts["train"])
    sweep = "sweep={grid: {optimizer.lr: [0.1, 0.2], run.seed: [1, 2, 3]}, at_most: 4}"
    scripts = render_dry_run(make_config(tmp_path, sweep, "site.requeue=false"))
    arrays = {heading: parse_sbatch_options(script).get("array") for heading, script in scripts.items()}
    last_array_by_stage = {heading.partition(",")[0]: array for heading, array in arrays.items()}
    assert last_array_by_stage == {"prepare": None, "shard": None, "train": "0-5%4", "evaluate": "0-5%4"}
    assert not [heading for heading in scripts if "successor" in heading]
    with raises_error("config.unknown_key", "point 000", "optimizer.lrr=1", kind=ConfigError):
        render_dry_run(make_config(tmp_path, "sweep={grid: {optimizer.lrr: [1]}}"))


def test_a_dry_run_shows_the_script_of_the_successor(tmp_path: Path) -> None:
    scripts = render_dry_run(make_config(tmp_path, "site.requeue=false"))
    [successor] = [script for heading, script in scripts.items() if heading.startswith("train, its successor")]
    assert successor.rstrip() == scripts["train"].rstrip()
    assert "no-requeue" in parse_sbatch_options(scripts["train"])
    assert len(render_dry_run(make_config(tmp_path))) == len(scripts) - 1


@pytest.mark.parametrize(("time", "training_time"), [("00:03:00", "20 s"), ("00:01:00", "0 s"), ("00:04:00", None)])
def test_a_dry_run_reports_a_time_limit_that_is_too_short(tmp_path: Path, time: str, training_time: str | None) -> None:
    """The message names the time that remains for the start and the training before the signal of Slurm.

    Slurm sends the signal 90 s before the time limit, or up to 70 s earlier.
    """
    output = io.StringIO()
    print_plan(make_config(tmp_path, f"stages.train.time='{time}'"), "slurm", PlainConsole(file=output, width=200))
    reported = re.findall(rf"^problem +stages.train.time: {time} .* 90 s .* (\d+ s)", output.getvalue(), re.M)
    assert reported == ([training_time] if training_time else [])


@pytest.mark.parametrize("stage", ["prepare", "evaluate"])
def test_a_dry_run_checks_the_time_limit_of_each_stage_that_gets_the_signal(tmp_path: Path, stage: str) -> None:
    output = io.StringIO()
    print_plan(make_config(tmp_path, f"stages.{stage}.time='00:01:00'"), "slurm", PlainConsole(file=output, width=200))
    assert re.search(rf"^problem +stages.{stage}.time: 00:01:00 .*90 s .* 0 s", output.getvalue(), re.M)


def test_memory_per_node_and_per_cpu_exclude_each_other(tmp_path: Path) -> None:
    """An option with the value false in a later override removes the conflict."""
    with raises_error("slurm.conflicting_options", "train", "mem_gb", "sbatch.mem-per-cpu"):
        render_dry_run(make_config(tmp_path, "site.mem_gb=4", "stages.train.sbatch={mem-per-cpu: 1G}"))
    render_dry_run(
        make_config(tmp_path, "site.mem_gb=4", "site.sbatch={mem-per-cpu: 1G}", "site.sbatch={mem-per-cpu: false}")
    )


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "sbatch: unrecognized option '--nonsense=1'\nTry \"sbatch --help\" for more information",
            "unrecognized option '--nonsense=1'",
        ),
        (
            "sbatch: fatal: --mem and --mem-per-cpu are mutually exclusive.",
            "--mem and --mem-per-cpu are mutually exclusive.",
        ),
        (
            "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid",
            "invalid partition specified: x; Batch job submission failed: Invalid",
        ),
        ("no budget is left\n\nMore help: https://hpc.example", "no budget is left; More help: https://hpc.example"),
        ("", "it printed no reason"),
    ],
)
def test_the_reason_is_extracted_from_the_output_of_sbatch(output: str, reason: str) -> None:
    assert _extract_sbatch_reason(output) == reason


@given(st.text(), st.sampled_from(["API_TOKEN", "db-password", "SSH_KEY", "secret"]), st.sampled_from(["=", ": ", " "]))
@settings(deadline=None, max_examples=100)
def test_the_value_of_a_secret_variable_is_masked(text: str, name: str, separator: str) -> None:
    assert mask_shell_line(f"export {name}{separator}<{text}>") == f"export {name}{separator}*****"


@pytest.mark.parametrize("line", ["LEAK1abcdef", "EOF", "source login.sh LEAK3hunter2", ". login.sh LEAK", "LE/AK"])
def test_arguments_and_here_documents_are_masked(line: str) -> None:
    assert "LEAK" not in mask_shell_line(line).replace("/", "") and mask_shell_line(line).endswith("*****")


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("site.pass=[TOKEN=hunter2]", "config.invalid_value"),
        ("site.pass={TOKEN: hunter2}", "config.wrong_type"),
        ("site.secrets=TOKEN=hunter2", "config.invalid_value"),
        ("site.secrets=hunter2", "config.invalid_value"),
    ],
)
def test_a_secret_written_in_place_of_a_name_is_masked(tmp_path: Path, override: str, code: str) -> None:
    """`site.pass` contains names of variables and `site.secrets` a path. Valid values of both are not masked.

    In the URI of MLflow, the user and the password are masked.
    """
    check_error_without_secret(lambda: make_config(tmp_path, override), code, override.partition("=")[0], "*****")
    assert mask_secrets({"site": {"pass": ["TOKEN"], "secrets": "~/s"}}) == {
        "site": {"pass": ["TOKEN"], "secrets": "~/s"}
    }
    for values in (
        {"track": {"mlflow": {"uri": "http://u:p@ss/w@h:5000"}}},
        {"track.mlflow.uri": "http://u:p@ss/w@h:5000"},
    ):
        assert "http://*****@h:5000" in str(mask_secrets(values)) and "ss/w" not in str(mask_secrets(values))


@pytest.mark.parametrize(
    "line", ["module load cuda/12.4 gcc", "source /sw/env.sh", ". ~/env", "conda activate x", "/sw/init.sh", ""]
)
def test_a_line_without_secrets_is_shown(line: str) -> None:
    assert mask_shell_line(line) == line


# -- secrets -----------------------------------------------------------------------------------------------------------

SECRET_IN_SETUP = "site.setup=[export GH_PAT=hunter2, module load cuda]"


def check_error_without_secret(call: Callable[[], object], code: str, *facts: str) -> None:
    """Check that a call raises UserError with this code and these texts, and without the secret "hunter2"."""
    with pytest.raises(UserError) as raised:
        call()
    message = str(raised.value)
    assert raised.value.code == code, message
    assert all(fact in message for fact in facts) and "hunter2" not in message, message


def test_secrets_in_setup_lines_are_saved_only_in_files_that_jobs_read(tmp_path: Path) -> None:
    """These files are config.yaml and changes.jsonl. Events and error messages contain a mask instead of the secret."""
    run = Run.create(make_config(tmp_path, SECRET_IN_SETUP))
    run.apply_overrides(["site.setup=[export GH_PAT=hunter2, export B=hunter2]", "site.sbatch={spank-token: hunter2}"])
    assert Run.open(run.path).config.site.setup[1] == "export B=hunter2", "a job needs the secret"
    files = [file for file in run.path.glob("*.*") if file.is_file()]
    files_with_secret = {file.name for file in files if b"hunter2" in file.read_bytes()}
    assert files_with_secret == {"config.yaml", "changes.jsonl"}
    assert '["export GH_PAT=*****", "export B=*****"]' in run.events_file.read_text()
    other_config = make_config(tmp_path, "site.setup=[export GH_PAT=hunter22]", "model.dropout=0.5")
    (run.checkpoints_dir / "step-00000007").mkdir()
    check_error_without_secret(
        lambda: Run.create(other_config), "run.other_config", "site.setup: ['export GH_PAT=*****', 'export"
    )


@pytest.mark.parametrize(
    ("override", "code", "facts"),
    [
        ("site.setup=export GH_PAT=hunter2", "config.wrong_type", ['site.setup: "export GH_PAT=*****"']),
        ("site.setpu=[curl -u me hunter2]", "config.unknown_key", ['site.setpu: ["curl *****"]', "mean setup"]),
        ("site.setups=[hunter2]", "config.unknown_key", ['site.setups: ["*****"]', "mean setup"]),
        ("site.pasword=hunter2", "config.unknown_key", ['site.pasword: "*****"', "mean pass"]),
        ("site.secret=hunter2", "config.unknown_key", ['site.secret: "*****"', "mean secrets"]),
        ("site.environment=[export A=hunter2]", "config.unknown_key", ['["export A=*****"]']),
        ("site.env={A: hunter2}", "config.unknown_key", ['{"A": "*****"}']),
        ("site.api_key=hunter2", "config.unknown_key", ['site.api_key: "*****"']),
        ("site.sbatc={spank-token: hunter2}", "config.unknown_key", ['{"spank-token": "*****"}', "mean sbatch"]),
        ("sitee={setup: [export A=hunter2]}", "config.unknown_key", ["sitee", "mean site"]),
        ("stages.train.sbtach={spank-token: hunter2}", "config.unknown_key", ["train.sbtach", "mean sbatch"]),
        ("site.setup=[{export GH_PAT: hunter2}]", "config.wrong_type", ["site.setup.0"]),
        ("site..setup=[export GH_PAT=hunter2]", "config.invalid_override", ['"site..setup=*****"']),
        ("stages.train.sbatch={spank-token: [hunter2]}", "config.wrong_type", ['sbatch.spank-token: ["*****"]']),
    ],
)
def test_an_error_about_a_secret_key_masks_its_value(
    tmp_path: Path, override: str, code: str, facts: list[str]
) -> None:
    check_error_without_secret(lambda: make_config(tmp_path, override), code, *facts)


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("site.partiton=gpu-long", ['site.partiton: "gpu-long"', "mean partition"]),
        ("site.constrant=a100&nvlink", ['"a100&nvlink"', "mean constraint"]),
        ("site.cpu_per_task=64", ["site.cpu_per_task: 64", "mean cpus_per_task"]),
        ("site.requeu=false", ["site.requeu: false", "mean requeue"]),
        ("site.local_dsk=$TMPDIR", ['"$TMPDIR"', "mean local_disk"]),
        ("site.sbatc={reservation: r1}", ['{"reservation": "r1"}', "mean sbatch"]),
        ("site.color=red", ['site.color: "red"']),
        ("site.walltime=01:00:00", ['"01:00:00"']),
        ("site.preamble=[module load cuda]", ['["module load cuda"]']),
    ],
)
def test_an_error_about_an_unknown_key_shows_its_value(tmp_path: Path, override: str, facts: list[str]) -> None:
    with raises_error("config.unknown_key", *facts, kind=ConfigError):
        make_config(tmp_path, override)


def test_a_warning_names_setup_lines_with_secrets_that_a_group_can_read(tmp_path: Path) -> None:
    """The members of the group can read config.yaml of a run with `run.sharing: group`."""
    assert describe_exposed_setup(make_config(tmp_path, SECRET_IN_SETUP)) is None
    assert describe_exposed_setup(make_config(tmp_path, "run.sharing=group", "site.setup=[module load cuda]")) is None
    warning = describe_exposed_setup(make_config(tmp_path, "run.sharing=group", SECRET_IN_SETUP))
    assert warning is not None
    for fact in ("(export GH_PAT=*****)", "site.secrets", "site.pass"):
        assert fact in warning
    arguments = ["tiny.yaml", "--dry-run", "run.sharing=group", SECRET_IN_SETUP]
    command = [sys.executable, str(CODE_ROOT / "submit.py"), *arguments]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert warning.removeprefix("warning: ") in result.stdout, result.stderr
    assert "hunter2" not in result.stdout + result.stderr


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """Return a valid file for `site.secrets`. Its path contains a space, so it needs quotes in a shell."""
    file = tmp_path / "my secrets"
    file.write_text("WANDB_API_KEY='hunter2 $x'\n[ -e /nowhere ] && X=1\n")
    file.chmod(0o600)
    return file


def test_a_job_sources_the_secrets_file_and_its_script_has_no_secret(tmp_path: Path, secrets: Path) -> None:
    text = render_site_script(tmp_path, {"secrets": str(secrets), "setup": ["export AFTER=$WANDB_API_KEY"]})
    assert "hunter2" not in text
    variables = read_exported_variables(text)
    assert variables["AFTER"] == variables["WANDB_API_KEY"] == "hunter2 $x"
    secrets.write_text("secrets=1\n")  # a variable that the script itself could use
    assert read_exported_variables(text)["secrets"] == "1" and "sluice_fd" not in read_exported_variables(text)
    setup = text[text.index("# setup") : text.index("# command")]
    secrets.chmod(0o640)
    result = subprocess.run(["bash", "-c", f"{setup}\necho started"], capture_output=True, text=True, timeout=10)
    assert (result.returncode, result.stdout) == (2, "") and f"chmod 600 {secrets}" in result.stderr


def test_a_job_sources_the_secrets_file_that_it_checked(tmp_path: Path, secrets: Path) -> None:
    """A fake `stat` replaces the secrets file directly after the check, as a user who may write to its folder could.

    The job must read the file that it checked, not the replacement.
    """
    text = render_site_script(tmp_path, {"secrets": str(secrets)})
    (tmp_path / "replacement").write_text("WANDB_API_KEY=replaced\n")
    (tool := tmp_path / "bin/stat").parent.mkdir()
    tool.write_text(f'#!/bin/sh\n{shutil.which("stat")} "$@"\nmv {tmp_path}/replacement "{secrets}" 2>/dev/null\n:\n')
    tool.chmod(0o755)
    setup = text[text.index("# setup") : text.index("# command")]
    shell = ["bash", "-c", f"PATH={tmp_path}/bin:$PATH\n{setup}\nenv -0"]
    result = subprocess.run(shell, capture_output=True, text=True, timeout=10)
    assert "WANDB_API_KEY=hunter2 $x\0" in result.stdout and result.returncode == 0, result.stderr
    assert secrets.read_text() == "WANDB_API_KEY=replaced\n"


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "foreign", "readable by others", "writable by others"])
def test_a_job_exits_if_the_secrets_file_is_not_private(tmp_path: Path, secrets: Path, kind: str) -> None:
    """The kind "foreign" is a file of another user."""
    text = render_site_script(tmp_path, {"secrets": str(secrets)})
    setup = text[text.index("# setup") : text.index("# command")]
    if kind in ("missing", "folder", "pipe"):
        secrets.unlink()
    if kind == "folder":
        secrets.mkdir(mode=0o700)
    elif kind == "pipe":
        os.mkfifo(secrets, 0o600)
    elif kind == "foreign":
        os.chown(secrets, 1234, 1234)
    elif kind.endswith("by others"):
        secrets.chmod(0o604 if kind == "readable by others" else 0o602)
    result = subprocess.run(["bash", "-c", f"{setup}\necho started"], capture_output=True, text=True, timeout=10)
    assert (result.returncode, result.stdout) == (2, "") and f"chmod 600 {secrets}" in result.stderr
    if kind.endswith("by others"):  # a link to a private file is valid, and so is a read-only file
        secrets.chmod(0o400)
        secrets.rename(tmp_path / "moved")
        secrets.symlink_to(tmp_path / "moved")
        result = subprocess.run(["bash", "-c", f"{setup}\necho started"], capture_output=True, text=True, timeout=10)
        assert (result.returncode, result.stdout) == (0, "started\n"), result.stderr


def test_submission_requires_a_private_secrets_file(tmp_path: Path, secrets: Path) -> None:
    """The errors must name what is wrong, but must not show the contents of the file."""
    site = make_config(tmp_path, f"site.secrets={secrets}").site
    check_job_environment(site, {})
    secrets.chmod(0o644)
    check_error_without_secret(
        lambda: check_job_environment(site, {}), "site.secrets_readable", str(secrets), "644", "chmod 600"
    )
    secrets.chmod(0o600)
    os.chown(secrets, 1234, 1234)
    check_error_without_secret(lambda: check_job_environment(site, {}), "site.secrets_readable", "1234")
    secrets.unlink()
    check_error_without_secret(
        lambda: check_job_environment(site, {}), "site.unreadable_secrets", str(secrets), "No such file"
    )
    check_error_without_secret(
        lambda: make_config(tmp_path, "site.secrets=secrets.sh"), "config.invalid_value", "site.secrets"
    )


@pytest.mark.parametrize(
    ("overrides", "export_option"),
    [
        ([], None),
        (["site.pass=[A, B]"], "ALL,A,B"),
        (["site.export=none"], "NONE"),
        (["site.export=none", "site.pass=[A]"], "HOME,PATH,USER,A"),
    ],
)
def test_export_selects_the_variables_of_the_submitting_shell(
    tmp_path: Path, overrides: list[str], export_option: str | None
) -> None:
    config = make_config(tmp_path, *overrides)
    options = parse_sbatch_options(render_batch_script(Run(tmp_path / "runs/tiny"), config, "train"))
    assert options.get("export") == export_option
    assert load_config(Run.create(config).config_file).site == config.site, (
        "the key must be saved as `pass`, not as `pass_`, the name of the field in Python"
    )


def test_submit_and_resume_require_the_variables_of_site_pass(tmp_path: Path) -> None:
    """The variable WANDB_API_KEY is not set. Both commands must fail before they call sbatch."""
    override = "site.pass=[GH_PAT, WANDB_API_KEY]"
    config = make_config(tmp_path, override)
    check_job_environment(config.site, {"GH_PAT": "hunter2", "WANDB_API_KEY": "x"})
    check_error_without_secret(
        lambda: check_job_environment(config.site, {"GH_PAT": "hunter2"}),
        "site.variable_not_set",
        "site.pass",
        "WANDB_API_KEY",
    )
    lines = {"scontrol": "echo Slurmctld is UP", "sbatch": f"touch {tmp_path}/submitted; exit 1", "squeue": "exit 1"}
    for name, line in lines.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GH_PAT": "hunter2"}
    for arguments in (["tiny.yaml", override], ["resume", "runs/tiny"]):
        command = [sys.executable, str(CODE_ROOT / "submit.py"), *arguments, "--executor=slurm"]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert result.returncode == 2 and result.stderr.startswith("error[site.variable_not_set]"), result.stderr
        assert "site.pass" in result.stderr and "WANDB_API_KEY" in result.stderr, result.stderr
        assert (tmp_path / "runs").exists() == (arguments[0] == "resume"), "a failed submit must create no run"
        run = Run.create(config)  # for `resume`
    assert [event["event"] for event in read_event_lines(run)] == ["created"]
    assert not (tmp_path / "submitted").exists()


def test_a_job_that_sluice_did_not_submit_gets_the_secrets(
    tmp_path: Path, secrets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside salloc and in jobs of slurm/templates, no batch script of Sluice has set the environment."""
    for name in ("WANDB_API_KEY", "SLUICE_JOB_ID"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
    monkeypatch.setenv("GH_PAT", "x")
    site = make_config(tmp_path, f"site.secrets={secrets}", "site.pass=[GH_PAT]").site
    apply_site_environment(site, "5")
    assert os.environ["WANDB_API_KEY"] == "hunter2 $x" and "SLURM_EXPORT_ENV" not in os.environ
    secrets.chmod(0o644)
    check_error_without_secret(lambda: apply_site_environment(site, "5"), "site.secrets_readable", "chmod 600")


# -- placement ---------------------------------------------------------------------------------------------------------


def test_ranks_are_assigned_to_nodes_as_srun_does() -> None:
    assert assign_ranks_to_nodes([2, 2, 2, 1], "block") == [0, 0, 1, 1, 2, 2, 3]
    assert assign_ranks_to_nodes([2, 2, 2, 1], "cyclic:block") == [0, 1, 2, 3, 0, 1, 2]
    assert assign_ranks_to_nodes([3, 3], "plane=2") == [0, 0, 1, 1, 0, 1]


@given(st.lists(st.integers(1, 8), min_size=1, max_size=8), st.sampled_from(["block", "cyclic", "plane=2", "plane=3"]))
def test_each_node_gets_as_many_ranks_as_it_has_tasks(tasks: list[int], distribution: str) -> None:
    """`tasks` is the number of Slurm tasks of each node."""
    nodes = assign_ranks_to_nodes(tasks, distribution)
    assert [nodes.count(node) for node in range(len(tasks))] == tasks


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.sampled_from([None, "block", "cyclic", "plane=2", "*:cyclic", "CYCLIC,NoPack"]),
)
def test_a_valid_placement_has_each_tensor_group_on_one_node(
    nodes: int, times: int, tensor: int, tasks: list[int], distribution: str | None
) -> None:
    """`tensor` ranks form a tensor parallel group, and each node has `times` groups. `tasks`: Slurm tasks by node."""
    per_node = times * tensor  # pipeline/parallel/mesh.py requires a multiple of the group size
    problem = describe_placement_problem("train", nodes, per_node, tensor, tasks, distribution)
    has_enough_tasks = len(tasks) >= nodes and all(count >= per_node for count in tasks[:nodes])
    node_of_rank = assign_ranks_to_nodes([per_node] * nodes, distribution or "block")
    groups = [node_of_rank[first : first + tensor] for first in range(0, len(node_of_rank), tensor)]
    is_plane_size_valid = not (distribution or "").startswith("plane") or per_node % 2 == 0
    are_groups_whole = all(len(group) == tensor and len(set(group)) == 1 for group in groups)
    assert (problem is None) == (has_enough_tasks and is_plane_size_valid and are_groups_whole)


@pytest.mark.parametrize(
    ("arguments", "facts"),  # nodes, ranks per node, parallel.tensor, Slurm tasks of each node, distribution
    [
        ((4, 2, 1, [1, 1], None), ["4 nodes × 2 ranks", "2 nodes that can run 1, 1 ranks", "--nodes=4"]),
        ((2, 2, 1, [4, 3], "plane=3"), ["plane", "ranks per node (2)"]),
        ((2, 2, 2, [2, 2], "cyclic"), ["ranks 0 to 1", "--distribution=block", "site.distribution"]),
    ],
)
def test_a_placement_problem_names_the_options_to_request(arguments: Any, facts: list[str]) -> None:
    problem = str(describe_placement_problem("train", *arguments))
    assert all(fact in problem for fact in facts), problem


def test_granted_tasks_are_read_from_the_environment() -> None:
    """The result is the number of tasks of each node, and the distribution."""
    variables = {"SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "4"}
    assert read_granted_tasks(variables) == ([2, 2, 2, 1], "plane=4")
    assert read_granted_tasks({"SLURM_TASKS_PER_NODE": "8"}) == ([8], "block")
    assert read_granted_tasks({}) is None
    with raises_error("rank.invalid_variable", "SLURM_TASKS_PER_NODE", "two"):
        read_granted_tasks({"SLURM_TASKS_PER_NODE": "two"})


def test_submission_requires_each_tensor_group_on_one_node(tmp_path: Path) -> None:
    config = make_config(tmp_path, "stages.train.nodes=2", "site.distribution=cyclic")
    config_with_split_groups = config.model_copy(update={"parallel": config.parallel.model_copy(update={"tensor": 2})})
    run = Run(tmp_path / "runs/tiny")
    assert build_sbatch_parameters(run, config, "train", None)["additional_parameters"]["distribution"] == "cyclic"
    with raises_error("slurm.bad_placement", "parallel.tensor=2", "--distribution=block"):
        build_sbatch_parameters(run, config_with_split_groups, "train", None)
    build_sbatch_parameters(run, config_with_split_groups, "evaluate", None)  # evaluate has no tensor parallel groups


def test_an_allocation_that_does_not_fit_the_stage_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.create(make_config(tmp_path, "stages.train.nodes=2"))
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2")
    assert "--nodes=2 --ntasks-per-node=2" in str(capacity.find_placement_problem(run, "train", 4))
    assert capacity.find_placement_problem(run, "shard", 2) is None
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x3)")
    assert capacity.find_placement_problem(run, "train", 4) is None
    monkeypatch.delenv("SLURM_TASKS_PER_NODE")
    assert capacity.find_placement_problem(run, "train", 4) is None


# -- doctor ------------------------------------------------------------------------------------------------------------


WITH_ACCOUNTING = {"AccountingStorageType": "accounting_storage/slurmdbd", "AccountingStorageEnforce": "limits"}


def assess_settings(config: dict[str, str], mpi: list[str] | None = None, **partition: str) -> dict[str, Finding]:
    """Return the findings of `doctor`, by subject, for a cluster with these settings and one partition."""
    facts = ClusterFacts(config, [{"PartitionName": "p", "State": "UP", **partition}], {}, mpi or [])
    return {finding.subject: finding for finding in assess_cluster(facts)}


@pytest.mark.parametrize(
    ("config", "subject", "verdict", "fact"),
    [
        ({"SLURM_VERSION": "20.11.9"}, "Slurm", "note", "22.05"),
        ({"SLURM_VERSION": "24.05.1"}, "Slurm", "ok", "22.05"),
        ({"MaxArraySize": "0"}, "MaxArraySize", "problem", "stages.shard.tasks to 1"),
        ({"MaxJobCount": "200"}, "MaxJobCount", "note", "all users"),
        (WITH_ACCOUNTING, "accounting", "ok", "site.account"),
        ({"PreemptType": "preempt/qos"}, "partition p", "ok", "sacctmgr show qos"),
        ({"PreemptType": "preempt/partition_prio"}, "partition p", "note", "treated with SUSPEND"),
        ({}, "partition p", "ok", "not preempted"),
        ({}, "srun --mpi", "note", "mpirun"),
    ],
)  # fmt: skip
def test_doctor_assesses_the_settings_of_a_cluster(
    config: dict[str, str], subject: str, verdict: str, fact: str
) -> None:
    finding = assess_settings(config, PreemptMode="SUSPEND,GANG")[subject]
    assert finding.verdict == verdict and fact in finding.meaning + finding.fact


@pytest.mark.parametrize(
    ("nodes", "kind", "unseen", "verdict"),
    [(9, "ext4", None, "problem"), (9, "ext4", "", "ok"), (9, "nfs4", "no", "problem"), (9, "lustre", None, "ok"),
     (9, "fuse.sshfs", None, "ok"), (0, "ext4", None, "ok"), (9, "", None, "problem")],
)  # fmt: skip
def test_doctor_checks_that_the_file_system_is_shared(
    tmp_path: Path, nodes: int, kind: str, unseen: str | None, verdict: str
) -> None:
    """`unseen`: why compute nodes do not see the folder; "" if they see it; None if this was not checked."""
    assert next(check_file_system(tmp_path, nodes, kind, unseen)).verdict == verdict


@pytest.mark.parametrize(("kind", "is_shared"), [("lustre", True), ("nfs4", True), ("ext4", False)])
def test_doctor_tests_file_locks_on_one_machine_only(tmp_path: Path, kind: str, is_shared: bool) -> None:
    """A test on one machine cannot detect the Lustre option localflock, with which locks do not work between machines.

    Therefore the finding mentions this option if the file system is shared.
    """
    findings = check_file_system(tmp_path, 9, kind, "")
    lock_finding = next(finding for finding in findings if finding.subject == "file locks")
    assert lock_finding.meaning.startswith("on one machine")
    assert ("not localflock" in lock_finding.meaning) == is_shared


def test_doctor_describes_a_machine_without_slurm(tmp_path: Path) -> None:
    """`doctor` imports torch in a separate process, because the import is slow and may fail."""
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho 'mpirun (A Kind of MPI) 9.1'\n")
    (tmp_path / "mpirun").chmod(0o755)
    python = tmp_path / "python"  # its folder has the fake mpirun, not one from a wheel as in a virtual environment
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program = f"import sys, runpy; sys.executable = '{python}'; sys.argv = ['submit.py', 'doctor']\n"
    program += f"sys.path.insert(0, '{CODE_ROOT}'); runpy.run_path('{CODE_ROOT}/submit.py', run_name='__main__')\n"
    python.chmod(0o755)

    def run_doctor(*code: str, **environment: str) -> str:
        """Run the lines in `code`, then `doctor`, in a new Python process. Return the output of `doctor`.

        Check that the process imports neither torch nor numpy nor mpi4py.
        """
        result = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", "\n".join([*code, program])],
            cwd=tmp_path, env={**os.environ, "PATH": "/nowhere", "COLUMNS": "300", **environment},
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert not re.search(r"\| +(torch|numpy|mpi4py)$", result.stderr, re.M)
        return result.stdout

    output = run_doctor()
    cores = len(os.sched_getaffinity(0))
    for subject, fact in {
        "CPU cores": f"{cores} of {os.cpu_count()} ", "memory": r"[\d.]+ GB, [\d.]+ GB of it free",
        "torch": rf"{re.escape(version('torch'))}.* built for ", "GPUs": r"\S", "MPI": r"mpirun \(A Kind of MPI\) 9\.1",
        "run.root": re.escape(str(tmp_path)),
    }.items():  # fmt: skip
        assert re.search(rf"^ok +{subject} +{fact}", output, re.M), output
    assert re.search(r"^note +Slurm +no scontrol", output, re.M) and output.endswith("0 problems\n")
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so is missing')\n")
    output = run_doctor(PYTHONPATH=str(tmp_path))
    assert re.search(r"^problem +torch +not importable", output, re.M), output
    assert output.endswith("1 problem\n")


def test_a_dry_run_for_slurm_needs_no_slurm(tmp_path: Path) -> None:
    write_config(tmp_path)
    options = ["--dry-run", "--scripts", "--executor", "slurm"]
    command = [sys.executable, str(CODE_ROOT / "submit.py"), "tiny.yaml", *options, "site.scratch=/with space"]
    result = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PATH": "/nowhere"}, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0 and "export TMPDIR='/with space'" in result.stdout, result.stderr


def test_the_installed_version_of_submitit_is_the_tested_one() -> None:
    """`render_script` uses two private members of submitit.

    If this test fails, compare the scripts of both versions and set TESTED_VERSION.
    """
    assert submitit.__version__ == submitit_job.TESTED_VERSION
    for name in ("_make_submission_file_text", "_submitit_command_str"):
        assert hasattr(submitit.SlurmExecutor, name)

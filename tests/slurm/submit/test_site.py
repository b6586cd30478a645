"""Site profiles without a cluster: what is refused, what reaches the script, what a dry run hides, who sits where."""

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
from tests.support.events import read_event_lines
from tests.support.tiny import write_config

PROFILES = CODE_ROOT / "configs" / "sites"


def config(folder: Path, *overrides: str, profile: str | None = None) -> Config:
    path = write_config(folder)
    if profile:
        path.write_text(path.read_text() + f"site: {{extends: {PROFILES / profile}}}\n")
    return load_config(path, overrides)


def options(text: str) -> dict[str, str]:
    """The options of an sbatch script, as a shell reads them."""
    lines = [shlex.split(line.removeprefix("#SBATCH "))[0] for line in text.splitlines() if line.startswith("#SBATCH")]
    return {key.removeprefix("--"): value for key, _, value in (line.partition("=") for line in lines)}


def exported(text: str, *, before: str = "# command") -> dict[str, str]:
    """What the set-up lines of a script put into the environment, asked of bash."""
    setup = text[text.index("# setup") : text.index(before)].replace("module ", ": ")
    shell = subprocess.run(["bash", "-c", f"{setup}\nenv -0"], capture_output=True, text=True, timeout=10, check=True)
    return dict(item.split("=", 1) for item in shell.stdout.split("\0") if "=" in item)


def site_script(folder: Path, site: dict[str, Any], stage: str = "train", *overrides: str) -> str:
    loaded = config(folder, *overrides)
    loaded = loaded.model_copy(update={"site": SiteConfig.model_validate(site)})
    return render_batch_script(Run(folder / "runs/tiny"), loaded, stage)


def test_slurm_writes_mails_of_failures_and_of_the_end(tmp_path: Path) -> None:
    kinds = {}
    for stage in ("prepare", "train", "evaluate"):
        found = options(site_script(tmp_path, {}, stage, "track.mail=me@example.org"))
        assert found["mail-user"] == "me@example.org"
        kinds[stage] = found["mail-type"]
    assert kinds == {"prepare": "FAIL,INVALID_DEPEND", "train": "FAIL,INVALID_DEPEND"} | {
        "evaluate": "FAIL,INVALID_DEPEND,END"
    }
    assert "mail-user" not in options(site_script(tmp_path, {}))
    own = {"sbatch": {"mail-type": "ALL", "mail-user": "you@example.org"}}
    assert options(site_script(tmp_path, own, "train", "track.mail=me@example.org"))["mail-type"] == "ALL"


# -- profiles ------------------------------------------------------------------------------------------------


def test_the_gpu_example_is_what_its_jobs_ask_for(tmp_path: Path) -> None:
    wide = ("train.global_batch=32", "stages.train.nodes=8", "stages.train.tasks_per_node=4")
    cfg = config(tmp_path, "site.account=x", *wide, profile="gpu-cluster.yaml")
    text = render_batch_script(Run(tmp_path / "runs/tiny"), cfg, "train")
    wanted = {
        "gres": "gpu:h100:4", "cpus-per-task": "16", "mem": "491520M", "constraint": "ib&scratch", "account": "x",
        "distribution": "block:block", "switches": "1@00:05:00", "exclusive": "", "mail-type": "FAIL,TIME_LIMIT",
        "signal": "USR2@300", "nodes": "8", "ntasks-per-node": "4", "partition": "gpu", "requeue": "",
    }  # fmt: skip
    assert wanted.items() <= options(text).items()
    variables = exported(text)
    assert variables["NCCL_SOCKET_IFNAME"] == variables["GLOO_SOCKET_IFNAME"] == "ib0"
    assert variables["TMPDIR"] == "/local" and variables["NCCL_IB_HCA"] == "mlx5"
    shard = options(render_batch_script(Run(tmp_path / "runs/tiny"), cfg, "shard"))
    assert shard["partition"] == "cpu" and shard["mem"] == "65536M" and shard["mail-type"] == "FAIL,TIME_LIMIT"
    assert not {"gres", "exclusive", "constraint"} & shard.keys()


def test_the_cpu_example_is_what_its_jobs_ask_for(tmp_path: Path) -> None:
    cfg = config(tmp_path, profile="cpu-cluster.yaml")
    found = options(render_batch_script(Run(tmp_path / "runs/tiny"), cfg, "train"))
    assert found["hint"] == "nomultithread" and found["licenses"] == "lustre" and "gres" not in found
    assert cfg.site.stripe.count == 2


STAGES_ASK = (
    "stages.evaluate={partition: small, account: other, qos: short, constraint: '', cpus_per_task: 2, mem_gb: 8, "
    "sbatch: {nice: 7, exclusive: false}}",
    "stages.shard={partition: io, gpus_per_node: 1, sbatch: {nice: 9}}",
)


def test_each_stage_asks_for_its_own(tmp_path: Path) -> None:
    """A stage's keys over `site.data_jobs`, and that over `site`; no more GPUs than ranks, unless it says so."""
    wide = ("train.global_batch=32", "stages.train.tasks_per_node=4", "site.account=x", "stages.train.qos=long")
    cfg = config(tmp_path, *wide, *STAGES_ASK, profile="gpu-cluster.yaml")
    run = Run(tmp_path / "runs/tiny")
    found = {
        stage: options(render_batch_script(run, cfg, stage)) for stage in ("prepare", "shard", "train", "evaluate")
    }
    keys = ("partition", "account", "qos", "constraint", "cpus-per-task", "mem", "gres", "nice", "exclusive")
    assert {stage: tuple(asked.get(key) for key in keys) for stage, asked in found.items()} == {
        "prepare": ("cpu", "x", None, None, "16", "65536M", None, None, None),
        "shard": ("io", "x", None, None, "16", "65536M", "gpu:h100:1", "9", None),
        "train": ("gpu", "x", "long", "ib&scratch", "16", "491520M", "gpu:h100:4", None, ""),
        "evaluate": ("small", "other", "short", None, "2", "8192M", "gpu:h100:1", "7", None),
    }
    more = config(tmp_path, *wide, "stages.evaluate.gpus_per_node=0", profile="gpu-cluster.yaml")
    assert "gres" not in options(render_batch_script(run, more, "evaluate")), "evaluated on CPUs"
    with pytest.raises(ConfigError, match=r"more than stages\.train\.gpus_per_node \(2\)"):
        config(tmp_path, *wide, "stages.train.gpus_per_node=2", profile="gpu-cluster.yaml")


def test_only_what_a_stage_says_is_written_down(tmp_path: Path) -> None:
    cfg = config(tmp_path, *STAGES_ASK)
    text = dump_config(cfg)
    assert yaml.safe_load(text)["stages"]["prepare"] == {"time": "01:00:00"}
    (tmp_path / "again.yaml").write_text(text)
    assert load_config(tmp_path / "again.yaml") == cfg


def test_bad_nodes_are_those_of_the_stages_own_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.create(config(tmp_path, *STAGES_ASK, "site.partition=big"))
    asked: list[str | None] = []

    def nodes(partition: str | None) -> dict[str, bool]:
        asked.append(partition)
        return {}

    monkeypatch.setattr(current_job, "_list_nodes", nodes)
    current_job.record_bad_node(run, "n1", "no")
    assert [current_job.excluded_nodes_at_submission([run], stage) for stage in ("train", "evaluate")] == [None, None]
    assert asked == ["big", "small"]


def test_a_persons_lines_come_after_the_sites_and_win(tmp_path: Path) -> None:
    text = site_script(tmp_path, {"network_interface": "ib0", "setup": ["export NCCL_SOCKET_IFNAME=eth7"]})
    assert exported(text)["NCCL_SOCKET_IFNAME"] == "eth7" and exported(text)["GLOO_SOCKET_IFNAME"] == "ib0"


def test_options_that_are_taken_back_are_not_there(tmp_path: Path) -> None:
    found = options(site_script(tmp_path, {"sbatch": {"exclusive": True, "hold": False, "nice": 100}}))
    assert found["exclusive"] == "" and found["nice"] == "100" and "hold" not in found


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("site.sbatch.time=10", "stages.STAGE.time"),
        ("site.sbatch.gpus=1", "site.gpus_per_node"),
        ("site.sbatch.part=x", "site.partition"),
        ("site.sbatch.requeue=true", "site.requeue"),
        ("site.sbatch.output=/x", "Sluice sets --output itself"),
        ("site.sbatch.clusters=b", "a login node of that cluster"),
        ("stages.train.sbatch.partition=x", "site.partition"),
        ("site.sbatch.--nice=1", "without dashes"),
        ("site.sbatch.mail_type=END", "as sbatch does"),
        ("site.sbatch.nice=[1]", "nice: [1] should be text or a whole number or true or false"),
        ("site.distribution=arbitrary", "block, cyclic or plane=4"),
        ("site.switches=two", "COUNT@TIME"),
        ("site.network_interface=ib0; rm", "such as ib0"),
        ("site.scratch=tmp/$USER", "absolute path"),
        ("site.stripe.count=-2", "at least -1"),
        ("site.stripe.pool=a b", "lfs pool_list"),
    ],
)
def test_what_a_profile_may_not_say(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(tmp_path, override)
    key = override.partition("=")[0].rsplit(".", 1)[1] if "sbatch" not in override else "sbatch"
    assert words in str(raised.value) and key in str(raised.value) and "command line" in str(raised.value)


def test_every_option_that_a_script_sets_is_refused_in_the_mapping(tmp_path: Path) -> None:
    """What Sluice or submitit write must not be overwritten by a profile."""
    full = {"partition": "p", "account": "a", "qos": "q", "constraint": "c", "gpus_per_node": 1, "cpus_per_task": 2}
    full |= {"mem_gb": 1.0, "distribution": "block", "switches": "1"}
    text = site_script(tmp_path, full) + site_script(tmp_path, {**full, "gpus_as": "gres"})
    assert options(text).keys() - {"wckey"} <= OWN_OPTIONS.keys()


@pytest.mark.parametrize(
    ("key", "value"), [("partition", "a\nb"), ("qos", "a\\b"), ("account", "a\rb"), ("constraint", "\0")]
)
def test_what_sbatch_would_misread_is_refused_before_it_is_asked(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(UserError, match=key):
        site_script(tmp_path, {key: value})


# -- dry run -------------------------------------------------------------------------------------------------


def test_a_dry_run_shows_all_and_hides_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm, no git
    secrets = [
        "export WANDB_API_KEY=hunter2", "HF_TOKEN='hunter2 hunter2' cmd", "login -u me --password hunter2",
        'curl -H "Authorization: Bearer hunter2" x', "git clone https://me:hunter2@example.com", "export\tPASS=hunter2",
        "docker login --username me hunter2", 'export SECRET="one\nhunter2"', "aws_secret_access_key : hunter2",
        "export GH_PAT=hunter2", "curl -u me:hunter2 x", "curl https://hooks.example.com/services/hunter2",
        "X=hunter2; export TOKEN=$X", "set -- hunter2 && export TOKEN=$1", "echo hunter2 | docker login -u me",
        "module load git && git clone https://hunter2@example.com", "[ -f x ] || export A=hunter2",
    ]  # fmt: skip
    private = {"nice": 5, "admin-comment": "token=hunter2", "spank-hook": "https://hooks.example.com/hunter2"}
    site = {"setup": [*secrets, "module load cuda/12.4"], "sbatch": private, "data_jobs": {"sbatch": private}}
    own = "stages.evaluate.sbatch={spank-pat: hunter2}"
    cfg = config(tmp_path, "stages.train.nodes=2", "stages.train.time=00:20:00", own)
    out = io.StringIO()
    cfg = cfg.model_copy(update={"site": SiteConfig.model_validate(site)})
    print_plan(cfg, "slurm", PlainConsole(file=out, width=80), scripts=True)
    text = out.getvalue()
    assert "hunter2" not in text
    assert text.count("module load cuda/12.4") == 6 and "export WANDB_API_KEY=*****" in text
    assert text.count("#!/bin/bash") == 5 and "--array=0-1%2" in text
    assert re.search(r"^train +2 × 2 = 4 processes, 00:20:00, after shard; requests ", text, re.M)
    assert "sequence_length: 32" in text and "#SBATCH --nice=5" in text
    assert not (tmp_path / "runs").exists()


def planned(config: Config) -> dict[str, str]:
    """What a dry run prints for Slurm: the scripts by their headings."""
    out = io.StringIO()
    print_plan(config, "slurm", PlainConsole(file=out, width=80), scripts=True)
    _, *rest = re.split(r"^# ---- on Slurm: (.*)\n", out.getvalue(), flags=re.M)
    return dict(zip(rest[::2], rest[1::2], strict=True))


def test_a_dry_run_shows_arrays_as_wide_as_they_are_submitted(tmp_path: Path) -> None:
    found = planned(config(tmp_path, "stages.shard.tasks=300"))
    assert options(found["shard"])["array"] == "0-299%300" and "array" not in options(found["train"])
    sweep = "sweep={grid: {optimizer.lr: [0.1, 0.2], run.seed: [1, 2, 3]}, at_most: 4}"
    found = planned(config(tmp_path, sweep, "site.requeue=false"))
    assert {name.partition(",")[0]: options(text).get("array") for name, text in found.items()} == {
        "prepare": None, "shard": None, "train": "0-5%4", "evaluate": "0-5%4",
    }  # fmt: skip
    assert not [name for name in found if "successor" in name]
    with pytest.raises(ConfigError, match=r"point 000 \(optimizer\.lrr=1\)"):
        planned(config(tmp_path, "sweep={grid: {optimizer.lrr: [1]}}"))


def test_a_dry_run_shows_the_successor(tmp_path: Path) -> None:
    found = planned(config(tmp_path, "site.requeue=false"))
    assert (
        found["train, its successor: continues the training if it does not finish"].rstrip() == found["train"].rstrip()
    )
    assert "no-requeue" in options(found["train"]) and len(planned(config(tmp_path))) == len(found) - 1


@pytest.mark.parametrize(("time", "left"), [("00:03:00", "20 s"), ("00:01:00", "0 s"), ("00:04:00", None)])
def test_a_dry_run_says_that_a_time_limit_is_too_short(tmp_path: Path, time: str, left: str | None) -> None:
    out = io.StringIO()
    print_plan(config(tmp_path, f"stages.train.time='{time}'"), "slurm", PlainConsole(file=out, width=200))
    told = re.findall(
        rf"^problem +stages.train.time: {time} is short: .* 90 s before .* leaves (\d+ s)", out.getvalue(), re.M
    )
    assert told == ([left] if left else [])


@pytest.mark.parametrize("stage", ["prepare", "evaluate"])
def test_and_so_for_each_stage_that_gets_the_signal(tmp_path: Path, stage: str) -> None:
    out = io.StringIO()
    print_plan(config(tmp_path, f"stages.{stage}.time='00:01:00'"), "slurm", PlainConsole(file=out, width=200))
    assert re.search(
        rf"^problem +stages.{stage}.time: 00:01:00 is short: .*90 s before .* leaves 0 s", out.getvalue(), re.M
    )


def test_two_ways_to_ask_for_memory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train: mem_gb and sbatch\.mem-per-cpu exclude each other"):
        planned(config(tmp_path, "site.mem_gb=4", "stages.train.sbatch={mem-per-cpu: 1G}"))
    planned(config(tmp_path, "site.mem_gb=4", "site.sbatch={mem-per-cpu: 1G}", "site.sbatch={mem-per-cpu: false}"))


@pytest.mark.parametrize(
    ("complaint", "told"),
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
def test_what_sbatch_complains_about_is_passed_on(complaint: str, told: str) -> None:
    assert _extract_sbatch_reason(complaint) == told


@given(st.text(), st.sampled_from(["API_TOKEN", "db-password", "SSH_KEY", "secret"]), st.sampled_from(["=", ": ", " "]))
@settings(deadline=None, max_examples=100)
def test_no_value_of_a_secret_is_shown(text: str, name: str, between: str) -> None:
    shown = mask_shell_line(f"export {name}{between}<{text}>")
    assert shown == f"export {name}{between}*****"


@pytest.mark.parametrize("line", ["LEAK1abcdef", "EOF", "source login.sh LEAK3hunter2", ". login.sh LEAK", "LE/AK"])
def test_what_may_be_fed_to_a_command_or_is_an_argument_is_masked(line: str) -> None:
    assert "LEAK" not in mask_shell_line(line).replace("/", "") and mask_shell_line(line).endswith("*****")


@pytest.mark.parametrize(
    "override",
    ["site.pass=[TOKEN=hunter2]", "site.pass={TOKEN: hunter2}", "site.secrets=TOKEN=hunter2", "site.secrets=hunter2"],
)
def test_a_value_where_a_name_should_stand_is_not_repeated(tmp_path: Path, override: str) -> None:
    refused(lambda: config(tmp_path, override), override.partition("=")[0], "*****")
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
def test_what_is_no_secret_is_shown(line: str) -> None:
    assert mask_shell_line(line) == line


# -- secrets -------------------------------------------------------------------------------------------------

EXPORTS = "site.setup=[export GH_PAT=hunter2, module load cuda]"


def refused(call: Callable[[], object], *words: str) -> None:
    """It raises UserError with these words, and without the secret."""
    with pytest.raises(UserError) as raised:
        call()
    assert all(word in str(raised.value) for word in words) and "hunter2" not in str(raised.value)


def test_secrets_of_the_setup_stay_where_jobs_need_them(tmp_path: Path) -> None:
    run = Run.create(config(tmp_path, EXPORTS))
    run.apply_overrides(["site.setup=[export GH_PAT=hunter2, export B=hunter2]", "site.sbatch={spank-token: hunter2}"])
    assert Run.open(run.path).config.site.setup[1] == "export B=hunter2", "a job needs it"
    holding = {file.name for file in run.path.glob("*.*") if file.is_file() and b"hunter2" in file.read_bytes()}
    assert holding == {"config.yaml", "changes.jsonl"}
    assert '["export GH_PAT=*****", "export B=*****"]' in run.events_file.read_text()
    others = config(tmp_path, "site.setup=[export GH_PAT=hunter22]", "model.dropout=0.5")
    (run.checkpoints_dir / "step-00000007").mkdir()
    refused(lambda: Run.create(others), "exists with another config", "site.setup: ['export GH_PAT=*****', 'export")


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("site.setup=export GH_PAT=hunter2", '"export GH_PAT=*****" should be a list'),
        ("site.setpu=[curl -u me hunter2]", '["curl *****"]: there is no such key; did you mean setup'),
        ("site.setups=[hunter2]", '["*****"]: there is no such key; did you mean setup'),
        ("site.pasword=hunter2", '"*****": there is no such key; did you mean pass'),
        ("site.secret=hunter2", '"*****": there is no such key; did you mean secrets'),
        ("site.environment=[export A=hunter2]", '["export A=*****"]'),
        ("site.env={A: hunter2}", '{"A": "*****"}'),
        ("site.api_key=hunter2", '"*****": there is no such key'),
        ("site.sbatc={spank-token: hunter2}", '"*****"}: there is no such key; did you mean sbatch'),
        ("sitee={setup: [export A=hunter2]}", "did you mean site"),
        ("stages.train.sbtach={spank-token: hunter2}", "did you mean sbatch"),
        ("site.setup=[{export GH_PAT: hunter2}]", "site.setup.0"),
        ("site..setup=[export GH_PAT=hunter2]", "write section.key=value"),
        ("stages.train.sbatch={spank-token: [hunter2]}", "should be text"),
    ],
)
def test_a_mistake_in_the_setup_is_answered_without_it(tmp_path: Path, override: str, shown: str) -> None:
    refused(lambda: config(tmp_path, override), shown)


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("site.partiton=gpu-long", 'site.partiton: "gpu-long": there is no such key; did you mean partition'),
        ("site.constrant=a100&nvlink", '"a100&nvlink": there is no such key; did you mean constraint'),
        ("site.cpu_per_task=64", "64: there is no such key; did you mean cpus_per_task"),
        ("site.requeu=false", "false: there is no such key; did you mean requeue"),
        ("site.local_dsk=$TMPDIR", '"$TMPDIR": there is no such key; did you mean local_disk'),
        ("site.sbatc={reservation: r1}", '{"reservation": "r1"}: there is no such key; did you mean sbatch'),
        ("site.color=red", '"red": there is no such key'),
        ("site.walltime=01:00:00", '"01:00:00": there is no such key'),
        ("site.preamble=[module load cuda]", '["module load cuda"]: there is no such key'),
    ],
)
def test_a_harmless_value_of_a_key_that_does_not_exist_is_shown(tmp_path: Path, override: str, shown: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(tmp_path, override)
    assert shown in str(raised.value)


def test_who_may_read_the_setup_is_told(tmp_path: Path) -> None:
    assert describe_exposed_setup(config(tmp_path, EXPORTS)) is None
    assert describe_exposed_setup(config(tmp_path, "run.sharing=group", "site.setup=[module load cuda]")) is None
    warning = describe_exposed_setup(config(tmp_path, "run.sharing=group", EXPORTS))
    assert warning and "(export GH_PAT=*****)" in warning and "site.secrets or site.pass" in warning
    command = [sys.executable, str(CODE_ROOT / "submit.py"), "tiny.yaml", "--dry-run", "run.sharing=group", EXPORTS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert warning.removeprefix("warning: ") in done.stdout and "hunter2" not in done.stdout + done.stderr, done.stderr


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """A file with a secret, as it should be; its path needs quotes."""
    file = tmp_path / "my secrets"
    file.write_text("WANDB_API_KEY='hunter2 $x'\n[ -e /nowhere ] && X=1\n")
    file.chmod(0o600)
    return file


def test_a_job_runs_the_secrets_and_its_script_has_none(tmp_path: Path, secrets: Path) -> None:
    text = site_script(tmp_path, {"secrets": str(secrets), "setup": ["export AFTER=$WANDB_API_KEY"]})
    assert "hunter2" not in text and exported(text)["AFTER"] == exported(text)["WANDB_API_KEY"] == "hunter2 $x"
    secrets.write_text("secrets=1\n")
    assert exported(text)["secrets"] == "1" and "sluice_fd" not in exported(text)
    setup = text[text.index("# setup") : text.index("# command")]
    secrets.chmod(0o640)
    done = subprocess.run(["bash", "-c", f"{setup}\necho started"], capture_output=True, text=True, timeout=10)
    assert (done.returncode, done.stdout) == (2, "") and f"chmod 600 {secrets}" in done.stderr


def test_a_job_runs_the_secrets_that_it_checked(tmp_path: Path, secrets: Path) -> None:
    """Whoever may write the folder above can replace the file at any moment: here behind the check."""
    text = site_script(tmp_path, {"secrets": str(secrets)})
    (tmp_path / "theirs").write_text("WANDB_API_KEY=theirs\n")
    (tool := tmp_path / "bin/stat").parent.mkdir()
    tool.write_text(f'#!/bin/sh\n{shutil.which("stat")} "$@"\nmv {tmp_path}/theirs "{secrets}" 2>/dev/null\n:\n')
    tool.chmod(0o755)
    setup = text[text.index("# setup") : text.index("# command")]
    shell = ["bash", "-c", f"PATH={tmp_path}/bin:$PATH\n{setup}\nenv -0"]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=10)
    assert "WANDB_API_KEY=hunter2 $x\0" in done.stdout and done.returncode == 0, done.stderr
    assert secrets.read_text() == "WANDB_API_KEY=theirs\n", "it was replaced"


@pytest.mark.parametrize("what", ["none", "a folder", "a pipe", "not ours", "others can read", "others can write"])
def test_a_job_ends_where_the_secrets_are_not_ours_alone(tmp_path: Path, secrets: Path, what: str) -> None:
    text = site_script(tmp_path, {"secrets": str(secrets)})
    setup = text[text.index("# setup") : text.index("# command")]
    if what in ("none", "a folder", "a pipe"):
        secrets.unlink()
    if what == "a folder":
        secrets.mkdir(mode=0o700)
    elif what == "a pipe":
        os.mkfifo(secrets, 0o600)
    elif what == "not ours":
        os.chown(secrets, 1234, 1234)
    elif what.startswith("others"):
        secrets.chmod(0o604 if what == "others can read" else 0o602)
    done = subprocess.run(["bash", "-c", f"{setup}\necho started"], capture_output=True, text=True, timeout=10)
    assert (done.returncode, done.stdout) == (2, "") and f"chmod 600 {secrets}" in done.stderr
    if what.startswith("others"):  # a link to a file of our own will do, and so will one that nobody can write
        secrets.chmod(0o400)
        secrets.rename(tmp_path / "moved")
        secrets.symlink_to(tmp_path / "moved")
        done = subprocess.run(["bash", "-c", f"{setup}\necho started"], capture_output=True, text=True, timeout=10)
        assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr


def test_secrets_that_others_can_read_are_refused(tmp_path: Path, secrets: Path) -> None:
    site = config(tmp_path, f"site.secrets={secrets}").site
    check_job_environment(site, {})
    secrets.chmod(0o644)
    refused(lambda: check_job_environment(site, {}), str(secrets), "644", "chmod 600")
    secrets.chmod(0o600)
    os.chown(secrets, 1234, 1234)
    refused(lambda: check_job_environment(site, {}), "1234")
    secrets.unlink()
    refused(lambda: check_job_environment(site, {}), str(secrets), "No such file")
    refused(lambda: config(tmp_path, "site.secrets=secrets.sh"), "site.secrets", "absolute path")


@pytest.mark.parametrize(
    ("site", "option"),
    [
        ([], None),
        (["site.pass=[A, B]"], "ALL,A,B"),
        (["site.export=none"], "NONE"),
        (["site.export=none", "site.pass=[A]"], "HOME,PATH,USER,A"),
    ],
)
def test_what_a_job_gets_of_the_submitting_shell(tmp_path: Path, site: list[str], option: str | None) -> None:
    cfg = config(tmp_path, *site)
    assert options(render_batch_script(Run(tmp_path / "runs/tiny"), cfg, "train")).get("export") == option
    assert load_config(Run.create(cfg).config_file).site == cfg.site, "`pass` is a word of Python's"


def test_nothing_is_done_from_a_shell_without_the_variables(tmp_path: Path) -> None:
    """Neither submitted nor resumed; the name is told."""
    wanted = "site.pass=[GH_PAT, WANDB_API_KEY]"
    cfg = config(tmp_path, wanted)
    check_job_environment(cfg.site, {"GH_PAT": "hunter2", "WANDB_API_KEY": "x"})
    refused(lambda: check_job_environment(cfg.site, {"GH_PAT": "hunter2"}), "site.pass: WANDB_API_KEY not set")
    tools = {"scontrol": "echo Slurmctld is UP", "sbatch": f"touch {tmp_path}/asked; exit 1", "squeue": "exit 1"}
    for name, line in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GH_PAT": "hunter2"}
    for words in (["tiny.yaml", wanted], ["resume", "runs/tiny"]):
        command = [sys.executable, str(CODE_ROOT / "submit.py"), *words, "--executor=slurm"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 2 and done.stderr.startswith(
            "error[site.variable_not_set]: site.pass: WANDB_API_KEY not set"
        ), done.stderr
        assert (tmp_path / "runs").exists() == (words[0] == "resume"), "nothing was made"
        run = Run.create(cfg)
    assert [event["event"] for event in read_event_lines(run)] == ["created"] and not (tmp_path / "asked").exists()


def test_a_job_of_ones_own_gets_the_secrets_too(tmp_path: Path, secrets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In salloc, and under the templates, no script of ours ran."""
    for name in ("WANDB_API_KEY", "SLUICE_JOB_ID"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
    monkeypatch.setenv("GH_PAT", "x")
    site = config(tmp_path, f"site.secrets={secrets}", "site.pass=[GH_PAT]").site
    apply_site_environment(site, "5")
    assert os.environ["WANDB_API_KEY"] == "hunter2 $x" and "SLURM_EXPORT_ENV" not in os.environ
    secrets.chmod(0o644)
    refused(lambda: apply_site_environment(site, "5"), "chmod 600")


# -- placement -----------------------------------------------------------------------------------------------


def test_ranks_are_dealt_out_as_srun_does() -> None:
    assert assign_ranks_to_nodes([2, 2, 2, 1], "block") == [0, 0, 1, 1, 2, 2, 3]
    assert assign_ranks_to_nodes([2, 2, 2, 1], "cyclic:block") == [0, 1, 2, 3, 0, 1, 2]
    assert assign_ranks_to_nodes([3, 3], "plane=2") == [0, 0, 1, 1, 0, 1]


@given(st.lists(st.integers(1, 8), min_size=1, max_size=8), st.sampled_from(["block", "cyclic", "plane=2", "plane=3"]))
def test_every_rank_has_a_node_and_no_node_too_many(tasks: list[int], distribution: str) -> None:
    nodes = assign_ranks_to_nodes(tasks, distribution)
    assert [nodes.count(node) for node in range(len(tasks))] == tasks


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.sampled_from([None, "block", "cyclic", "plane=2", "*:cyclic", "CYCLIC,NoPack"]),
)
def test_what_passes_has_each_tensor_group_on_one_node(
    nodes: int, times: int, tensor: int, tasks: list[int], distribution: str | None
) -> None:
    per_node = times * tensor  # pipeline/parallel/mesh.py sees to it
    reason = describe_placement_problem("train", nodes, per_node, tensor, tasks, distribution)
    fits = len(tasks) >= nodes and all(room >= per_node for room in tasks[:nodes])
    place = assign_ranks_to_nodes([per_node] * nodes, distribution or "block")
    groups = [place[first : first + tensor] for first in range(0, len(place), tensor)]
    even = not (distribution or "").startswith("plane") or per_node % 2 == 0
    together = even and all(len(group) == tensor and len(set(group)) == 1 for group in groups)
    if reason is None:
        assert fits and together
    else:
        assert not fits or not together


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((4, 2, 1, [1, 1], None), "4 nodes × 2 ranks, and Slurm granted 2 nodes for 1, 1 tasks: request --nodes=4"),
        ((2, 2, 1, [4, 3], "plane=3"), "planes that do not divide the ranks per node (2)"),
        ((2, 2, 2, [2, 2], "cyclic"), "ranks 0 to 1 on several nodes"),
        ((2, 2, 2, [2, 2], "cyclic"), "--distribution=block (site.distribution)"),
    ],
)  # fmt: skip
def test_a_mismatch_says_how_to_ask(arguments: Any, words: str) -> None:
    assert words in str(describe_placement_problem("train", *arguments))


def test_what_was_granted_is_read_from_the_environment() -> None:
    plane = {"SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "4"}
    assert read_granted_tasks(plane) == ([2, 2, 2, 1], "plane=4")
    assert read_granted_tasks({"SLURM_TASKS_PER_NODE": "8"}) == ([8], "block")
    assert read_granted_tasks({}) is None
    with pytest.raises(UserError, match="SLURM_TASKS_PER_NODE"):
        read_granted_tasks({"SLURM_TASKS_PER_NODE": "two"})


def test_a_torn_placement_is_refused_before_submission(tmp_path: Path) -> None:
    cfg = config(tmp_path, "stages.train.nodes=2", "site.distribution=cyclic")
    torn = cfg.model_copy(update={"parallel": cfg.parallel.model_copy(update={"tensor": 2})})
    run = Run(tmp_path / "runs/tiny")
    assert build_sbatch_parameters(run, cfg, "train", None)["additional_parameters"]["distribution"] == "cyclic"
    with pytest.raises(UserError, match="must share one"):
        build_sbatch_parameters(run, torn, "train", None)
    build_sbatch_parameters(run, torn, "evaluate", None)  # it has no tensor parallel groups


def test_a_mismatch_in_an_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.create(config(tmp_path, "stages.train.nodes=2"))
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2")
    assert "--nodes=2 --ntasks-per-node=2" in str(capacity.find_placement_problem(run, "train", 4))
    assert capacity.find_placement_problem(run, "shard", 2) is None
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x3)")
    assert capacity.find_placement_problem(run, "train", 4) is None
    monkeypatch.delenv("SLURM_TASKS_PER_NODE")
    assert capacity.find_placement_problem(run, "train", 4) is None


# -- doctor --------------------------------------------------------------------------------------------------


DBD = {"AccountingStorageType": "accounting_storage/slurmdbd", "AccountingStorageEnforce": "limits"}


def assess(config: dict[str, str], mpi: list[str] | None = None, **partition: str) -> dict[str, Finding]:
    facts = ClusterFacts(config, [{"PartitionName": "p", "State": "UP", **partition}], {}, mpi or [])
    return {finding.subject: finding for finding in assess_cluster(facts)}


@pytest.mark.parametrize(
    ("config", "what", "verdict", "words"),
    [
        ({"SLURM_VERSION": "20.11.9"}, "Slurm", "note", "22.05"),
        ({"SLURM_VERSION": "24.05.1"}, "Slurm", "ok", "22.05"),
        ({"MaxArraySize": "0"}, "MaxArraySize", "problem", "stages.shard.tasks to 1"),
        ({"MaxJobCount": "200"}, "MaxJobCount", "note", "all users"),
        (DBD, "accounting", "ok", "site.account"),
        ({"PreemptType": "preempt/qos"}, "partition p", "ok", "sacctmgr show qos"),
        ({"PreemptType": "preempt/partition_prio"}, "partition p", "note", "treated with SUSPEND"),
        ({}, "partition p", "ok", "not preempted"),
        ({}, "srun --mpi", "note", "mpirun"),
    ],
)  # fmt: skip
def test_doctor_knows_other_clusters(config: dict[str, str], what: str, verdict: str, words: str) -> None:
    finding = assess(config, PreemptMode="SUSPEND,GANG")[what]
    assert finding.verdict == verdict and words in finding.meaning + finding.fact


@pytest.mark.parametrize(
    ("nodes", "kind", "unseen", "verdict"),
    [(9, "ext4", None, "problem"), (9, "ext4", "", "ok"), (9, "nfs4", "no", "problem"), (9, "lustre", None, "ok"),
     (9, "fuse.sshfs", None, "ok"), (0, "ext4", None, "ok"), (9, "", None, "problem")],
)  # fmt: skip
def test_doctor_judges_file_systems(tmp_path: Path, nodes: int, kind: str, unseen: str | None, verdict: str) -> None:
    assert next(check_file_system(tmp_path, nodes, kind, unseen)).verdict == verdict


@pytest.mark.parametrize(("kind", "shared"), [("lustre", True), ("nfs4", True), ("ext4", False)])
def test_doctor_asks_locks_of_one_machine_only(tmp_path: Path, kind: str, shared: bool) -> None:
    """Lustre's localflock would give the same answer on every node."""
    locks = next(found for found in check_file_system(tmp_path, 9, kind, "") if found.subject == "file locks")
    assert locks.meaning.startswith("on one machine") and ("not localflock" in locks.meaning) == shared


def test_doctor_says_what_a_machine_without_slurm_offers(tmp_path: Path) -> None:
    """torch is asked in a process of its own, never in this one."""
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho 'mpirun (A Kind of MPI) 9.1'\n")
    (tmp_path / "mpirun").chmod(0o755)
    python = tmp_path / "python"  # beside which there is no mpirun
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program = f"import sys, runpy; sys.executable = '{python}'; sys.argv = ['submit.py', 'doctor']\n"
    program += f"sys.path.insert(0, '{CODE_ROOT}'); runpy.run_path('{CODE_ROOT}/submit.py', run_name='__main__')\n"
    python.chmod(0o755)

    def said(*before: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", "\n".join([*before, program])],
            cwd=tmp_path, env={**os.environ, "PATH": "/nowhere", "COLUMNS": "300", **environment},
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0 and not re.search(r"\| +(torch|numpy|mpi4py)$", done.stderr, re.M), done.stderr
        return done.stdout

    shown = said()
    cores = len(os.sched_getaffinity(0))
    for what, words in {
        "CPU cores": f"{cores} of {os.cpu_count()} ", "memory": r"[\d.]+ GB, [\d.]+ GB of it free",
        "torch": rf"{re.escape(version('torch'))}.* built for ", "GPUs": r"\S", "MPI": r"mpirun \(A Kind of MPI\) 9\.1",
        "run.root": re.escape(str(tmp_path)),
    }.items():  # fmt: skip
        assert re.search(rf"^ok +{what} +{words}", shown, re.M), shown
    assert re.search(r"^note +Slurm +no scontrol", shown, re.M) and shown.endswith("0 problems\n")
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so is missing')\n")
    broken = said(PYTHONPATH=str(tmp_path))
    assert re.search(r"^problem +torch +not importable", broken, re.M), broken
    assert broken.endswith("1 problem\n")


def test_submit_without_slurm_still_plans(tmp_path: Path) -> None:
    write_config(tmp_path)
    dry = ["--dry-run", "--scripts", "--executor", "slurm"]
    command = [sys.executable, str(CODE_ROOT / "submit.py"), "tiny.yaml", *dry, "site.scratch=/with space"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PATH": "/nowhere"}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and "export TMPDIR='/with space'" in done.stdout, done.stderr


def test_private_members_of_submitit_were_tested_with_the_installed_version() -> None:
    """`render_script` uses two private members. If this fails, compare the scripts and set TESTED_VERSION."""
    assert submitit.__version__ == submitit_job.TESTED_VERSION
    for name in ("_make_submission_file_text", "_submitit_command_str"):
        assert hasattr(submitit.SlurmExecutor, name)

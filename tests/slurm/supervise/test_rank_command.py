"""Tests of the commands that start ranks in a Slurm job, with `site.python` or in a container (pyxis, apptainer).

Fake programs on PATH record the command lines with which they are called. pyxis and apptainer are not installed, so
the expected command lines follow from their manuals.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.errors import UserError
from pipeline.config.read import ConfigError, load_config
from pipeline.run.directory import Run, create_points
from slurm.query.slurm_commands import cluster_name
from slurm.submit.sbatch import render_batch_script
from slurm.submit.site_environment import check_job_environment, get_job_python
from slurm.supervise import launch
from slurm.supervise.launch import RankLauncher, SrunLauncher, build_rank_command
from tests.support.tiny import write_config

RECORDING_PROGRAM = """#!{python} -S
import json, os, sys
line = json.dumps([sys.argv, {{name: os.environ.get(name) for name in ("PYTHONPATH", "APPTAINERENV_PYTHONPATH")}}])
open({file!r}, "a").write(line + chr(10))
{extra_code}
"""
PYXIS = "site.container={runtime: pyxis, image: 'nvcr.io#nvidia/pytorch:25.06-py3', mounts: ['/data:/in:ro', /more]}"
APPTAINER = "site.container={runtime: apptainer, image: /images/torch.sif, python: /opt/bin/python}"


@pytest.fixture
def calls_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put fake srun, apptainer and mpirun on PATH, and return the file in which they record their calls.

    After recording, mpirun also executes the program in its arguments, once.
    """
    execute_program = "command = sys.argv[3:]\nos.execvp(command[0], command)"
    for name, extra_code in (("srun", ""), ("apptainer", ""), ("mpirun", execute_program)):
        text = RECORDING_PROGRAM.format(python=sys.executable, file=str(tmp_path / "called"), extra_code=extra_code)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", "/opt/module")  # as `module load` sets it
    return tmp_path / "called"


def make_run(folder: Path, *overrides: str) -> Run:
    """Create a run with the overrides in `folder`."""
    return Run.create(load_config(write_config(folder), overrides))


def start_and_read_calls(ranks: RankLauncher, calls_file: Path) -> list[tuple[list[str], dict[str, str | None]]]:
    """Start the ranks, wait until they exit, and return the command line and the environment variables of each call."""
    ranks.start()
    deadline = time.monotonic() + 60
    while ranks.is_running and time.monotonic() < deadline:
        ranks.poll()
        time.sleep(0.01)
    assert not ranks.is_running
    return [tuple(json.loads(line)) for line in calls_file.read_text().splitlines()]


def make_srun_launcher(run: Run, stage: str = "train") -> SrunLauncher:
    """Return a launcher that starts two ranks on one node with srun."""
    return SrunLauncher(run, stage, 2, os.open(run.path, os.O_RDONLY), node_count=1)


def test_srun_starts_ranks_with_the_python_and_options_of_the_site(tmp_path: Path, calls_file: Path) -> None:
    srun_options = "site.srun={cpu-bind: cores, network: job_vni, overlap: true, mem: 0, exact: false}"
    run = make_run(tmp_path, "site.python=/envs/torch", srun_options)
    [(command, variables)] = start_and_read_calls(make_srun_launcher(run), calls_file)
    options = ["--cpu-bind=cores", "--network=job_vni", "--overlap", "--mem=0"]
    assert command[-9:] == [*options, "/envs/torch/bin/python", "-m", "pipeline", "train", str(run.path)]
    assert variables["PYTHONPATH"] == f"{run.code_dir}:/opt/module"
    batch_script = render_batch_script(run, run.config, "train")
    assert "\nexec /envs/torch/bin/python -u -m submitit.core._submit " in batch_script, (
        "the supervisor must use the same Python"
    )


@pytest.mark.parametrize(("stage", "wait_s"), [("train", 60), ("evaluate", 60), ("shard", 0)])
def test_srun_does_not_kill_independent_ranks_after_the_first_one_has_finished(
    tmp_path: Path, calls_file: Path, stage: str, wait_s: int
) -> None:
    """The tasks of shard are independent, so srun waits for all of them without a limit (--wait=0)."""
    [(command, _)] = start_and_read_calls(make_srun_launcher(make_run(tmp_path), stage), calls_file)
    assert f"--wait={wait_s}" in command


@pytest.mark.parametrize(
    ("python", "program"),
    [
        ("/envs/torch", "/envs/torch/bin/python"),
        ("/usr/bin/python3.12", "/usr/bin/python3.12"),
        ("{folder}/python3", "{folder}/python3/bin/python"),
    ],
)
def test_site_python_may_be_a_virtual_environment_or_an_interpreter(tmp_path: Path, python: str, program: str) -> None:
    (tmp_path / "python3").mkdir()
    site = load_config(write_config(tmp_path), [f"site.python={python.format(folder=tmp_path)}"]).site
    assert get_job_python(site) == program.format(folder=tmp_path)


def test_pyxis_starts_ranks_in_an_image(tmp_path: Path, calls_file: Path) -> None:
    """pyxis adds the --container options to srun. The Python of the image is used, not `site.python`."""
    run = make_run(tmp_path, PYXIS, "site.scratch=/local", "site.python=/envs/torch", "site.srun={cpu-bind: cores}")
    [(command, variables)] = start_and_read_calls(make_srun_launcher(run), calls_file)
    mounts = ",".join(f"{path}:{path}" for path in (run.path, run.data_dir, "/local"))
    assert command[command.index("--cpu-bind=cores") :] == [
        "--cpu-bind=cores",
        "--container-image=nvcr.io#nvidia/pytorch:25.06-py3",
        f"--container-mounts={mounts},/data:/in:ro,/more:/more",
        f"--container-workdir={run.code_dir}",
        "--container-env=PYTHONPATH,PYTHONSAFEPATH",
        *("python3", "-m", "pipeline", "train", str(run.path)),
    ]
    assert variables["PYTHONPATH"] == str(run.code_dir), (
        "the PYTHONPATH of the node must not be used, because its folders do not exist in the image"
    )


@pytest.mark.parametrize(("gpus", "stage", "has_nv"), [(2, "train", True), (0, "train", False), (2, "shard", False)])
def test_apptainer_starts_ranks_in_an_image(
    tmp_path: Path, calls_file: Path, gpus: int, stage: str, has_nv: bool
) -> None:
    """The option --nv makes the GPUs available. Only stages that use GPUs have it."""
    run = make_run(tmp_path, APPTAINER, f"site.gpus_per_node={gpus}")
    [(command, variables)] = start_and_read_calls(make_srun_launcher(run, stage), calls_file)
    assert command[command.index("apptainer") :] == [
        *("apptainer", "exec", *["--nv"] * has_nv, f"--bind={run.path}:{run.path},{run.data_dir}:{run.data_dir}"),
        *(f"--pwd={run.code_dir}", "/images/torch.sif", "/opt/bin/python", "-m", "pipeline", stage, str(run.path)),
    ]
    assert variables["PYTHONPATH"] == variables["APPTAINERENV_PYTHONPATH"] == str(run.code_dir)


@pytest.mark.parametrize("container", [PYXIS, APPTAINER])
def test_local_disk_is_mounted_only_on_nodes_that_have_it(
    tmp_path: Path, calls_file: Path, monkeypatch: pytest.MonkeyPatch, container: str
) -> None:
    """Ranks expand the variable in `site.local_disk` in the container, so the container must get its value."""
    disk = tmp_path / "local/7"
    disk.mkdir(parents=True)
    monkeypatch.setenv("TEST_JOB", "7")
    run = make_run(tmp_path, container, f"site.local_disk={tmp_path}/local/${{TEST_JOB}}")
    run_mounts = ",".join(f"{path}:{path}" for path in (run.path, run.data_dir))
    [(command, _)] = start_and_read_calls(make_srun_launcher(run), calls_file)
    rank_command = build_rank_command(run, "train")
    if container == PYXIS:
        assert f"--container-mounts={run_mounts},/data:/in:ro,/more:/more,{disk}:{disk}:nofail" in command
        assert rank_command.variables["TEST_JOB"] == "7"
        assert "--container-env=PYTHONPATH,PYTHONSAFEPATH,TEST_JOB" in command
    else:
        assert rank_command.variables["TEST_JOB"] == rank_command.variables["APPTAINERENV_TEST_JOB"] == "7"
        other_arguments = [
            f"--bind={run_mounts}",
            f"--pwd={run.code_dir}",
            "/images/torch.sif",
            "/opt/bin/python",
            "-m",
            "pipeline",
        ]
        calls_file.unlink()
        for disk_exists in (True, False):
            subprocess.run([*rank_command.program, "-m", "pipeline"], check=True, timeout=60)
            [[_, *arguments], _] = json.loads(calls_file.read_text().splitlines()[-1])
            assert arguments == ["exec", *[f"--bind={disk}:{disk}"] * disk_exists, *other_arguments]
            if disk_exists:
                disk.rmdir()
    monkeypatch.delenv("TEST_JOB")
    assert not any("TEST_JOB" in option for option in build_rank_command(run, "train").srun)


def test_scratch_directory_on_the_local_disk_is_mounted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # as in jobs with site.scratch
    run = make_run(tmp_path, APPTAINER, f"site.scratch={tmp_path}", "site.local_disk=$TMPDIR")
    [bind] = [option for option in build_rank_command(run, "train").program if option.startswith("--bind=")]
    assert bind == f"--bind={run.path}:{run.path},{run.data_dir}:{run.data_dir},{tmp_path}:{tmp_path}"


def test_mpirun_starts_ranks_in_an_image_of_apptainer_but_not_of_pyxis(
    tmp_path: Path, calls_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyxis is a plugin of srun, so mpirun cannot use it. Outside of Slurm, no container is used."""
    monkeypatch.setenv("SLURM_MPI_TYPE", "none")
    monkeypatch.setattr(launch, "build_mpirun_command", lambda *_: (["mpirun", "-n", "2"], {}))
    (tmp_path / "pyxis").mkdir()
    run = make_run(tmp_path, APPTAINER, "parallel.backend=mpi")
    lock = os.open(tmp_path, os.O_RDONLY)
    _, (command, variables) = start_and_read_calls(
        launch.create_mpi_launcher(run, "train", 2, 1, lock, on_slurm=True), calls_file
    )
    assert command[1] == "exec" and command[-5:] == ["/opt/bin/python", "-m", "pipeline", "train", str(run.path)]
    assert variables["PYTHONPATH"] == variables["APPTAINERENV_PYTHONPATH"] == str(run.code_dir)
    local_launcher: Any = launch.create_mpi_launcher(run, "train", 2, 1, lock, on_slurm=False)
    assert local_launcher.rank_command.program == (sys.executable,), "`site` must only apply to Slurm jobs"
    with pytest.raises(UserError) as raised:
        launch.create_mpi_launcher(make_run(tmp_path / "pyxis", PYXIS), "train", 2, 1, lock, on_slurm=True)
    assert raised.value.code == "mpi.no_srun_plugin" and "apptainer" in str(raised.value)


def test_directories_to_which_a_sweep_point_links_are_mounted(tmp_path: Path) -> None:
    sweep = make_run(tmp_path, APPTAINER, "sweep={grid: {run.seed: [1, 2]}}")
    point = create_points(sweep)[0]
    [bind] = [option for option in build_rank_command(point, "train").program if option.startswith("--bind=")]
    assert bind == f"--bind={point.path}:{point.path},{sweep.path}:{sweep.path},{sweep.data_dir}:{sweep.data_dir}"


@pytest.mark.parametrize(
    ("override", "fact"),
    [
        ("site.srun.ntasks=3", "Sluice sets --ntasks itself"),
        ("site.srun.container-image=x", "use site.container"),
        ("site.srun.mpi=pmix", "SLURM_MPI_TYPE"),
        ("site.srun.cpu_bind=cores", "as srun does, without dashes"),
        ("site.container={runtime: docker, image: x}", "one of pyxis, apptainer"),
        ("site.container={runtime: pyxis}", "site.container.image"),
        ("site.container={runtime: pyxis, image: -x}", "site.container.image"),
        ("site.container={runtime: pyxis, image: x, mounts: [here]}", "/OUTSIDE:/INSIDE"),
        ("site.python=python3", "absolute path"),
    ],
)
def test_error_of_an_invalid_key_of_site_names_the_remedy(tmp_path: Path, override: str, fact: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(write_config(tmp_path), [override])
    assert fact in str(raised.value)


def test_path_that_cannot_be_mounted_is_an_error(tmp_path: Path) -> None:
    """Container options separate mounts by commas, so a path must not contain a comma."""
    run = make_run(tmp_path, APPTAINER, f"run.root='{tmp_path}/a,b'")
    with pytest.raises(UserError) as raised:
        build_rank_command(run, "train")
    assert raised.value.code == "site.unmountable_path" and "a,b/tiny" in str(raised.value)


@pytest.mark.parametrize("name", ["SLURM_CLUSTERS", "SBATCH_CLUSTERS"])
def test_variables_that_select_another_cluster_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A cluster name is accepted only if it is that of the cluster of the job."""
    site = load_config(write_config(tmp_path)).site
    for value in ("b", "a,b"):
        with pytest.raises(UserError) as raised:
            check_job_environment(site, {name: value})
        assert raised.value.code == "slurm.other_cluster" and f"{name}={value}" in str(raised.value)
    check_job_environment(site, {name: "a", "SLURM_CLUSTER_NAME": "a"})
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv(name, "b")
    with pytest.raises(UserError) as raised:
        cluster_name()  # Every query of jobs calls this function first.
    assert raised.value.code == "slurm.other_cluster"

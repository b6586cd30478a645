"""What ranks run in, by the command lines that start them: programs in front on PATH write down how they were called.

Neither pyxis nor apptainer is here: that these take what is written down is from their manuals.
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
from pipeline.run.directory import Run
from pipeline.run.points import create_points
from slurm.query.job_states import cluster_name
from slurm.submit.sbatch import render_batch_script
from slurm.submit.site_environment import check_job_environment, get_job_python
from slurm.supervise import launch
from slurm.supervise.launch import RankLauncher, SrunLauncher, build_rank_command
from tests.support.tiny import write_config

RECORD = """#!{python} -S
import json, os, sys
line = json.dumps([sys.argv, {{name: os.environ.get(name) for name in ("PYTHONPATH", "APPTAINERENV_PYTHONPATH")}}])
open({file!r}, "a").write(line + chr(10))
{more}
"""
PYXIS = "site.container={runtime: pyxis, image: 'nvcr.io#nvidia/pytorch:25.06-py3', mounts: ['/data:/in:ro', /more]}"
APPTAINER = "site.container={runtime: apptainer, image: /images/torch.sif, python: /opt/bin/python}"


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that such programs write to. This mpirun then does what it was told, once."""
    on = "words = sys.argv[3:]\nos.execvp(words[0], words)"
    for name, more in (("srun", ""), ("apptainer", ""), ("mpirun", on)):
        text = RECORD.format(python=sys.executable, file=str(tmp_path / "called"), more=more)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", "/a/module's")
    return tmp_path / "called"


def make(folder: Path, *overrides: str) -> Run:
    return Run.create(load_config(write_config(folder), overrides))


def started(ranks: RankLauncher, called: Path) -> list[tuple[list[str], dict[str, str | None]]]:
    """The calls that starting these ranks made: words and variables."""
    ranks.start()
    deadline = time.monotonic() + 60
    while ranks.is_running and time.monotonic() < deadline:
        ranks.poll()
        time.sleep(0.01)
    assert not ranks.is_running
    return [tuple(json.loads(line)) for line in called.read_text().splitlines()]


def srun_ranks(run: Run, stage: str = "train") -> SrunLauncher:
    return SrunLauncher(run, stage, 2, os.open(run.path, os.O_RDONLY), nodes=1)


def test_ranks_start_with_the_sites_python_and_options(tmp_path: Path, called: Path) -> None:
    more = "site.srun={cpu-bind: cores, network: job_vni, overlap: true, mem: 0, exact: false}"
    run = make(tmp_path, "site.python=/envs/torch", more)
    [(words, variables)] = started(srun_ranks(run), called)
    end = ["--cpu-bind=cores", "--network=job_vni", "--overlap", "--mem=0"]
    assert words[-9:] == [*end, "/envs/torch/bin/python", "-m", "pipeline", "train", str(run.path)]
    assert variables["PYTHONPATH"] == f"{run.code_dir}:/a/module's"
    text = render_batch_script(run, run.config, "train")
    assert "\nexec /envs/torch/bin/python -u -m submitit.core._submit " in text, "and so does the supervisor"


@pytest.mark.parametrize(
    ("python", "program"),
    [
        ("/envs/torch", "/envs/torch/bin/python"),
        ("/usr/bin/python3.12", "/usr/bin/python3.12"),
        ("{here}/python3", "{here}/python3/bin/python"),
    ],
)
def test_an_environment_is_told_from_an_interpreter(tmp_path: Path, python: str, program: str) -> None:
    (tmp_path / "python3").mkdir()
    site = load_config(write_config(tmp_path), [f"site.python={python.format(here=tmp_path)}"]).site
    assert get_job_python(site) == program.format(here=tmp_path)


def test_pyxis_starts_ranks_in_an_image(tmp_path: Path, called: Path) -> None:
    run = make(tmp_path, PYXIS, "site.scratch=/local", "site.python=/envs/torch", "site.srun={cpu-bind: cores}")
    [(words, variables)] = started(srun_ranks(run), called)
    mounts = ",".join(f"{path}:{path}" for path in (run.path, run.data_dir, "/local"))
    assert words[words.index("--cpu-bind=cores") :] == [
        "--cpu-bind=cores",
        "--container-image=nvcr.io#nvidia/pytorch:25.06-py3",
        f"--container-mounts={mounts},/data:/in:ro,/more:/more",
        f"--container-workdir={run.code_dir}",
        "--container-env=PYTHONPATH,PYTHONSAFEPATH",
        *("python3", "-m", "pipeline", "train", str(run.path)),
    ]
    assert variables["PYTHONPATH"] == str(run.code_dir), "modules are the node's"


@pytest.mark.parametrize(("gpus", "stage", "nv"), [(2, "train", True), (0, "train", False), (2, "shard", False)])
def test_apptainer_starts_ranks_in_an_image(tmp_path: Path, called: Path, gpus: int, stage: str, nv: bool) -> None:
    run = make(tmp_path, APPTAINER, f"site.gpus_per_node={gpus}")
    [(words, variables)] = started(srun_ranks(run, stage), called)
    assert words[words.index("apptainer") :] == [
        *("apptainer", "exec", *["--nv"] * nv, f"--bind={run.path}:{run.path},{run.data_dir}:{run.data_dir}"),
        *(f"--pwd={run.code_dir}", "/images/torch.sif", "/opt/bin/python", "-m", "pipeline", stage, str(run.path)),
    ]
    assert variables["PYTHONPATH"] == variables["APPTAINERENV_PYTHONPATH"] == str(run.code_dir)


@pytest.mark.parametrize("box", [PYXIS, APPTAINER])
def test_the_nodes_own_disk_is_seen_in_an_image_by_the_same_name(
    tmp_path: Path, called: Path, monkeypatch: pytest.MonkeyPatch, box: str
) -> None:
    """Ranks expand the variable inside: there it must be the job's, whatever the image sets. A mount of what a node
    has not would end the stage; ranks that miss the folder say so and go on."""
    disk = tmp_path / "local/7"
    disk.mkdir(parents=True)
    monkeypatch.setenv("TEST_JOB", "7")
    run = make(tmp_path, box, f"site.local_disk={tmp_path}/local/${{TEST_JOB}}")
    own = ",".join(f"{path}:{path}" for path in (run.path, run.data_dir))
    [(words, _)] = started(srun_ranks(run), called)
    told = build_rank_command(run, "train")
    if box == PYXIS:
        assert f"--container-mounts={own},/data:/in:ro,/more:/more,{disk}:{disk}:nofail" in words
        assert told.variables["TEST_JOB"] == "7" and "--container-env=PYTHONPATH,PYTHONSAFEPATH,TEST_JOB" in words
    else:
        assert told.variables["TEST_JOB"] == told.variables["APPTAINERENV_TEST_JOB"] == "7"
        rest = [f"--bind={own}", f"--pwd={run.code_dir}", "/images/torch.sif", "/opt/bin/python", "-m", "pipeline"]
        called.unlink()
        for there in (True, False):
            subprocess.run([*told.program, "-m", "pipeline"], check=True, timeout=60)
            [[box, *words], _] = json.loads(called.read_text().splitlines()[-1])
            assert words == ["exec", *[f"--bind={disk}:{disk}"] * there, *rest]
            if there:
                disk.rmdir()
    monkeypatch.delenv("TEST_JOB")
    assert not any("TEST_JOB" in word for word in build_rank_command(run, "train").srun)


def test_a_scratch_that_is_the_nodes_disk_is_mounted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # as site.scratch has it in jobs
    run = make(tmp_path, APPTAINER, f"site.scratch={tmp_path}", "site.local_disk=$TMPDIR")
    [bind] = [word for word in build_rank_command(run, "train").program if word.startswith("--bind=")]
    assert bind == f"--bind={run.path}:{run.path},{run.data_dir}:{run.data_dir},{tmp_path}:{tmp_path}"


def test_mpirun_starts_ranks_in_an_image(tmp_path: Path, called: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_MPI_TYPE", "none")
    monkeypatch.setattr(launch, "build_mpirun_command", lambda *_: (["mpirun", "-n", "2"], {}))
    (tmp_path / "pyxis").mkdir()
    run, lock = make(tmp_path, APPTAINER, "parallel.backend=mpi"), os.open(tmp_path, os.O_RDONLY)
    _, (words, variables) = started(launch.create_mpi_launcher(run, "train", 2, 1, lock, on_slurm=True), called)
    assert words[1] == "exec" and words[-5:] == ["/opt/bin/python", "-m", "pipeline", "train", str(run.path)]
    assert variables["PYTHONPATH"] == variables["APPTAINERENV_PYTHONPATH"] == str(run.code_dir)
    here: Any = launch.create_mpi_launcher(run, "train", 2, 1, lock, on_slurm=False)
    assert here.rank_command.program == (sys.executable,), "a site is for its jobs"
    with pytest.raises(UserError) as raised:
        launch.create_mpi_launcher(make(tmp_path / "pyxis", PYXIS), "train", 2, 1, lock, on_slurm=True)
    assert raised.value.code == "mpi.no_srun_plugin" and "apptainer" in str(raised.value)


def test_a_point_of_a_sweep_sees_what_it_links_to(tmp_path: Path) -> None:
    sweep = make(tmp_path, APPTAINER, "sweep={grid: {run.seed: [1, 2]}}")
    point = create_points(sweep)[0]
    [bind] = [word for word in build_rank_command(point, "train").program if word.startswith("--bind=")]
    assert bind == f"--bind={point.path}:{point.path},{sweep.path}:{sweep.path},{sweep.data_dir}:{sweep.data_dir}"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("site.srun.ntasks=3", "Sluice sets --ntasks itself"),
        ("site.srun.container-image=x", "use site.container"),
        ("site.srun.mpi=pmix", "SLURM_MPI_TYPE"),
        ("site.srun.cpu_bind=cores", "as srun does, without dashes"),
        ("site.container={runtime: docker, image: x}", "one of pyxis, apptainer"),
        ("site.container={runtime: pyxis}", "site.container.image is missing"),
        ("site.container={runtime: pyxis, image: -x}", "as the runtime takes it"),
        ("site.container={runtime: pyxis, image: x, mounts: [here]}", "/OUTSIDE:/INSIDE"),
        ("site.python=python3", "absolute path"),
    ],
)
def test_what_a_profile_may_not_say(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(write_config(tmp_path), [override])
    assert words in str(raised.value)


def test_a_path_that_no_mount_can_hold_is_refused(tmp_path: Path) -> None:
    run = make(tmp_path, APPTAINER, f"run.root='{tmp_path}/a,b'")
    with pytest.raises(UserError) as raised:
        build_rank_command(run, "train")
    assert raised.value.code == "site.unmountable_path" and "a,b/tiny" in str(raised.value)


@pytest.mark.parametrize("name", ["SLURM_CLUSTERS", "SBATCH_CLUSTERS"])
def test_other_clusters_are_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    site = load_config(write_config(tmp_path)).site
    for value in ("b", "a,b"):
        with pytest.raises(UserError, match=f"{name}={value}: .* on one cluster"):
            check_job_environment(site, {name: value})
    check_job_environment(site, {name: "a", "SLURM_CLUSTER_NAME": "a"})
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv(name, "b")
    with pytest.raises(UserError, match="log in to"):
        cluster_name()  # whoever looks at jobs asks this first

"""Tests of reading rank, world size and rendezvous from environments of real launchers and from random environments."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.dist_env import (
    RankInfo,
    expand_hostlist,
    make_local_rank_env,
    read_rank_info,
    read_time_limit_s,
)
from pipeline.base.errors import UserError
from pipeline.base.ports import MASTER_PORTS

Env = dict[str, str]

BATCH_ENV: Env = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "n1",
}
"""The environment of a batch script on 2 nodes with 2 tasks each, as Slurm 22.05 sets it."""


def make_srun_env(rank: int, node: int, local_rank: int, **overrides: str) -> Env:
    """Return the environment of task `rank` of step 3, which an srun in the batch script has started."""
    return BATCH_ENV | {
        "SLURM_STEP_ID": "3",
        "SLURM_STEPID": "3",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local_rank),
        "SLURMD_NODENAME": f"n{node + 1}",
        **overrides,
    }


def make_mpirun_daemon_env(node: int) -> Env:
    """Return the environment of an Open MPI daemon on the node with this number in the job, from 1.

    mpirun starts these daemons in an srun step, on all nodes of the job except the first node, which has number 0.
    """
    return make_srun_env(
        rank=node - 1,
        node=node - 1,
        local_rank=0,
        SLURM_STEP_ID="0",
        SLURM_STEP_NODELIST="n2",
        SLURM_STEP_NUM_TASKS="1",
        SLURM_NTASKS="1",
        SLURM_STEP_TASKS_PER_NODE="1",
        SLURM_TASKS_PER_NODE="1",
        SLURMD_NODENAME=f"n{node + 1}",
    )


def make_openmpi_env(rank: int, world_size: int, local_rank: int, local_world_size: int) -> Env:
    """Return the variables that mpirun of Open MPI sets."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(world_size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_world_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(local_rank),
        "PMIX_NAMESPACE": "3158966273",
        "PMIX_RANK": str(rank),
    }


def make_mpich_env(rank: int, world_size: int, local_rank: int, local_world_size: int) -> Env:
    """Return the variables that Hydra, the launcher of MPICH and Intel MPI, sets."""
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(world_size),
        "PMI_FD": "9",
        "MPI_LOCALRANKID": str(local_rank),
        "MPI_LOCALNRANKS": str(local_world_size),
    }


def make_torchrun_env(rank: int, world_size: int, local_rank: int, local_world_size: int, master_host: str) -> Env:
    """Return the variables that torchrun sets."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(rank // local_world_size),
        "GROUP_WORLD_SIZE": str(world_size // local_world_size),
        "MASTER_ADDR": master_host,
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
    }


def get_rank_numbers(rank_info: RankInfo) -> tuple[int, int, int, int]:
    """Return rank, world size, local rank and local world size."""
    return rank_info.rank, rank_info.world_size, rank_info.local_rank, rank_info.local_world_size


def test_process_without_launcher_is_a_single_rank() -> None:
    rank_info = read_rank_info({"HOME": "/root", "MASTER_ADDR": "elsewhere", "WORLD_SIZE": "8"})
    assert rank_info.launcher == "alone" and get_rank_numbers(rank_info) == (0, 1, 0, 1)
    assert rank_info.master_host == "localhost"
    assert rank_info.job_id is None and rank_info.restart_count == 0


@pytest.mark.parametrize(
    "step_id",
    [
        pytest.param(None, id="no step"),
        # constants of Slurm's slurm.h
        pytest.param("4294967290", id="interactive step of salloc"),
        pytest.param("4294967291", id="batch step"),
        pytest.param("4294967292", id="extern step"),
    ],
)
def test_batch_script_and_salloc_shell_are_not_ranks(step_id: str | None) -> None:
    env = BATCH_ENV | ({"SLURM_STEP_ID": step_id} if step_id else {})
    rank_info = read_rank_info(env)
    assert rank_info.launcher == "alone" and get_rank_numbers(rank_info) == (0, 1, 0, 1)
    assert rank_info.job_id == "4711" and rank_info.restart_count == 0


def test_requeued_array_task_has_its_id_and_restart_count() -> None:
    env = BATCH_ENV | {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "0", "SLURM_RESTART_COUNT": "2"}
    rank_info = read_rank_info(env)
    assert rank_info.job_id == "4700_0" and rank_info.restart_count == 2


def test_srun_task_has_rank_and_master() -> None:
    rank_info = read_rank_info(make_srun_env(3, 1, 1, SLURM_RESTART_COUNT="1"))
    assert rank_info.launcher == "srun" and get_rank_numbers(rank_info) == (3, 4, 1, 2)
    assert rank_info.master_host == "n1"
    assert rank_info.job_id == "4711" and rank_info.restart_count == 1


def test_srun_step_on_a_part_of_the_job_has_its_own_world_size_and_master() -> None:
    step = {"SLURM_STEP_NODELIST": "n2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "3"}
    rank_info = read_rank_info(make_srun_env(2, 0, 2, **step))
    assert get_rank_numbers(rank_info) == (2, 3, 2, 3)
    assert rank_info.master_host == "n2"


@pytest.mark.parametrize("plugin", ["pmi2", "pmix", "cray_shasta"])
def test_srun_with_an_mpi_plugin_is_detected_as_srun(plugin: str) -> None:
    """`srun --mpi=PLUGIN` also sets variables of MPI launchers."""
    mpi_variables = {
        "pmi2": {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "7"},
        "pmix": {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.4711.3"},
        "cray_shasta": {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
    }[plugin]
    assert read_rank_info(make_srun_env(3, 1, 1, **mpi_variables)) == read_rank_info(make_srun_env(3, 1, 1))


def test_variables_of_sluice_and_torch_override_the_master() -> None:
    rank_info = read_rank_info(
        make_srun_env(0, 0, 0, MASTER_ADDR="n2", SLUICE_MASTER_HOST="10.0.0.1", MASTER_PORT="1234")
    )
    assert (rank_info.master_host, rank_info.master_port) == ("10.0.0.1", 1234)
    assert read_rank_info(make_srun_env(0, 0, 0, MASTER_ADDR="n2")).master_host == "n2"


def test_torchrun_inside_srun_uses_the_ranks_and_the_master_of_torchrun() -> None:
    rank_info = read_rank_info(make_srun_env(1, 1, 0) | make_torchrun_env(2, 4, 0, 2, "n1"))
    assert rank_info.launcher == "torchrun" and get_rank_numbers(rank_info) == (2, 4, 0, 2)
    assert (rank_info.master_host, rank_info.master_port, rank_info.job_id) == ("n1", 29500, "4711")


def test_mpirun_inside_a_job_has_the_ranks_of_mpirun_and_the_first_node_as_master() -> None:
    """Ranks on the first node inherit the variables of the batch script, other ranks those of the daemons' step.

    Each call of mpirun has its own PMIx namespace. Therefore, two calls in one job use different ports.
    """
    rank_infos = [read_rank_info(BATCH_ENV | make_openmpi_env(rank, 4, rank, 2)) for rank in (0, 1)]
    rank_infos += [
        read_rank_info(make_mpirun_daemon_env(1) | make_openmpi_env(rank, 4, rank - 2, 2)) for rank in (2, 3)
    ]
    assert [get_rank_numbers(rank_info) for rank_info in rank_infos] == [(rank, 4, rank % 2, 2) for rank in range(4)]
    assert {rank_info.launcher for rank_info in rank_infos} == {"openmpi"}
    assert {(rank_info.master_host, rank_info.job_id) for rank_info in rank_infos} == {("n1", "4711")}
    assert len({rank_info.master_port for rank_info in rank_infos}) == 1
    other_mpirun_rank = read_rank_info(BATCH_ENV | make_openmpi_env(0, 4, 0, 2) | {"PMIX_NAMESPACE": "3158966274"})
    assert other_mpirun_rank.master_port != rank_infos[0].master_port


def test_mpirun_with_uneven_nodes_inside_a_job_has_the_ranks_of_mpirun() -> None:
    rank_infos = [read_rank_info(BATCH_ENV | make_openmpi_env(rank, 3, rank, 2)) for rank in (0, 1)] + [
        read_rank_info(make_mpirun_daemon_env(1) | make_openmpi_env(2, 3, 0, 1))
    ]
    assert [get_rank_numbers(rank_info) for rank_info in rank_infos] == [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)]


def test_mpirun_on_one_machine_uses_localhost_as_master() -> None:
    rank_info = read_rank_info(make_openmpi_env(1, 2, 1, 2))
    assert get_rank_numbers(rank_info) == (1, 2, 1, 2) and rank_info.master_host == "localhost"
    # with Open MPI 5, the local rank may differ from the rank also on one machine
    assert get_rank_numbers(read_rank_info(make_openmpi_env(1, 8, 2, 8))) == (1, 8, 2, 8)


@pytest.mark.parametrize("make_env", [make_openmpi_env, make_mpich_env])
def test_mpirun_on_several_machines_without_slurm_needs_master_addr(make_env: Callable[..., Env]) -> None:
    env = make_env(rank=2, world_size=4, local_rank=0, local_world_size=2)
    with pytest.raises(UserError) as raised:
        read_rank_info(env)
    assert raised.value.code == "rank.missing_variable" and "MASTER_ADDR" in str(raised.value)
    rank_info = read_rank_info(env | {"MASTER_ADDR": "a1"})
    assert get_rank_numbers(rank_info) == (2, 4, 0, 2) and rank_info.master_host == "a1"


def test_mpich_inside_a_job_has_the_ranks_of_mpich_and_the_first_node_as_master() -> None:
    """Hydra, the launcher of MPICH, passes the variables of the first node to all ranks, including SLURMD_NODENAME."""
    rank_infos = [read_rank_info(BATCH_ENV | make_mpich_env(rank, 4, rank % 2, 2)) for rank in range(4)]
    assert [get_rank_numbers(rank_info) for rank_info in rank_infos] == [(rank, 4, rank % 2, 2) for rank in range(4)]
    assert {(rank_info.launcher, rank_info.master_host, rank_info.master_port) for rank_info in rank_infos} == {
        ("pmi", "n1", rank_infos[0].master_port)
    }


def test_mpich_in_an_srun_step_has_the_ranks_of_mpich() -> None:
    """Hydra, the launcher of MPICH, starts one process per node with srun. These processes start the ranks."""
    rank_info = read_rank_info(
        make_srun_env(1, 1, 0, SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="1(x2)") | make_mpich_env(3, 4, 1, 2)
    )
    assert rank_info.launcher == "pmi" and get_rank_numbers(rank_info) == (3, 4, 1, 2)


def test_the_variables_of_cray_pals_are_read_without_slurm() -> None:
    pals_env = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
    rank_info = read_rank_info(pals_env)
    assert rank_info.launcher == "pmi" and get_rank_numbers(rank_info) == (1, 2, 1, 2)


@pytest.mark.parametrize(
    "outer_env",
    [{}, BATCH_ENV, make_srun_env(2, 1, 0), make_torchrun_env(0, 2, 0, 2, "x"), make_openmpi_env(0, 2, 0, 2)],
)
def test_the_local_launcher_has_precedence_over_an_outer_launcher(outer_env: Env) -> None:
    rank_info = read_rank_info(outer_env | make_local_rank_env(5, 6, 23456))
    assert rank_info.launcher == "local" and get_rank_numbers(rank_info) == (5, 6, 5, 6)
    assert (rank_info.master_host, rank_info.master_port) == ("127.0.0.1", 23456)


@pytest.mark.parametrize(
    ("env", "code", "expected_texts"),
    [
        ({"RANK": "0"}, "rank.missing_variable", ["WORLD_SIZE"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "rank.missing_variable", ["LOCAL_RANK"]),
        (make_torchrun_env(2, 2, 0, 1, "x"), "rank.contradictory_environment", ["RANK=2", "WORLD_SIZE=2"]),
        (
            make_torchrun_env(0, 2, 0, 2, "x") | {"LOCAL_WORLD_SIZE": "3"},
            "rank.contradictory_environment",
            ["LOCAL_WORLD_SIZE=3", "WORLD_SIZE=2"],
        ),
        (
            make_torchrun_env(0, 2, 0, 2, "x") | {"MASTER_PORT": "70000"},
            "rank.invalid_variable",
            ["MASTER_PORT='70000'", "1 to 65535"],
        ),
        (
            make_openmpi_env(1, 2, 1, 2) | {"OMPI_COMM_WORLD_SIZE": "two"},
            "rank.invalid_variable",
            ["OMPI_COMM_WORLD_SIZE='two'"],
        ),
        (make_mpich_env(0, 1, 0, 1) | {"PMI_RANK": ""}, "rank.missing_variable", ["PMI_RANK"]),
        (make_srun_env(4, 1, 1), "rank.contradictory_environment", ["SLURM_PROCID=4", "SLURM_STEP_NUM_TASKS=4"]),
        (make_srun_env(3, 2, 1), "rank.contradictory_environment", ["SLURM_NODEID=2"]),
        (make_srun_env(3, 1, 2), "rank.contradictory_environment", ["SLURM_LOCALID=2"]),
        (
            make_srun_env(3, 1, 1, SLURM_STEP_NODELIST="n[1-"),
            "slurm.invalid_host_list",
            ["SLURM_STEP_NODELIST='n[1-'"],
        ),
        (
            make_srun_env(3, 1, 1, SLURM_STEP_NODELIST="n1"),
            "rank.contradictory_environment",
            ["SLURM_STEP_NODELIST=n1"],
        ),
        (
            make_srun_env(3, 1, 1, SLURM_STEP_TASKS_PER_NODE="2,3"),
            "rank.contradictory_environment",
            ["SLURM_STEP_TASKS_PER_NODE=2,3"],
        ),
        (make_srun_env(3, 1, 1, SLURM_STEP_TASKS_PER_NODE="2(y2)"), "rank.invalid_variable", ["'2(y2)'"]),
        (make_srun_env(3, 1, 1, SLURM_STEP_ID="x"), "rank.invalid_variable", ["SLURM_STEP_ID='x'"]),
        (BATCH_ENV | {"SLURM_RESTART_COUNT": "-1"}, "rank.invalid_variable", ["SLURM_RESTART_COUNT='-1'"]),
        (BATCH_ENV | {"SLURM_ARRAY_TASK_ID": "1"}, "rank.missing_variable", ["SLURM_ARRAY_JOB_ID"]),
        (
            {"SLUICE_RANK": "1", "SLUICE_WORLD_SIZE": "1"},
            "rank.contradictory_environment",
            ["SLUICE_RANK=1", "SLUICE_WORLD_SIZE=1"],
        ),
    ],
)
def test_error_for_an_invalid_environment_names_its_variables(env: Env, code: str, expected_texts: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        read_rank_info(env)
    assert raised.value.code == code
    assert all(text in str(raised.value) for text in expected_texts)


def test_read_time_limit_s_returns_seconds_or_none_and_rejects_text() -> None:
    assert read_time_limit_s({}) is None
    assert read_time_limit_s({"SLUICE_TIME_LEFT": "90.5"}) == 90.5
    with pytest.raises(UserError) as raised:
        read_time_limit_s({"SLUICE_TIME_LEFT": "soon"})
    assert raised.value.code == "rank.invalid_variable" and "SLUICE_TIME_LEFT='soon'" in str(raised.value)


def test_importing_dist_env_imports_no_large_package() -> None:
    large_packages = ("torch", "numpy", "h5py", "pydantic")
    code = f"import sys, pipeline.base.dist_env; print([name for name in {large_packages} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert result.stdout.strip() == "[]"


# -- host lists ----------------------------------------------------------------------------------------------


def test_expand_hostlist_returns_the_hosts_in_order() -> None:
    assert expand_hostlist("n[1-3,07-09],login2,rack[1-2]n[0-1]-ib") == [
        *("n1", "n2", "n3", "n07", "n08", "n09", "login2"),
        *("rack1n0-ib", "rack1n1-ib", "rack2n0-ib", "rack2n1-ib"),
    ]
    assert expand_hostlist("n[098-101]") == ["n098", "n099", "n100", "n101"]
    assert expand_hostlist("n[8-11]") == ["n8", "n9", "n10", "n11"]


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "n[", "n[]", "n[1", "n1]", "n[3-1]", "n[1,3-1]", "n[a-b]", "n[1,,2]", "a b", "n[1-]"]
)
def test_a_malformed_host_list_is_an_error(text: str) -> None:
    with pytest.raises(UserError) as raised:
        expand_hostlist(text)
    assert raised.value.code == "slurm.invalid_host_list"


def test_a_huge_host_list_is_rejected_quickly() -> None:
    """At most 65,536 hosts are allowed. The last text is a long name with a syntax error at its end."""
    for text in ("n[1-999999999]", "n[1-9999]m[1-9999]", "n[1-65536],m", "n" * 5000 + "["):
        with pytest.raises(UserError) as raised:
            expand_hostlist(text)
        assert raised.value.code == "slurm.invalid_host_list"


def format_hostlist(hosts: list[tuple[str, str]]) -> str:
    """Return host names (prefix, number) as a Slurm host list. Consecutive numbers of one width become ranges."""
    prefix_groups: list[tuple[str, list[list[str]]]] = []  # prefix, and ranges of consecutive numbers
    for prefix, number in hosts:
        if not prefix_groups or prefix_groups[-1][0] != prefix:
            prefix_groups.append((prefix, []))
        ranges = prefix_groups[-1][1]
        if ranges and len(ranges[-1][-1]) == len(number) and int(ranges[-1][-1]) + 1 == int(number):
            ranges[-1].append(number)
        else:
            ranges.append([number])

    def format_range(numbers: list[str]) -> str:
        """Return consecutive numbers as `FIRST-LAST`, or as `FIRST` if there is only one."""
        return numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"

    return ",".join(f"{prefix}[{','.join(map(format_range, ranges))}]" for prefix, ranges in prefix_groups)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["n", "rack1-n", "gpu_", "x."]), st.integers(0, 120), st.integers(1, 4), st.integers(1, 9)
        ),
        min_size=1,
        max_size=6,
    )
)
def test_expand_hostlist_is_the_inverse_of_format_hostlist(ranges: list[tuple[str, int, int, int]]) -> None:
    """Each range has a prefix, the first number, the number of digits and the number of hosts."""
    hosts = [
        (prefix, f"{n:0{digits}d}") for prefix, start, digits, count in ranges for n in range(start, start + count)
    ]
    assert expand_hostlist(format_hostlist(hosts)) == [prefix + number for prefix, number in hosts]


# -- properties ----------------------------------------------------------------------------------------------


def format_tasks_per_node(counts: list[int]) -> str:
    """Return the tasks per node in the format of Slurm: `2(x3),1` for [2, 2, 2, 1]."""
    changes = [node for node, (previous, count) in enumerate(pairwise(counts), 1) if previous != count]
    bounds = pairwise([0, *changes, len(counts)])
    return ",".join(
        f"{counts[start]}(x{end - start})" if end - start > 1 else str(counts[start]) for start, end in bounds
    )


@settings(max_examples=100)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_ranks_are_correct_with_uneven_tasks_per_node(counts: list[int]) -> None:
    """`counts` are the tasks per node. Each task reads its rank and local rank; all read the same rendezvous."""
    world_size = sum(counts)
    env = BATCH_ENV | {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_TASKS_PER_NODE": format_tasks_per_node(counts),
        "SLURM_STEP_NUM_TASKS": str(world_size),
        "SLURM_STEP_NODELIST": f"n[1-{len(counts)}]",
    }
    positions = [(node, local_rank) for node, count in enumerate(counts) for local_rank in range(count)]
    rank_infos = []
    for rank, (node, local_rank) in enumerate(positions):
        task = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local_rank)}
        rank_infos.append(read_rank_info(env | task))
        assert get_rank_numbers(rank_infos[-1]) == (rank, world_size, local_rank, counts[node])
    assert len({(rank_info.master_host, rank_info.master_port) for rank_info in rank_infos}) == 1


@settings(max_examples=100)
@given(st.integers(1, 2**31), st.integers(0, 40), st.integers(0, 40), st.integers(0, 1000))
def test_port_is_the_same_for_all_ranks_and_differs_after_a_restart(
    job_id: int, restarts: int, other_restarts: int, step_id: int
) -> None:
    def get_port(restart_count: int) -> int:
        """Return the port of the first and the last rank after this many restarts. They must be the same."""
        job = {
            "SLURM_JOB_ID": str(job_id),
            "SLURM_RESTART_COUNT": str(restart_count),
            "SLURM_STEP_ID": str(step_id),
        }
        first_rank = read_rank_info(make_srun_env(0, 0, 0, **job))
        last_rank = read_rank_info(make_srun_env(3, 1, 1, **job))
        assert first_rank.master_port == last_rank.master_port
        return first_rank.master_port

    port = get_port(restarts)
    assert port in MASTER_PORTS and 20_000 <= port <= 29_999
    assert (port == get_port(other_restarts)) == (restarts == other_restarts)


def test_ports_of_different_jobs_and_steps_rarely_collide() -> None:
    """Of 100 ports, which are derived from a hash, more than 90 must be different."""
    ports = {
        read_rank_info(make_srun_env(0, 0, 0, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step))).master_port
        for job in range(1, 11)
        for step in range(10)
    }
    assert len(ports) > 90


LAUNCHER_VARIABLES = sorted(
    {
        *make_srun_env(0, 0, 0),
        *make_openmpi_env(0, 1, 0, 1),
        *make_mpich_env(0, 1, 0, 1),
        *make_torchrun_env(0, 1, 0, 1, "x"),
    }
    | {*make_local_rank_env(0, 1, 1), "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"}
    | {"SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "SLUICE_TIME_LEFT"}
)
"""All variables that `read_rank_info` and `read_time_limit_s` may read."""
RANDOM_VALUES = st.one_of(
    st.integers(-2, 5).map(str),
    # among others, the ID of a batch step, texts that int() accepts but Slurm does not write ("1_0", " 1" and an Arabic
    # digit), and numbers that are too large
    st.sampled_from(["", "n[1-2]", "2(x2)", "4294967291", "1_0", " 1", "٣", "9" * 19, "9" * 5000]),
    st.text(max_size=6),
)


@settings(max_examples=500)
@given(st.dictionaries(st.sampled_from(LAUNCHER_VARIABLES), RANDOM_VALUES, max_size=20))
def test_any_environment_is_valid_or_a_user_error(env: Env) -> None:
    try:
        rank_info = read_rank_info(env)
        read_time_limit_s(env)
    except UserError as error:
        assert str(error)
        return
    assert 0 <= rank_info.rank < rank_info.world_size
    assert 0 <= rank_info.local_rank < rank_info.local_world_size <= rank_info.world_size
    assert rank_info.master_host
    assert 1 <= rank_info.master_port <= 65535
    assert rank_info.restart_count >= 0


@settings(max_examples=200)
@given(st.text(alphabet="na0129[],-", max_size=20))
def test_any_text_is_a_hostlist_or_a_user_error(text: str) -> None:
    try:
        hosts = expand_hostlist(text)
    except UserError:
        return
    assert hosts and all(host and not set(host) & set("[],") for host in hosts)

"""Tests of the assignment of visible GPUs to ranks. tests/train/test_fake_gpu.py tests it with fake GPUs."""

from __future__ import annotations

import pytest

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import NodeError, UserError
from pipeline.comm.groups import VisibleGpus, assign_gpus
from tests.support.ranks import run_ranks

A, B, C, D = "GPU-a", "GPU-b", "GPU-c", "GPU-d"  # UUIDs of GPUs


def make_node(*uuids_by_rank: list[str], host: str = "n1") -> list[VisibleGpus]:
    """Return the visible GPUs of the local ranks of a node."""
    return [VisibleGpus(host, local_rank, uuids) for local_rank, uuids in enumerate(uuids_by_rank)]


@pytest.mark.parametrize(
    ("ranks", "expected_indices"),
    [
        pytest.param(make_node([A, B, C, D], [A, B, C, D]), [0, 1], id="all ranks see all GPUs"),
        pytest.param(make_node([A], [B]), [0, 0], id="each rank sees one GPU"),
        pytest.param(make_node([A, B], [C, D], [A, B], [C, D]), [0, 0, 1, 1], id="ranks alternate between sockets"),
        pytest.param(make_node([A, B], [A, B], [C, D], [C, D]), [0, 1, 0, 1], id="consecutive ranks share a socket"),
        pytest.param(make_node([A, B], [A]), [1, 0], id="ranks that see fewer GPUs choose first"),
        pytest.param(
            [VisibleGpus("n1", 1, [A, B]), VisibleGpus("n1", 0, [A, B])],
            [1, 0],
            id="local ranks in the order of Open MPI",
        ),
        pytest.param([*make_node([A]), *make_node([A], host="n2")], [0, 0], id="two hosts with equal GPU names"),
        pytest.param(make_node([], []), [None, None], id="no GPUs"),
    ],
)
def test_exclusive_ranks_get_different_gpus(ranks: list[VisibleGpus], expected_indices: list[int | None]) -> None:
    """A GPU is given as its index among the visible GPUs of the rank."""
    assert assign_gpus(ranks, exclusive=True) == expected_indices


def test_ranks_that_may_share_gpus_are_distributed_evenly() -> None:
    assert assign_gpus(make_node(*[[A, B]] * 5), exclusive=False) == [0, 1, 0, 1, 0]
    assert assign_gpus(make_node([A], []), exclusive=False) == [0, None]


@pytest.mark.parametrize(
    ("ranks", "expected_texts"),
    [
        (make_node([A, B], [A, B], [A, B]), ["ranks 0, 2 on n1", A, "stages.*.tasks_per_node"]),
        (make_node([A], [A]), ["ranks 0, 1 on n1", A, "2 ranks", "1 GPU in all"]),
        (make_node([A], [A], [B]), ["ranks 0, 1 on n1", A, "stages.*.tasks_per_node"]),
        (make_node([A], [A], [B, C]), ["ranks 0, 1 on n1", A, "3 GPUs in all", "site.srun: {gpu-bind: none}"]),
    ],
)
def test_assignment_fails_if_exclusive_ranks_would_share_a_gpu(
    ranks: list[VisibleGpus], expected_texts: list[str]
) -> None:
    with pytest.raises(UserError) as raised:
        assign_gpus(ranks, exclusive=True)
    assert raised.value.code == "parallel.shared_gpu"
    assert [expected_text for expected_text in expected_texts if expected_text not in str(raised.value)] == []


def test_a_node_without_gpus_is_an_error_of_that_node() -> None:
    with pytest.raises(NodeError) as raised:
        assign_gpus([*make_node([A, B]), *make_node([], host="n2")], exclusive=True)
    assert (raised.value.code, raised.value.host) == ("node.no_gpu", "n2")
    assert "rank 1" in str(raised.value) and "2 on n1" in str(raised.value)


def join_with_one_gpu(rank_info: RankInfo) -> tuple[str, str]:
    """Join a process group whose two ranks see the same single GPU. Return the exit code and the error code."""
    from pipeline.comm import groups
    from tests.support.tiny_training import tiny_config

    groups.read_visible_gpus = lambda rank_info: VisibleGpus("n1", rank_info.local_rank, [A])
    try:
        groups.join_process_group(rank_info, tiny_config(2))
    except UserError as error:
        return error.exit_code.name, error.code
    return "joined", ""


def test_all_ranks_report_a_shared_gpu_before_nccl_starts() -> None:
    assert run_ranks(2, join_with_one_gpu) == [("USER_ERROR", "parallel.shared_gpu")] * 2

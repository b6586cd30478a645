"""Assignment of GPUs to ranks from what they see: a pure function. tests/train/test_fake_gpu.py runs it for real."""

from __future__ import annotations

import pytest

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import NodeError, UserError
from pipeline.comm.groups import VisibleGpus, assign_gpus
from tests.support.ranks import run_ranks

A, B, C, D = "GPU-a", "GPU-b", "GPU-c", "GPU-d"


def node(*gpus: list[str], host: str = "n1") -> list[VisibleGpus]:
    return [VisibleGpus(host, local_rank, uuids) for local_rank, uuids in enumerate(gpus)]


@pytest.mark.parametrize(
    ("ranks", "assigned"),
    [
        pytest.param(node([A, B, C, D], [A, B, C, D]), [0, 1], id="all see all GPUs: by local rank"),
        pytest.param(node([A], [B]), [0, 0], id="each sees one GPU"),
        pytest.param(node([A, B], [C, D], [A, B], [C, D]), [0, 0, 1, 1], id="sockets in turn"),
        pytest.param(node([A, B], [A, B], [C, D], [C, D]), [0, 1, 0, 1], id="sockets in blocks"),
        pytest.param(node([A, B], [A]), [1, 0], id="ranks that see fewer GPUs choose first"),
        pytest.param(
            [VisibleGpus("n1", 1, [A, B]), VisibleGpus("n1", 0, [A, B])], [1, 0], id="Open MPI's order of local ranks"
        ),
        pytest.param([*node([A]), *node([A], host="n2")], [0, 0], id="two hosts with the same names"),
        pytest.param(node([], []), [None, None], id="no GPUs"),
    ],
)
def test_no_two_ranks_share_a_gpu(ranks: list[VisibleGpus], assigned: list[int | None]) -> None:
    assert assign_gpus(ranks, exclusive=True) == assigned


def test_ranks_that_may_share_gpus_are_distributed_evenly() -> None:
    assert assign_gpus(node(*[[A, B]] * 5), exclusive=False) == [0, 1, 0, 1, 0]
    assert assign_gpus(node([A], []), exclusive=False) == [0, None]


@pytest.mark.parametrize(
    ("ranks", "facts"),
    [
        (node([A, B], [A, B], [A, B]), ["ranks 0, 2 on n1", A, "stages.*.tasks_per_node"]),
        (node([A], [A]), ["ranks 0, 1 on n1", A, "2 ranks", "1 in all"]),
        (node([A], [A], [B]), ["ranks 0, 1 on n1", A, "stages.*.tasks_per_node"]),
        (node([A], [A], [B, C]), ["ranks 0, 1 on n1", A, "3 in all", "site.srun: {gpu-bind: none}"]),
    ],
)
def test_nccl_ranks_that_would_share_a_gpu_are_named(ranks: list[VisibleGpus], facts: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        assign_gpus(ranks, exclusive=True)
    assert raised.value.code == "parallel.shared_gpu"
    assert [fact for fact in facts if fact not in str(raised.value)] == []


def test_a_node_without_gpus_is_a_bad_node() -> None:
    with pytest.raises(NodeError) as raised:
        assign_gpus([*node([A, B]), *node([], host="n2")], exclusive=True)
    assert (raised.value.code, raised.value.host) == ("node.no_gpu", "n2")
    assert "rank 1" in str(raised.value) and "2 on n1" in str(raised.value)


def join_with_one_gpu(rank_info: RankInfo) -> tuple[str, str]:
    """Return the exit code and the error code of an NCCL rank if both ranks see the same single GPU."""
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

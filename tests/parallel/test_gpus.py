"""Which GPU each rank gets, from what ranks see: a pure function. tests/train/test_fake_gpu.py has the real way."""

from __future__ import annotations

import pytest

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import NodeError, UserError
from pipeline.comm.gpu_assignment import VisibleGpus, assign_gpus
from tests.support.ranks import run_ranks

A, B, C, D = "GPU-a", "GPU-b", "GPU-c", "GPU-d"


def node(*gpus: list[str], host: str = "n1") -> list[VisibleGpus]:
    return [VisibleGpus(host, local_rank, uuids) for local_rank, uuids in enumerate(gpus)]


@pytest.mark.parametrize(
    ("everyone", "chosen"),
    [
        pytest.param(node([A, B, C, D], [A, B, C, D]), [0, 1], id="all see all: by local rank"),
        pytest.param(node([A], [B]), [0, 0], id="each sees its own"),
        pytest.param(node([A, B], [C, D], [A, B], [C, D]), [0, 0, 1, 1], id="sockets in turn"),
        pytest.param(node([A, B], [A, B], [C, D], [C, D]), [0, 1, 0, 1], id="sockets in blocks"),
        pytest.param(node([A, B], [A]), [1, 0], id="who sees less chooses first"),
        pytest.param(
            [VisibleGpus("n1", 1, [A, B]), VisibleGpus("n1", 0, [A, B])], [1, 0], id="Open MPI's order of local ranks"
        ),
        pytest.param([*node([A]), *node([A], host="n2")], [0, 0], id="two hosts with the same names"),
        pytest.param(node([], []), [None, None], id="no GPUs"),
    ],
)
def test_no_two_ranks_get_one_gpu(everyone: list[VisibleGpus], chosen: list[int | None]) -> None:
    assert assign_gpus(everyone, alone=True) == chosen


def test_ranks_that_may_share_do_it_evenly() -> None:
    assert assign_gpus(node(*[[A, B]] * 5), alone=False) == [0, 1, 0, 1, 0]
    assert assign_gpus(node([A], []), alone=False) == [0, None]


@pytest.mark.parametrize(
    ("everyone", "words"),
    [
        (node([A, B], [A, B], [A, B]), "ranks 0, 2 on n1 would share GPU GPU-a.* lower stages.*tasks_per_node, raise"),
        (node([A], [A]), "ranks 0, 1 on n1 would share GPU GPU-a.*2 ranks run there and see 1 in all"),
        (node([A], [A], [B]), "ranks 0, 1 .*GPU-a.* lower stages"),
        (node([A], [A], [B, C]), "ranks 0, 1 .*GPU-a.*see 3 in all: .*site.srun: {gpu-bind: none}"),
    ],
)
def test_ranks_of_nccl_on_one_gpu_are_named(everyone: list[VisibleGpus], words: str) -> None:
    with pytest.raises(UserError, match=words):
        assign_gpus(everyone, alone=True)


def test_a_node_without_its_gpus_is_a_bad_node() -> None:
    with pytest.raises(NodeError, match=r"n2: torch sees no GPU there \(rank 1\), but 2 on n1") as caught:
        assign_gpus([*node([A, B]), *node([], host="n2")], alone=True)
    assert caught.value.host == "n2"


def shared_rank(place: RankInfo) -> str:
    """What a rank of NCCL says where both see the same single GPU."""
    import pipeline.comm.gpu_assignment as gpus
    from pipeline.comm import groups
    from tests.support.layouts import tiny_config

    gpus.read_visible_gpus = lambda place: VisibleGpus("n1", place.local_rank, [A])
    try:
        groups.join_process_group(place, tiny_config(2))
    except UserError as error:
        return f"{error.exit_code.name}: {error}"
    return "joined"


def test_all_ranks_say_it_before_nccl_starts() -> None:
    first, second = run_ranks(2, shared_rank)
    assert first == second and first.startswith("USER_ERROR: ranks 0, 1 on n1 would share GPU GPU-a"), first

"""Gradient hooks and local SGD against plain references that play all replicas in one process; what resumes keep."""

from __future__ import annotations

import signal
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.config.sections import Config
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, make_run
from tests.support.tiny_training import VOCAB, make_batches, tiny_config
from tests.train.test_exact import interrupt_training, new_run, read_steps

STEPS = 5
PIECE = 999
"""Fewer elements than most parameters have, and no divisor of them."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("data")).data_dir


def config_of(ranks: int, clip: float | None = None, **parallel: Any) -> Config:
    """A config whose optimizer does not turn the last digits of tiny gradients into steps."""
    return tiny_config(
        ranks,
        parallel=parallel,
        train={"steps": 10, "global_batch": 12, "micro_batch": 2},
        optimizer={"lr": 1e-2, "eps": 1e-2, "clip_norm": clip},
        model={"dim": 32, "layers": 2},
    )


def create_engine(rank_info: RankInfo, config: Config) -> Any:
    """An engine whose gradients travel in many small buckets."""
    import torch.distributed as dist

    from pipeline.comm import groups
    from pipeline.model.task import DecoderTask
    from pipeline.parallel import data_parallel
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train.engine import Engine

    world = groups.World(rank_info.rank, rank_info.world_size, __import__("torch").device("cpu"), "gloo")
    if not dist.is_initialized():
        groups.configure_determinism(config)
        world = groups.join_process_group(rank_info, config)
        whole = data_parallel.wrap_with_ddp
        data_parallel.wrap_with_ddp = lambda model, device, bucket_mb: whole(model, device, 0.02)  # type: ignore[arg-type]
    layout = resolve_layout(config, world.size, rank_info.local_world_size, VOCAB)
    return Engine(config, layout, world, DecoderTask(config, VOCAB))


def plain(value: Any) -> Any:
    """Tensors as arrays, which travel between processes by value."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.numpy() if hasattr(value, "numpy") else value


def hooked_rank(rank_info: RankInfo, config: Config) -> dict[str, Any]:
    """What one replica has after STEPS steps, and the reduced gradients of each."""
    engine, limit = create_engine(rank_info, config), config.optimizer.clip_norm
    reduced = []
    for step, batch in list(enumerate(make_batches(config), 1))[:STEPS]:
        engine.backward({"tokens": batch.chunk(rank_info.world_size)[rank_info.rank]}, step)
        names = {parameter: name for name, parameter in engine.parts[0].named_weights()}
        reduced.append({name: parameter.grad.clone() for parameter, name in names.items()})
        norm = engine.clip_gradients(limit).item()
        assert limit is None or norm > limit
        engine.update_weights(norm)
    state = {name: tensor.clone() for name, tensor in engine.state_dict().items() if name.startswith("model.")}
    return plain({"state": state, "reduced": reduced, "residual": getattr(engine.replica_sync, "residual", {})})


def reference_rank(rank_info: RankInfo, config: Config, replicas: int) -> dict[str, Any]:
    """The same in one process that plays all replicas, each algorithm written out on whole tensors."""
    import torch

    from pipeline.model.decoder import cross_entropy_sum
    from pipeline.parallel.replica_sync import _sample_matrix

    alone = config.model_copy(update={"parallel": config_of(1).parallel})
    engine, hook = create_engine(rank_info, alone), config.parallel.hook
    weights = dict(engine.parts[0].named_weights())
    residual = [{name: torch.zeros_like(p) for name, p in weights.items()} for _ in range(replicas)]
    begin = {
        n: _sample_matrix(p[0].numel(), hook.rank, f"{config.run.seed}/{n}") for n, p in weights.items() if p.ndim > 1
    }
    reduced, means = [], []
    for step, batch in list(enumerate(make_batches(config), 1))[:STEPS]:
        gradients: list[dict[str, Any]] = []
        for part in batch.chunk(replicas):
            for micro in part.split(2):
                loss = cross_entropy_sum(engine.model(micro[:, :-1]), micro[:, 1:])
                (loss * replicas / (batch.shape[0] * (batch.shape[1] - 1))).backward()
            gradients.append({name: p.grad.clone() for name, p in weights.items() if p.grad is not None})
            engine.optimizer.zero_grad()
        means.append({name: sum(g[name] for g in gradients) / replicas for name in weights})
        result = {}
        for name, parameter in weights.items():
            own = [g[name] / replicas + r[name] for g, r in zip(gradients, residual, strict=True)]
            if hook.kind in ("fp16", "bf16"):
                kind = torch.float16 if hook.kind == "fp16" else torch.bfloat16
                result[name] = sum((g[name] / replicas).to(kind) for g in gradients).float()
                continue
            sent = []
            warm = hook.warmup_steps
            if hook.kind == "topk":
                fraction = hook.ratio ** min(1, (step - 1) / warm) if warm else hook.ratio
                for values in own:
                    count = -int(-fraction * values.numel() // 1)
                    least = values.abs().flatten().sort(descending=True).values[count - 1]
                    sent.append(values * (values.abs() >= least))
            elif parameter.ndim > 1 and step > warm and sum(parameter.shape) * hook.rank < parameter.numel():
                total = sum(own)
                P = torch.linalg.qr(total.double() @ begin[name].double()).Q
                begin[name] = (total.double().T @ P).float()
                sent = [(P @ (P.T @ values.double())).float() for values in own]
            else:
                sent = own
            result[name] = sum(sent)
            for r, values, out in zip(residual, own, sent, strict=True):
                r[name] = values - out
        for name, parameter in weights.items():
            parameter.grad = result[name].clone()
        reduced.append(result)
        if config.optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(weights.values(), config.optimizer.clip_norm)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    state = {f"model.{name}": p.detach().clone() for name, p in weights.items()}
    return plain({"state": state, "reduced": reduced, "residual": residual, "means": means})


CLIPPED = ("topk_warmup", "nesterov", "warm-up")
HOOKS = {
    "bf16": (2, {"kind": "bf16"}),
    "fp16": (2, {"kind": "fp16"}),
    "topk": (3, {"kind": "topk", "ratio": 0.04}),
    "topk_warmup": (2, {"kind": "topk", "ratio": 0.02, "warmup_steps": 3}),
    "powersgd": (3, {"kind": "powersgd", "rank": 3, "warmup_steps": 1}),
}


@pytest.mark.parametrize("case", list(HOOKS))
def test_hooks_do_what_a_plain_reference_does(case: str) -> None:
    replicas, hook = HOOKS[case]
    config = config_of(replicas, 0.1 if case in CLIPPED else None, hook=hook)
    found = run_ranks(replicas, hooked_rank, config)
    expected = run_ranks(1, reference_rank, config, replicas)[0]
    for name, tensor in expected["state"].items():
        for rank in range(replicas):
            assert abs(found[rank]["state"][name] - tensor).max() <= 1e-6, (name, rank)
            assert np.array_equal(found[rank]["state"][name], found[0]["state"][name]), (
                "all replicas have the same bits"
            )
    for step, gradients in enumerate(expected["reduced"]):
        for name, tensor in gradients.items():
            assert abs(found[0]["reduced"][step][name] - tensor).max() <= 1e-6, (step, name)
    if not found[0]["residual"]:
        return
    assert sum(abs(r["residual"][name]).sum() for r in found for name in r["residual"]) > 1e-3
    for name in found[0]["residual"]:
        for rank in range(replicas):
            assert abs(found[rank]["residual"][name] - expected["residual"][rank][name]).max() <= 1e-6
        # nothing is lost: what was sent and what is left are all gradients there were
        sent = sum(gradients[name] for gradients in found[0]["reduced"])
        left = sum(rank["residual"][name] for rank in found)
        assert abs(sent + left - sum(mean[name] for mean in expected["means"])).max() <= 1e-6


def local_rank(rank_info: RankInfo, config: Config) -> dict[str, Any]:
    """What one replica has after STEPS steps and would save; averages are taken in pieces."""
    import torch.distributed as dist

    from pipeline.parallel import replica_sync

    engine, all_reduce = create_engine(rank_info, config), dist.all_reduce
    replica_sync.MAX_REDUCED_ELEMENTS = PIECE

    def bounded(tensor: Any, *arguments: Any, **options: Any) -> Any:
        assert tensor.numel() <= PIECE
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = bounded
    for step, batch in list(enumerate(make_batches(config), 1))[:STEPS]:
        engine.backward({"tokens": batch.chunk(rank_info.world_size)[rank_info.rank]}, step)
        norm = engine.clip_gradients(config.optimizer.clip_norm).item()
        engine.update_weights(norm)
    mine = {name: tensor.clone() for name, tensor in engine.state_dict().items() if name.startswith("model.")}
    return plain({"state": mine, "norm": norm, "saved": engine.checkpoint_state()[0]})


def local_reference_rank(rank_info: RankInfo, config: Config, replicas: int) -> dict[str, Any]:
    """Each replica alone on its part of each batch; torch's own SGD as the outer optimizer."""
    import torch

    from pipeline.model.decoder import cross_entropy_sum

    local = config.parallel.local_sgd
    assert local is not None
    alone = config.model_copy(update={"parallel": config_of(1).parallel})
    engines = [create_engine(rank_info, alone) for _ in range(replicas)]
    weights = [list(engine.parts[0].parameters()) for engine in engines]
    at = [p.detach().clone() for p in weights[0]]
    outer = torch.optim.SGD(at, local.outer_lr, local.outer_momentum, nesterov=local.outer_momentum > 0)
    for step, batch in list(enumerate(make_batches(config), 1))[:STEPS]:
        squares = 0.0
        for engine, part in zip(engines, batch.chunk(replicas), strict=True):
            for micro in part.split(2):
                loss = cross_entropy_sum(engine.model(micro[:, :-1]), micro[:, 1:])
                (loss * replicas / (batch.shape[0] * (batch.shape[1] - 1))).backward()
        if step <= local.warmup_steps:
            for same in zip(*weights, strict=True):
                mean = sum(p.grad for p in same) / replicas
                for parameter in same:
                    parameter.grad = mean.clone()
        for engine in engines:
            squares += sum(float(p.grad.square().sum()) for p in engine.parts[0].parameters() if p.grad is not None)
            if config.optimizer.clip_norm is not None:
                norm = torch.nn.utils.clip_grad_norm_(engine.parts[0].parameters(), config.optimizer.clip_norm)
                assert norm > config.optimizer.clip_norm
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        if step == local.warmup_steps:
            at = [p.detach().clone() for p in weights[0]]
            outer = torch.optim.SGD(at, local.outer_lr, local.outer_momentum, nesterov=local.outer_momentum > 0)
        if step > local.warmup_steps and step % local.every == 0:
            for number, theta in enumerate(at):
                theta.grad = theta - sum(w[number].detach() for w in weights) / replicas
            outer.step()
            with torch.no_grad():
                for own in weights:
                    for parameter, theta in zip(own, at, strict=True):
                        parameter.copy_(theta)
    states = [{n: t.clone() for n, t in e.state_dict().items() if n.startswith("model.")} for e in engines]
    return plain({"states": states, "norm": (squares / replicas) ** 0.5})


OUTER: dict[str, dict[str, float]] = {
    "average": {},
    "nesterov": {"outer_lr": 0.7, "outer_momentum": 0.9},
    "warm-up": {"outer_lr": 0.7, "outer_momentum": 0.9, "warmup_steps": 3},
}


@pytest.mark.parametrize("case", list(OUTER))
def test_local_sgd_does_what_a_plain_reference_does(case: str) -> None:
    config = config_of(3, 0.1 if case in CLIPPED else None, local_sgd={"every": 2, **OUTER[case]})
    found = run_ranks(3, local_rank, config)
    expected = run_ranks(1, local_reference_rank, config, 3)[0]
    for rank, result in enumerate(found):
        assert result["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        for name, tensor in expected["states"][rank].items():
            assert abs(result["state"][name] - tensor).max() <= 1e-6, (rank, name)
            mean = sum(state[name] for state in expected["states"]) / 3
            assert abs(result["saved"][name] - mean).max() <= 1e-6, "a checkpoint holds the mean"
    first, second = (rank["state"]["model.lm_head.weight"] for rank in found[:2])
    assert not np.array_equal(first, second)


RESUMED = {
    "topk": "parallel.hook={kind: topk, ratio: 0.02, warmup_steps: 5}",
    "local_sgd": "parallel.local_sgd={every: 16, warmup_steps: 5, outer_lr: 0.7, outer_momentum: 0.9}",
    "powersgd": "parallel.hook={kind: powersgd, rank: 2, warmup_steps: 3}",
    "bf16": "parallel.hook.kind=bf16",
    "fp16": "parallel.hook.kind=fp16",
    "average": "parallel.local_sgd.every=16",
}


def case_marks(size: int, case: str) -> Any:
    short = (size, case) in ((3, "topk"), (2, "local_sgd"))
    return pytest.param(size, case, marks=[] if short else pytest.mark.long)


@pytest.mark.parametrize(("size", "case"), [case_marks(size, case) for size in (2, 3) for case in RESUMED])
def test_stopped_and_resumed_is_undisturbed(tmp_path: Path, data: Path, size: int, case: str) -> None:
    """The stop falls between two averages; three ranks divide a batch of six."""
    more = ("train.steps=40", f"train.global_batch={2 * size}", RESUMED[case])
    calm, run = new_run(tmp_path, "calm", data, *more), new_run(tmp_path, "stopped", data, *more)
    assert set(run_ranks(size, stage, calm.path)) == {ExitCode.DONE}
    interrupt_training(run, size, signal.SIGTERM, 18, [size - 1])
    assert 18 <= len(read_steps(run)) < 32
    assert set(run_ranks(size, stage, run.path)) == {ExitCode.DONE}
    assert compute_run_digest(run) == compute_run_digest(calm) and read_steps(run) == read_steps(calm)
    losses = [line[1] for line in read_steps(calm)]
    assert losses[-1] < losses[0] - 1.0


def stage(rank_info: RankInfo, path: Path) -> int:
    from tests.support.tiny import stage_rank

    return stage_rank(rank_info, path, "train")


def kept_rank(rank_info: RankInfo, config: Config, folder: Path, trained: int) -> dict[str, Any]:
    """Restore what is there, train on, save; the state after the restore and at the end."""
    from functools import partial

    import torch.distributed as dist

    from pipeline.checkpoint.checkpointer import Checkpointer

    engine = create_engine(rank_info, config)
    saver = Checkpointer(
        folder,
        dist.new_group(backend="gloo"),
        keep=9,
        background=False,
        describe={"layout": {}},
        on_saved=lambda *_: None,
    )
    manifest, note = saver.restore(engine.state_dict(), lambda *_: None), None
    first = int(manifest["step"]) if manifest else 0
    if manifest:
        note = engine.finish_loading(manifest["extra"]["replicas"], partial(saver.read_tensors, first))

    def state() -> dict[str, Any]:
        residual = getattr(engine.replica_sync, "residual", {})
        return {
            n: t.clone() for n, t in (engine.state_dict() | {f"residual.{n}": t for n, t in residual.items()}).items()
        }

    before = state()
    for step, batch in list(enumerate(make_batches(config), 1))[first : first + trained]:
        engine.backward({"tokens": batch.chunk(rank_info.world_size)[rank_info.rank]}, step)
        engine.update_weights(engine.clip_gradients(None).item())
    tensors, extra = engine.checkpoint_state()
    if trained:
        saver.save(tensors, step=first + trained, samples_consumed=0, extra={"replicas": extra})
    saver.close()
    return plain({"before": before, "after": state(), "note": note})


@pytest.mark.parametrize("kind", ["topk", pytest.param("powersgd", marks=pytest.mark.long)])
def test_residuals_move_to_other_numbers_of_replicas(tmp_path: Path, kind: str) -> None:
    hook = {"kind": kind, "ratio": 0.05, "rank": 2}
    total: dict[str, Any] = {}
    for ranks in (3, 2, 6, 1):
        found = run_ranks(ranks, kept_rank, config_of(ranks, hook=hook), tmp_path, 2)
        for name in found[0]["before"]:
            if name.startswith("residual."):
                arrived = sum(rank["before"][name] for rank in found)
                assert abs(arrived - total.get(name, 0 * arrived)).max() <= 1e-7, (ranks, name)
                total[name] = sum(rank["after"][name] for rank in found)
        assert (found[0]["note"] is not None) == (ranks != 3)
        assert sum(abs(t).sum() for t in total.values()) > 1e-3 or ranks == 1
    alone = run_ranks(1, kept_rank, config_of(1, hook=hook), tmp_path, 0)[0]
    assert all(not tensor.any() for name, tensor in alone["before"].items() if name.startswith("residual."))
    other = run_ranks(2, kept_rank, config_of(2), tmp_path, 0)
    assert "dropped" in other[0]["note"]


def test_local_sgd_moves_as_its_mean(tmp_path: Path) -> None:
    local = {"every": 4, "outer_lr": 0.7, "outer_momentum": 0.9}
    first = run_ranks(3, kept_rank, config_of(3, local_sgd=local), tmp_path, 2)
    again = run_ranks(3, kept_rank, config_of(3, local_sgd=local), tmp_path, 0)
    moved = run_ranks(2, kept_rank, config_of(2, local_sgd=local), tmp_path, 0)
    plain = run_ranks(2, kept_rank, config_of(2), tmp_path, 0)
    for name in first[0]["after"]:
        mean = sum(rank["after"][name] for rank in first) / 3
        assert all(
            np.array_equal(now["before"][name], rank["after"][name]) for now, rank in zip(again, first, strict=True)
        )
        assert all(abs(rank["before"][name] - mean).max() <= 1e-6 for rank in [*moved, *plain])
    assert "start from the mean of 3" in moved[0]["note"] and again[0]["note"] is None


WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"hook": {"kind": "bf16"}},
    "topk": {"hook": {"kind": "topk"}},
    "powersgd 2": {"hook": {"kind": "powersgd", "rank": 2}},
    "powersgd 3": {"hook": {"kind": "powersgd", "rank": 3}},
    "average": {"local_sgd": {"every": 4}},
    "warm-up": {"local_sgd": {"every": 4, "warmup_steps": 9}},
    "nesterov": {"local_sgd": {"every": 4, "outer_momentum": 0.9}},
}


def changed_rank(rank_info: RankInfo, folder: Path) -> dict[tuple[str, str], tuple[str | None, set[str], set[str]]]:
    """For each pair of ways what a resume says of the change, what this replica had saved, and what it read again."""
    import torch.distributed as dist

    from pipeline.checkpoint.checkpointer import Checkpointer

    engines = {way: create_engine(rank_info, config_of(2, **parallel)) for way, parallel in WAYS.items()}
    group, found = dist.new_group(backend="gloo"), {}
    for before, engine in engines.items():
        saver = Checkpointer(
            folder / before, group, keep=9, background=False, describe={"layout": {}}, on_saved=lambda *_: None
        )
        tensors, extra = engine.checkpoint_state()
        saver.save(tensors, step=1, samples_consumed=0, extra={})
        saver.close()
        own = {name for name in tensors if not name.startswith(("model.", "optimizer."))}
        for now, other in engines.items():
            read: set[str] = set()

            def take(state: Any, read: set[str] = read, saver: Checkpointer = saver) -> None:
                read.update(state)
                saver.read_tensors(1, state)

            saver.restore(other.state_dict(), lambda *_: None)
            found[before, now] = other.finish_loading(extra, take), own, read
    return found


@pytest.mark.story
def test_a_resume_tells_what_of_the_replicas_it_drops(tmp_path: Path) -> None:
    """No more and no less than what the checkpoint holds beside the digest and nobody reads, for each pair of ways."""
    found = run_ranks(2, changed_rank, tmp_path)
    for pair, (note, *_) in found[0].items():
        lost = set.union(*(rank[pair][1] for rank in found)) - set.union(*(rank[pair][2] for rank in found))
        kinds = {
            "residuals of 2 replicas are dropped" if ".residual." in name
            else {"start": "PowerSGD's Q", "outer": "outer optimizer"}.get(name.split(".")[0], "the mean of 2")
            for name in lost
        }  # fmt: skip
        parts = note.split("; ") if note else []
        assert len(parts) == len(kinds) and all(any(kind in part for part in parts) for kind in kinds), (pair, note)
        assert (pair[0] in ("none", "bf16") or pair[0] == pair[1]) <= (note is None), (pair, note)


def left_out_rank(rank_info: RankInfo, config: Config) -> bool:
    """A step that is left out, its gradient not finite, leaves residuals and Q as they were."""
    import torch

    engine = create_engine(rank_info, config)
    for step, batch in list(enumerate(make_batches(config), 1))[:3]:
        hook = engine.replica_sync
        before = {name: tensor.clone() for name, tensor in (hook.residual | hook.start).items()}
        if step == 3:
            with torch.no_grad():
                engine.parts[0].get_parameter("lm_head.weight")[0, 0] = float("nan")
        engine.backward({"tokens": batch.chunk(rank_info.world_size)[rank_info.rank]}, step)
        norm = engine.clip_gradients(None).item()
        engine.update_weights(norm, is_good=step != 3)
        same = all(torch.equal(tensor, before[name]) for name, tensor in (hook.residual | hook.start).items())
        if step == 3:
            return same and norm != norm
        assert not same
    return False


@pytest.mark.parametrize("kind", ["topk", "powersgd"])
def test_steps_that_are_left_out_leave_no_residual(kind: str) -> None:
    config = config_of(2, hook={"kind": kind, "ratio": 0.05, "rank": 2})
    assert run_ranks(2, left_out_rank, config) == [True, True]


def held_rank(rank_info: RankInfo, config: Config) -> tuple[int, int, int]:
    """What PowerSGD packed in one backward: how many tensors, how many are alive after it, and after the update."""
    from pipeline.parallel import replica_sync

    engine, packed, made = create_engine(rank_info, config), replica_sync._pack, []

    def noted(tensors: Any) -> Any:
        one = packed(tensors)
        made.append(weakref.ref(one))
        return one

    replica_sync._pack = noted
    engine.backward({"tokens": make_batches(config)[0].chunk(rank_info.world_size)[rank_info.rank]}, 1)
    after = sum(one() is not None for one in made)
    engine.update_weights(engine.clip_gradients(None).item())
    deadline = time.monotonic() + 30  # Gloo's own threads may let go of theirs a moment later
    while (left := sum(one() is not None for one in made)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(made), after, left


def test_powersgd_holds_what_its_callbacks_read_until_the_update() -> None:
    """On a GPU they read it on a stream of their own, for which the memory of the backward's stream does not wait."""
    for made, after, left in run_ranks(2, held_rank, config_of(2, hook={"kind": "powersgd", "rank": 2})):
        assert made == after > 2 and left == 0

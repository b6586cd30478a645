"""Tests of gradient hooks and local SGD, compared with a reference in one process, and of their state on resume."""

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
"""Maximum elements of an all-reduce: fewer than most parameters have, and no divisor of their sizes."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("data")).data_dir


def config_of(ranks: int, clip: float | None = None, **parallel: Any) -> Config:
    """Return a config with a large eps, so that rounding errors of tiny gradients do not change the weights."""
    return tiny_config(
        ranks,
        parallel=parallel,
        train={"steps": 10, "global_batch": 12, "micro_batch": 2},
        optimizer={"lr": 1e-2, "eps": 1e-2, "clip_norm": clip},
        model={"dim": 32, "layers": 2},
    )


def create_engine(rank_info: RankInfo, config: Config) -> Any:
    """Return an engine that reduces gradients in many small buckets."""
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
        wrap_with_ddp = data_parallel.wrap_with_ddp
        data_parallel.wrap_with_ddp = lambda model, device, bucket_mb: wrap_with_ddp(model, device, 0.02)  # type: ignore[arg-type]
    layout = resolve_layout(config, world.size, rank_info.local_world_size, VOCAB)
    return Engine(config, layout, world, DecoderTask(config, VOCAB))


def to_arrays(value: Any) -> Any:
    """Return the value with its tensors converted to arrays, which are pickled by value."""
    if isinstance(value, dict):
        return {key: to_arrays(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_arrays(item) for item in value]
    return value.numpy() if hasattr(value, "numpy") else value


def hooked_rank(rank_info: RankInfo, config: Config) -> dict[str, Any]:
    """Return weights and residuals of one replica after STEPS steps, and the reduced gradients of each step."""
    engine = create_engine(rank_info, config)
    limit = config.optimizer.clip_norm
    reduced = []
    for step, batch in list(enumerate(make_batches(config), 1))[:STEPS]:
        engine.backward({"tokens": batch.chunk(rank_info.world_size)[rank_info.rank]}, step)
        names = {parameter: name for name, parameter in engine.parts[0].named_weights()}
        reduced.append({name: parameter.grad.clone() for parameter, name in names.items()})
        norm = engine.clip_gradients(limit).item()
        assert limit is None or norm > limit
        engine.update_weights(norm)
    state = {name: tensor.clone() for name, tensor in engine.state_dict().items() if name.startswith("model.")}
    return to_arrays({"state": state, "reduced": reduced, "residual": getattr(engine.replica_sync, "residual", {})})


def reference_rank(rank_info: RankInfo, config: Config, replicas: int) -> dict[str, Any]:
    """Return the same as `hooked_rank`, computed for all replicas in one process with a plain implementation."""
    import torch

    from pipeline.model.decoder import cross_entropy_sum
    from pipeline.parallel.replica_sync import _sample_matrix

    one_replica = config.model_copy(update={"parallel": config_of(1).parallel})
    engine = create_engine(rank_info, one_replica)
    hook = config.parallel.hook
    weights = dict(engine.parts[0].named_weights())
    residual = [{name: torch.zeros_like(p) for name, p in weights.items()} for _ in range(replicas)]
    begin = {
        n: _sample_matrix(p[0].numel(), hook.rank, f"{config.run.seed}/{n}") for n, p in weights.items() if p.ndim > 1
    }
    reduced = []
    means = []
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
            local_values = [g[name] / replicas + r[name] for g, r in zip(gradients, residual, strict=True)]
            if hook.kind in ("fp16", "bf16"):
                kind = torch.float16 if hook.kind == "fp16" else torch.bfloat16
                result[name] = sum((g[name] / replicas).to(kind) for g in gradients).float()
                continue
            sent = []
            warm = hook.warmup_steps
            if hook.kind == "topk":
                fraction = hook.ratio ** min(1, (step - 1) / warm) if warm else hook.ratio
                for values in local_values:
                    count = -int(-fraction * values.numel() // 1)
                    least = values.abs().flatten().sort(descending=True).values[count - 1]
                    sent.append(values * (values.abs() >= least))
            elif parameter.ndim > 1 and step > warm and sum(parameter.shape) * hook.rank < parameter.numel():
                total = sum(local_values)
                P = torch.linalg.qr(total.double() @ begin[name].double()).Q
                begin[name] = (total.double().T @ P).float()
                sent = [(P @ (P.T @ values.double())).float() for values in local_values]
            else:
                sent = local_values
            result[name] = sum(sent)
            for r, values, out in zip(residual, local_values, sent, strict=True):
                r[name] = values - out
        for name, parameter in weights.items():
            parameter.grad = result[name].clone()
        reduced.append(result)
        if config.optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(weights.values(), config.optimizer.clip_norm)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    state = {f"model.{name}": p.detach().clone() for name, p in weights.items()}
    return to_arrays({"state": state, "reduced": reduced, "residual": residual, "means": means})


CLIPPED = ("topk_warmup", "nesterov", "warm-up")
HOOKS = {
    "bf16": (2, {"kind": "bf16"}),
    "fp16": (2, {"kind": "fp16"}),
    "topk": (3, {"kind": "topk", "ratio": 0.04}),
    "topk_warmup": (2, {"kind": "topk", "ratio": 0.02, "warmup_steps": 3}),
    "powersgd": (3, {"kind": "powersgd", "rank": 3, "warmup_steps": 1}),
}


@pytest.mark.parametrize("case", list(HOOKS))
def test_hooks_equal_the_reference(case: str) -> None:
    replicas, hook = HOOKS[case]
    config = config_of(replicas, 0.1 if case in CLIPPED else None, hook=hook)
    results = run_ranks(replicas, hooked_rank, config)
    expected = run_ranks(1, reference_rank, config, replicas)[0]
    for name, tensor in expected["state"].items():
        for rank in range(replicas):
            assert abs(results[rank]["state"][name] - tensor).max() <= 1e-6, (name, rank)
            assert np.array_equal(results[rank]["state"][name], results[0]["state"][name]), (
                "all replicas have the same bits"
            )
    for step, gradients in enumerate(expected["reduced"]):
        for name, tensor in gradients.items():
            assert abs(results[0]["reduced"][step][name] - tensor).max() <= 1e-6, (step, name)
    if not results[0]["residual"]:
        return
    assert sum(abs(r["residual"][name]).sum() for r in results for name in r["residual"]) > 1e-3
    for name in results[0]["residual"]:
        for rank in range(replicas):
            assert abs(results[rank]["residual"][name] - expected["residual"][rank][name]).max() <= 1e-6
        # nothing is lost: the sent values and the residuals add up to all gradients
        sent = sum(gradients[name] for gradients in results[0]["reduced"])
        unsent = sum(rank["residual"][name] for rank in results)
        assert abs(sent + unsent - sum(mean[name] for mean in expected["means"])).max() <= 1e-6


def local_rank(rank_info: RankInfo, config: Config) -> dict[str, Any]:
    """Return weights, gradient norm and saved state of one replica after STEPS steps. All-reduces are split."""
    import torch.distributed as dist

    from pipeline.parallel import replica_sync

    engine = create_engine(rank_info, config)
    all_reduce = dist.all_reduce
    replica_sync.MAX_REDUCED_ELEMENTS = PIECE

    def check_size_and_reduce(tensor: Any, *arguments: Any, **options: Any) -> Any:
        assert tensor.numel() <= PIECE
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = check_size_and_reduce
    for step, batch in list(enumerate(make_batches(config), 1))[:STEPS]:
        engine.backward({"tokens": batch.chunk(rank_info.world_size)[rank_info.rank]}, step)
        norm = engine.clip_gradients(config.optimizer.clip_norm).item()
        engine.update_weights(norm)
    mine = {name: tensor.clone() for name, tensor in engine.state_dict().items() if name.startswith("model.")}
    return to_arrays({"state": mine, "norm": norm, "saved": engine.checkpoint_state()[0]})


def local_reference_rank(rank_info: RankInfo, config: Config, replicas: int) -> dict[str, Any]:
    """Return weights and gradient norm of all replicas, computed in one process; torch's SGD is the outer optimizer."""
    import torch

    from pipeline.model.decoder import cross_entropy_sum

    local = config.parallel.local_sgd
    assert local is not None
    one_replica = config.model_copy(update={"parallel": config_of(1).parallel})
    engines = [create_engine(rank_info, one_replica) for _ in range(replicas)]
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
                for replica_weights in weights:
                    for parameter, theta in zip(replica_weights, at, strict=True):
                        parameter.copy_(theta)
    states = [{n: t.clone() for n, t in e.state_dict().items() if n.startswith("model.")} for e in engines]
    return to_arrays({"states": states, "norm": (squares / replicas) ** 0.5})


OUTER: dict[str, dict[str, float]] = {
    "average": {},
    "nesterov": {"outer_lr": 0.7, "outer_momentum": 0.9},
    "warm-up": {"outer_lr": 0.7, "outer_momentum": 0.9, "warmup_steps": 3},
}


@pytest.mark.parametrize("case", list(OUTER))
def test_local_sgd_equals_the_reference(case: str) -> None:
    config = config_of(3, 0.1 if case in CLIPPED else None, local_sgd={"every": 2, **OUTER[case]})
    results = run_ranks(3, local_rank, config)
    expected = run_ranks(1, local_reference_rank, config, 3)[0]
    for rank, result in enumerate(results):
        assert result["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        for name, tensor in expected["states"][rank].items():
            assert abs(result["state"][name] - tensor).max() <= 1e-6, (rank, name)
            mean = sum(state[name] for state in expected["states"]) / 3
            assert abs(result["saved"][name] - mean).max() <= 1e-6, "a checkpoint contains the mean"
    first, second = (rank["state"]["model.lm_head.weight"] for rank in results[:2])
    assert not np.array_equal(first, second)


RESUMED = {
    "topk": "parallel.hook={kind: topk, ratio: 0.02, warmup_steps: 5}",
    "local_sgd": "parallel.local_sgd={every: 16, warmup_steps: 5, outer_lr: 0.7, outer_momentum: 0.9}",
    "powersgd": "parallel.hook={kind: powersgd, rank: 2, warmup_steps: 3}",
    "bf16": "parallel.hook.kind=bf16",
    "fp16": "parallel.hook.kind=fp16",
    "average": "parallel.local_sgd.every=16",
}


def make_case(size: int, case: str) -> Any:
    """Return a case as a pytest parameter, marked `long` except for two of them."""
    short = (size, case) in ((3, "topk"), (2, "local_sgd"))
    return pytest.param(size, case, marks=[] if short else pytest.mark.long)


@pytest.mark.parametrize(("size", "case"), [make_case(size, case) for size in (2, 3) for case in RESUMED])
def test_a_resumed_run_equals_an_undisturbed_one(tmp_path: Path, data: Path, size: int, case: str) -> None:
    """The training stops between two averages. Three ranks share a global batch of six."""
    more = ("train.steps=40", f"train.global_batch={2 * size}", RESUMED[case])
    undisturbed = new_run(tmp_path, "undisturbed", data, *more)
    run = new_run(tmp_path, "stopped", data, *more)
    assert set(run_ranks(size, train_stage_rank, undisturbed.path)) == {ExitCode.DONE}
    interrupt_training(run, size, signal.SIGTERM, 18, [size - 1])
    assert 18 <= len(read_steps(run)) < 32
    assert set(run_ranks(size, train_stage_rank, run.path)) == {ExitCode.DONE}
    assert compute_run_digest(run) == compute_run_digest(undisturbed) and read_steps(run) == read_steps(undisturbed)
    losses = [line[1] for line in read_steps(undisturbed)]
    assert losses[-1] < losses[0] - 1.0


def train_stage_rank(rank_info: RankInfo, path: Path) -> int:
    """Run the stage train and return its exit code."""
    from tests.support.tiny import run_stage_on_rank

    return run_stage_on_rank(rank_info, path, "train")


def restore_and_train_rank(rank_info: RankInfo, config: Config, folder: Path, trained: int) -> dict[str, Any]:
    """Restore the newest checkpoint if there is one, train `trained` steps and save.

    Return the state after the restore and at the end, and the note of the restore.
    """
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
    manifest = saver.restore(engine.state_dict(), lambda *_: None)
    note = None
    first = int(manifest["step"]) if manifest else 0
    if manifest:
        note = engine.finish_loading(manifest["extra"]["replicas"], partial(saver.read_tensors, first))

    def clone_state() -> dict[str, Any]:
        residual = getattr(engine.replica_sync, "residual", {})
        return {
            n: t.clone() for n, t in (engine.state_dict() | {f"residual.{n}": t for n, t in residual.items()}).items()
        }

    before = clone_state()
    for step, batch in list(enumerate(make_batches(config), 1))[first : first + trained]:
        engine.backward({"tokens": batch.chunk(rank_info.world_size)[rank_info.rank]}, step)
        engine.update_weights(engine.clip_gradients(None).item())
    tensors, extra = engine.checkpoint_state()
    if trained:
        saver.save(tensors, step=first + trained, samples_consumed=0, extra={"replicas": extra})
    saver.close()
    return to_arrays({"before": before, "after": clone_state(), "note": note})


@pytest.mark.parametrize("kind", ["topk", pytest.param("powersgd", marks=pytest.mark.long)])
def test_the_sum_of_residuals_is_kept_if_the_number_of_replicas_changes(tmp_path: Path, kind: str) -> None:
    hook = {"kind": kind, "ratio": 0.05, "rank": 2}
    total: dict[str, Any] = {}
    for ranks in (3, 2, 6, 1):
        results = run_ranks(ranks, restore_and_train_rank, config_of(ranks, hook=hook), tmp_path, 2)
        for name in results[0]["before"]:
            if name.startswith("residual."):
                restored = sum(rank["before"][name] for rank in results)
                assert abs(restored - total.get(name, 0 * restored)).max() <= 1e-7, (ranks, name)
                total[name] = sum(rank["after"][name] for rank in results)
        assert (results[0]["note"] is not None) == (ranks != 3)
        assert sum(abs(t).sum() for t in total.values()) > 1e-3 or ranks == 1
    alone = run_ranks(1, restore_and_train_rank, config_of(1, hook=hook), tmp_path, 0)[0]
    assert all(not tensor.any() for name, tensor in alone["before"].items() if name.startswith("residual."))
    other = run_ranks(2, restore_and_train_rank, config_of(2), tmp_path, 0)
    assert "dropped" in other[0]["note"]


def test_replicas_of_local_sgd_start_from_their_mean_on_another_number_of_replicas(tmp_path: Path) -> None:
    local = {"every": 4, "outer_lr": 0.7, "outer_momentum": 0.9}
    first = run_ranks(3, restore_and_train_rank, config_of(3, local_sgd=local), tmp_path, 2)
    again = run_ranks(3, restore_and_train_rank, config_of(3, local_sgd=local), tmp_path, 0)
    moved = run_ranks(2, restore_and_train_rank, config_of(2, local_sgd=local), tmp_path, 0)
    plain = run_ranks(2, restore_and_train_rank, config_of(2), tmp_path, 0)
    for name in first[0]["after"]:
        mean = sum(rank["after"][name] for rank in first) / 3
        assert all(
            np.array_equal(now["before"][name], rank["after"][name]) for now, rank in zip(again, first, strict=True)
        )
        assert all(abs(rank["before"][name] - mean).max() <= 1e-6 for rank in [*moved, *plain])
    assert "start from the mean of 3" in moved[0]["note"] and again[0]["note"] is None


METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"hook": {"kind": "bf16"}},
    "topk": {"hook": {"kind": "topk"}},
    "powersgd 2": {"hook": {"kind": "powersgd", "rank": 2}},
    "powersgd 3": {"hook": {"kind": "powersgd", "rank": 3}},
    "average": {"local_sgd": {"every": 4}},
    "warm-up": {"local_sgd": {"every": 4, "warmup_steps": 9}},
    "nesterov": {"local_sgd": {"every": 4, "outer_momentum": 0.9}},
}


def changed_method_rank(
    rank_info: RankInfo, folder: Path
) -> dict[tuple[str, str], tuple[str | None, set[str], set[str]]]:
    """For each pair of methods, return the note of the resume and the tensors that this replica saved and read."""
    import torch.distributed as dist

    from pipeline.checkpoint.checkpointer import Checkpointer

    engines = {name: create_engine(rank_info, config_of(2, **parallel)) for name, parallel in METHODS.items()}
    group = dist.new_group(backend="gloo")
    results = {}
    for before, engine in engines.items():
        saver = Checkpointer(
            folder / before, group, keep=9, background=False, describe={"layout": {}}, on_saved=lambda *_: None
        )
        tensors, extra = engine.checkpoint_state()
        saver.save(tensors, step=1, samples_consumed=0, extra={})
        saver.close()
        saved = {name for name in tensors if not name.startswith(("model.", "optimizer."))}
        for now, other in engines.items():
            read: set[str] = set()

            def read_and_record(state: Any, read: set[str] = read, saver: Checkpointer = saver) -> None:
                read.update(state)
                saver.read_tensors(1, state)

            saver.restore(other.state_dict(), lambda *_: None)
            results[before, now] = other.finish_loading(extra, read_and_record), saved, read
    return results


@pytest.mark.story
def test_a_resume_lists_the_replica_state_that_it_drops(tmp_path: Path) -> None:
    """For each pair of methods, the note lists exactly the saved tensors that no replica reads."""
    results = run_ranks(2, changed_method_rank, tmp_path)
    for pair, (note, *_) in results[0].items():
        lost = set.union(*(rank[pair][1] for rank in results)) - set.union(*(rank[pair][2] for rank in results))
        kinds = {
            "residuals of 2 replicas are dropped" if ".residual." in name
            else {"start": "PowerSGD's Q", "outer": "outer optimizer"}.get(name.split(".")[0], "the mean of 2")
            for name in lost
        }  # fmt: skip
        parts = note.split("; ") if note else []
        assert len(parts) == len(kinds) and all(any(kind in part for part in parts) for kind in kinds), (pair, note)
        assert (pair[0] in ("none", "bf16") or pair[0] == pair[1]) <= (note is None), (pair, note)


def skipped_step_rank(rank_info: RankInfo, config: Config) -> bool:
    """Return True if a skipped step, whose gradient is not finite, leaves residuals and PowerSGD's Q unchanged."""
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
def test_skipped_steps_do_not_change_the_residuals(kind: str) -> None:
    config = config_of(2, hook={"kind": kind, "ratio": 0.05, "rank": 2})
    assert run_ranks(2, skipped_step_rank, config) == [True, True]


def packed_tensors_rank(rank_info: RankInfo, config: Config) -> tuple[int, int, int]:
    """Return how many tensors PowerSGD packs in a backward, and how many exist after it and after the update."""
    from pipeline.parallel import replica_sync

    engine = create_engine(rank_info, config)
    pack = replica_sync._pack
    packed: list[Any] = []

    def pack_and_record(tensors: Any) -> Any:
        tensor = pack(tensors)
        packed.append(weakref.ref(tensor))
        return tensor

    replica_sync._pack = pack_and_record
    engine.backward({"tokens": make_batches(config)[0].chunk(rank_info.world_size)[rank_info.rank]}, 1)
    after_backward = sum(reference() is not None for reference in packed)
    engine.update_weights(engine.clip_gradients(None).item())
    deadline = time.monotonic() + 30  # Gloo's threads may release their references later
    while (after_update := sum(reference() is not None for reference in packed)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(packed), after_backward, after_update


def test_powersgd_keeps_packed_tensors_until_the_update() -> None:
    """On a GPU, callbacks read them on another stream. Memory freed earlier could be reused before they are read."""
    for packed, after_backward, after_update in run_ranks(
        2, packed_tensors_rank, config_of(2, hook={"kind": "powersgd", "rank": 2})
    ):
        assert packed == after_backward > 2 and after_update == 0

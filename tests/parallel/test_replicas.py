"""Tests of gradient hooks and local SGD.

Results are compared with those of a simple implementation in one process. Other tests check that a run keeps the state
of its hook or of local SGD when it is stopped or when its number of replicas changes.
"""

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
from tests.support.tiny import compute_run_digest, make_run, run_stage_on_rank
from tests.support.tiny_training import VOCAB, make_batches, tiny_config
from tests.train.test_exact import create_run, interrupt_training, read_steps

STEPS = 5
MAX_ELEMENTS = 999
"""Maximum elements of an all-reduce: fewer than most parameters have, and no divisor of their sizes."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a run and return its data directory. All runs of this module use this data."""
    return make_run(tmp_path_factory.mktemp("data")).data_dir


def make_config(ranks: int, clip: float | None = None, **parallel: Any) -> Config:
    """Return a config with one replica per rank. `parallel` are values of the section `parallel`.

    AdamW's eps is so large that rounding errors of tiny gradients hardly change the weights.
    """
    return tiny_config(
        ranks,
        parallel=parallel,
        train={"steps": 10, "global_batch": 12, "micro_batch": 2},
        optimizer={"lr": 1e-2, "eps": 1e-2, "clip_norm": clip},
        model={"dim": 32, "layers": 2},
    )


def create_engine(rank_info: RankInfo, config: Config) -> Any:
    """Return an engine that reduces gradients in many small buckets."""
    import torch
    import torch.distributed as dist

    from pipeline.comm import groups
    from pipeline.model.task import DecoderTask
    from pipeline.parallel import data_parallel
    from pipeline.parallel.mesh import resolve_layout
    from pipeline.train.engine import Engine

    world = groups.World(rank_info.rank, rank_info.world_size, torch.device("cpu"), "gloo")
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


def train_replica_with_hook(rank_info: RankInfo, config: Config) -> dict[str, Any]:
    """Train STEPS steps on one rank, which has one replica.

    Return the weights and residuals after the last step, and the reduced gradients of each step.
    """
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


def compute_reference_with_hook(rank_info: RankInfo, config: Config, replicas: int) -> dict[str, Any]:
    """Train all replicas in one process with a simple implementation of the gradient hook.

    Return the results of `train_replica_with_hook`, with the residuals of each replica, and the mean gradients of each
    step ("means").
    """
    import torch

    from pipeline.model.decoder import cross_entropy_sum
    from pipeline.parallel.replica_sync import _sample_matrix

    one_replica_config = config.model_copy(update={"parallel": make_config(1).parallel})
    engine = create_engine(rank_info, one_replica_config)
    hook = config.parallel.hook
    weights = dict(engine.parts[0].named_weights())
    residuals = [{name: torch.zeros_like(parameter) for name, parameter in weights.items()} for _ in range(replicas)]
    Q_by_name = {  # PowerSGD's Q of each matrix
        name: _sample_matrix(parameter[0].numel(), hook.rank, f"{config.run.seed}/{name}")
        for name, parameter in weights.items()
        if parameter.ndim > 1
    }
    reduced = []
    means = []
    for step, batch in list(enumerate(make_batches(config), 1))[:STEPS]:
        gradients: list[dict[str, Any]] = []
        for replica_batch in batch.chunk(replicas):
            for micro_batch in replica_batch.split(2):
                loss = cross_entropy_sum(engine.model(micro_batch[:, :-1]), micro_batch[:, 1:])
                (loss * replicas / (batch.shape[0] * (batch.shape[1] - 1))).backward()
            gradients.append(
                {name: parameter.grad.clone() for name, parameter in weights.items() if parameter.grad is not None}
            )
            engine.optimizer.zero_grad()
        means.append(
            {name: sum(replica_gradients[name] for replica_gradients in gradients) / replicas for name in weights}
        )
        result = {}
        for name, parameter in weights.items():
            local_values = [
                replica_gradients[name] / replicas + replica_residual[name]
                for replica_gradients, replica_residual in zip(gradients, residuals, strict=True)
            ]
            if hook.kind in ("fp16", "bf16"):
                dtype = torch.float16 if hook.kind == "fp16" else torch.bfloat16
                result[name] = sum(
                    (replica_gradients[name] / replicas).to(dtype) for replica_gradients in gradients
                ).float()
                continue
            sent_values = []  # of each replica
            warmup_steps = hook.warmup_steps
            if hook.kind == "topk":
                fraction = hook.ratio ** min(1, (step - 1) / warmup_steps) if warmup_steps else hook.ratio
                for values in local_values:
                    count = -int(-fraction * values.numel() // 1)  # rounded up
                    threshold = values.abs().flatten().sort(descending=True).values[count - 1]
                    sent_values.append(values * (values.abs() >= threshold))
            elif parameter.ndim > 1 and step > warmup_steps and sum(parameter.shape) * hook.rank < parameter.numel():
                total = sum(local_values)
                P = torch.linalg.qr(total.double() @ Q_by_name[name].double()).Q
                Q_by_name[name] = (total.double().T @ P).float()
                sent_values = [(P @ (P.T @ values.double())).float() for values in local_values]
            else:
                sent_values = local_values
            result[name] = sum(sent_values)
            for replica_residual, values, sent in zip(residuals, local_values, sent_values, strict=True):
                replica_residual[name] = values - sent
        for name, parameter in weights.items():
            parameter.grad = result[name].clone()
        reduced.append(result)
        if config.optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(weights.values(), config.optimizer.clip_norm)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    state = {f"model.{name}": parameter.detach().clone() for name, parameter in weights.items()}
    return to_arrays({"state": state, "reduced": reduced, "residual": residuals, "means": means})


CLIPPED_CASES = ("topk_warmup", "nesterov", "warm-up")
"""Cases of HOOKS and of LOCAL_SGD_OPTIONS in which gradients are clipped."""
HOOKS = {
    "bf16": (2, {"kind": "bf16"}),
    "fp16": (2, {"kind": "fp16"}),
    "topk": (3, {"kind": "topk", "ratio": 0.04}),
    "topk_warmup": (2, {"kind": "topk", "ratio": 0.02, "warmup_steps": 3}),
    "powersgd": (3, {"kind": "powersgd", "rank": 3, "warmup_steps": 1}),
}
"""Number of replicas and the value of `parallel.hook`, by case."""


@pytest.mark.parametrize("case", list(HOOKS))
def test_hooks_give_the_same_result_as_a_simple_implementation(case: str) -> None:
    replicas, hook = HOOKS[case]
    config = make_config(replicas, 0.1 if case in CLIPPED_CASES else None, hook=hook)
    results = run_ranks(replicas, train_replica_with_hook, config)
    expected = run_ranks(1, compute_reference_with_hook, config, replicas)[0]
    for name, tensor in expected["state"].items():
        for rank in range(replicas):
            assert abs(results[rank]["state"][name] - tensor).max() <= 1e-6, (name, rank)
            assert np.array_equal(results[rank]["state"][name], results[0]["state"][name]), f"replica {rank} differs"
    for step, gradients in enumerate(expected["reduced"]):
        for name, tensor in gradients.items():
            assert abs(results[0]["reduced"][step][name] - tensor).max() <= 1e-6, (step, name)
    if not results[0]["residual"]:
        return
    assert sum(abs(values).sum() for result in results for values in result["residual"].values()) > 1e-3
    for name in results[0]["residual"]:
        for rank in range(replicas):
            assert abs(results[rank]["residual"][name] - expected["residual"][rank][name]).max() <= 1e-6
        # no value is lost: the sent values of all steps and the residuals add up to the sum of all mean gradients
        sent = sum(gradients[name] for gradients in results[0]["reduced"])
        unsent = sum(rank["residual"][name] for rank in results)
        assert abs(sent + unsent - sum(mean[name] for mean in expected["means"])).max() <= 1e-6


def train_replica_with_local_sgd(rank_info: RankInfo, config: Config) -> dict[str, Any]:
    """Train STEPS steps on one rank, which has one replica.

    All-reduces have at most `MAX_ELEMENTS` elements. Return the weights, the last gradient norm, and the weights that a
    checkpoint would contain ("saved").
    """
    import torch.distributed as dist

    from pipeline.parallel import replica_sync

    engine = create_engine(rank_info, config)
    all_reduce = dist.all_reduce
    replica_sync.MAX_REDUCED_ELEMENTS = MAX_ELEMENTS

    def check_size_and_reduce(tensor: Any, *arguments: Any, **options: Any) -> Any:
        assert tensor.numel() <= MAX_ELEMENTS
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = check_size_and_reduce
    for step, batch in list(enumerate(make_batches(config), 1))[:STEPS]:
        engine.backward({"tokens": batch.chunk(rank_info.world_size)[rank_info.rank]}, step)
        norm = engine.clip_gradients(config.optimizer.clip_norm).item()
        engine.update_weights(norm)
    state = {name: tensor.clone() for name, tensor in engine.state_dict().items() if name.startswith("model.")}
    return to_arrays({"state": state, "norm": norm, "saved": engine.checkpoint_state()[0]})


def compute_reference_with_local_sgd(rank_info: RankInfo, config: Config, replicas: int) -> dict[str, Any]:
    """Train all replicas in one process. The outer optimizer is torch's SGD.

    Return the weights of each replica ("states") and the last gradient norm.
    """
    import torch

    from pipeline.model.decoder import cross_entropy_sum

    options = config.parallel.local_sgd
    assert options is not None
    one_replica_config = config.model_copy(update={"parallel": make_config(1).parallel})
    engines = [create_engine(rank_info, one_replica_config) for _ in range(replicas)]
    weights = [list(engine.parts[0].parameters()) for engine in engines]

    def make_outer_optimizer() -> tuple[list[Any], Any]:
        """Return the outer weights, a copy of the first replica's weights, and their optimizer."""
        copies = [parameter.detach().clone() for parameter in weights[0]]
        momentum = options.outer_momentum
        return copies, torch.optim.SGD(copies, options.outer_lr, momentum, nesterov=momentum > 0)

    outer_weights, outer_optimizer = make_outer_optimizer()
    for step, batch in list(enumerate(make_batches(config), 1))[:STEPS]:
        squares = 0.0
        for engine, replica_batch in zip(engines, batch.chunk(replicas), strict=True):
            for micro_batch in replica_batch.split(2):
                loss = cross_entropy_sum(engine.model(micro_batch[:, :-1]), micro_batch[:, 1:])
                (loss * replicas / (batch.shape[0] * (batch.shape[1] - 1))).backward()
        if step <= options.warmup_steps:  # all replicas use the mean gradient
            for parameters in zip(*weights, strict=True):
                mean = sum(parameter.grad for parameter in parameters) / replicas
                for parameter in parameters:
                    parameter.grad = mean.clone()
        for engine in engines:
            squares += sum(
                float(parameter.grad.square().sum())
                for parameter in engine.parts[0].parameters()
                if parameter.grad is not None
            )
            if config.optimizer.clip_norm is not None:
                norm = torch.nn.utils.clip_grad_norm_(engine.parts[0].parameters(), config.optimizer.clip_norm)
                assert norm > config.optimizer.clip_norm
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        if step == options.warmup_steps:
            outer_weights, outer_optimizer = make_outer_optimizer()
        if step > options.warmup_steps and step % options.every == 0:
            for number, outer_weight in enumerate(outer_weights):
                weight_sum = sum(replica_weights[number].detach() for replica_weights in weights)
                outer_weight.grad = outer_weight - weight_sum / replicas
            outer_optimizer.step()
            with torch.no_grad():
                for replica_weights in weights:
                    for parameter, outer_weight in zip(replica_weights, outer_weights, strict=True):
                        parameter.copy_(outer_weight)
    states = [
        {name: tensor.clone() for name, tensor in engine.state_dict().items() if name.startswith("model.")}
        for engine in engines
    ]
    return to_arrays({"states": states, "norm": (squares / replicas) ** 0.5})


LOCAL_SGD_OPTIONS: dict[str, dict[str, float]] = {
    "average": {},
    "nesterov": {"outer_lr": 0.7, "outer_momentum": 0.9},
    "warm-up": {"outer_lr": 0.7, "outer_momentum": 0.9, "warmup_steps": 3},
}
"""Values of `parallel.local_sgd`, by case."""


@pytest.mark.parametrize("case", list(LOCAL_SGD_OPTIONS))
def test_local_sgd_gives_the_same_result_as_a_simple_implementation(case: str) -> None:
    config = make_config(3, 0.1 if case in CLIPPED_CASES else None, local_sgd={"every": 2, **LOCAL_SGD_OPTIONS[case]})
    results = run_ranks(3, train_replica_with_local_sgd, config)
    expected = run_ranks(1, compute_reference_with_local_sgd, config, 3)[0]
    for rank, result in enumerate(results):
        assert result["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        for name, tensor in expected["states"][rank].items():
            assert abs(result["state"][name] - tensor).max() <= 1e-6, (rank, name)
            mean = sum(state[name] for state in expected["states"]) / 3
            assert abs(result["saved"][name] - mean).max() <= 1e-6, "a checkpoint must contain the mean"
    # the replicas differ, because the last step follows the average of step 4
    first_weights, second_weights = (rank["state"]["model.lm_head.weight"] for rank in results[:2])
    assert not np.array_equal(first_weights, second_weights)


RESUME_CASES = {
    "topk": "parallel.hook={kind: topk, ratio: 0.02, warmup_steps: 5}",
    "local_sgd": "parallel.local_sgd={every: 16, warmup_steps: 5, outer_lr: 0.7, outer_momentum: 0.9}",
    "powersgd": "parallel.hook={kind: powersgd, rank: 2, warmup_steps: 3}",
    "bf16": "parallel.hook.kind=bf16",
    "fp16": "parallel.hook.kind=fp16",
    "average": "parallel.local_sgd.every=16",
}
"""Override of the config, by case."""


def make_resume_parameter(world_size: int, case: str) -> Any:
    """Return a case as a pytest parameter. All cases except two are marked `long`."""
    is_short = (world_size, case) in ((3, "topk"), (2, "local_sgd"))
    return pytest.param(world_size, case, marks=[] if is_short else pytest.mark.long)


@pytest.mark.parametrize(
    ("world_size", "case"),
    [make_resume_parameter(world_size, case) for world_size in (2, 3) for case in RESUME_CASES],
)
def test_a_resumed_run_equals_an_undisturbed_one(tmp_path: Path, data: Path, world_size: int, case: str) -> None:
    """Local SGD averages in steps 16 and 32, and the run stops between them."""
    overrides = ("train.steps=40", f"train.global_batch={2 * world_size}", RESUME_CASES[case])
    undisturbed_run = create_run(tmp_path, "undisturbed", data, *overrides)
    run = create_run(tmp_path, "stopped", data, *overrides)
    assert set(run_ranks(world_size, run_stage_on_rank, undisturbed_run.path, "train")) == {ExitCode.DONE}
    interrupt_training(run, world_size, signal.SIGTERM, 18, [world_size - 1])
    assert 18 <= len(read_steps(run)) < 32
    assert set(run_ranks(world_size, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    assert compute_run_digest(run) == compute_run_digest(undisturbed_run)
    assert read_steps(run) == read_steps(undisturbed_run)
    losses = [loss for _, loss, *_ in read_steps(undisturbed_run)]
    assert losses[-1] < losses[0] - 1.0


def restore_train_and_save(rank_info: RankInfo, config: Config, folder: Path, steps: int) -> dict[str, Any]:
    """Restore the newest checkpoint if there is one, train `steps` steps, and save if `steps` is not 0.

    Return the state of this replica after the restore ("before") and at the end ("after"), and the note of the restore.
    The note says what happened to the state of the replicas; None if each replica continues with its own state.
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
        manifest_entries={"layout": {}},
        on_saved=lambda *_: None,
    )
    manifest = saver.restore(engine.state_dict(), lambda *_: None)
    note = None
    first_step = int(manifest["step"]) if manifest else 0
    if manifest:
        note = engine.finish_loading(manifest["extra"]["replicas"], partial(saver.read_tensors, first_step))

    def clone_state() -> dict[str, Any]:
        """Return a copy of the engine's state and of the residuals of this replica."""
        residuals = getattr(engine.replica_sync, "residual", {})
        state = engine.state_dict() | {f"residual.{name}": tensor for name, tensor in residuals.items()}
        return {name: tensor.clone() for name, tensor in state.items()}

    state_before = clone_state()
    for step, batch in list(enumerate(make_batches(config), 1))[first_step : first_step + steps]:
        engine.backward({"tokens": batch.chunk(rank_info.world_size)[rank_info.rank]}, step)
        engine.update_weights(engine.clip_gradients(None).item())
    tensors, extra = engine.checkpoint_state()
    if steps:
        saver.save(tensors, step=first_step + steps, samples_consumed=0, extra={"replicas": extra})
    saver.close()
    return to_arrays({"before": state_before, "after": clone_state(), "note": note})


@pytest.mark.parametrize("kind", ["topk", pytest.param("powersgd", marks=pytest.mark.long)])
def test_the_sum_of_residuals_is_kept_if_the_number_of_replicas_changes(tmp_path: Path, kind: str) -> None:
    hook = {"kind": kind, "ratio": 0.05, "rank": 2}
    total: dict[str, Any] = {}  # sums over all replicas
    for ranks in (3, 2, 6, 1):
        results = run_ranks(ranks, restore_train_and_save, make_config(ranks, hook=hook), tmp_path, 2)
        for name in results[0]["before"]:
            if name.startswith("residual."):
                restored = sum(rank["before"][name] for rank in results)
                assert abs(restored - total.get(name, 0 * restored)).max() <= 1e-7, (ranks, name)
                total[name] = sum(rank["after"][name] for rank in results)
        assert (results[0]["note"] is not None) == (ranks != 3)
        assert sum(abs(residual).sum() for residual in total.values()) > 1e-3 or ranks == 1
    # a single replica sends nothing, so it has no residuals
    single_replica = run_ranks(1, restore_train_and_save, make_config(1, hook=hook), tmp_path, 0)[0]
    assert all(not tensor.any() for name, tensor in single_replica["before"].items() if name.startswith("residual."))
    results_without_hook = run_ranks(2, restore_train_and_save, make_config(2), tmp_path, 0)
    assert "dropped" in results_without_hook[0]["note"]


def test_replicas_of_local_sgd_start_from_their_mean_on_another_number_of_replicas(tmp_path: Path) -> None:
    options = {"every": 4, "outer_lr": 0.7, "outer_momentum": 0.9}
    saved = run_ranks(3, restore_train_and_save, make_config(3, local_sgd=options), tmp_path, 2)
    on_three_replicas = run_ranks(3, restore_train_and_save, make_config(3, local_sgd=options), tmp_path, 0)
    on_two_replicas = run_ranks(2, restore_train_and_save, make_config(2, local_sgd=options), tmp_path, 0)
    without_local_sgd = run_ranks(2, restore_train_and_save, make_config(2), tmp_path, 0)
    for name in saved[0]["after"]:
        for restored_rank, saved_rank in zip(on_three_replicas, saved, strict=True):
            assert np.array_equal(restored_rank["before"][name], saved_rank["after"][name])
        mean = sum(rank["after"][name] for rank in saved) / 3
        assert all(abs(rank["before"][name] - mean).max() <= 1e-6 for rank in [*on_two_replicas, *without_local_sgd])
    assert "start from the mean of 3" in on_two_replicas[0]["note"] and on_three_replicas[0]["note"] is None


SYNC_METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"hook": {"kind": "bf16"}},
    "topk": {"hook": {"kind": "topk"}},
    "powersgd 2": {"hook": {"kind": "powersgd", "rank": 2}},
    "powersgd 3": {"hook": {"kind": "powersgd", "rank": 3}},
    "average": {"local_sgd": {"every": 4}},
    "warm-up": {"local_sgd": {"every": 4, "warmup_steps": 9}},
    "nesterov": {"local_sgd": {"every": 4, "outer_momentum": 0.9}},
}
"""Values of the section `parallel`, by method of synchronizing replicas."""


def resume_with_each_method(
    rank_info: RankInfo, folder: Path
) -> dict[tuple[str, str], tuple[str | None, set[str], set[str]]]:
    """Save a checkpoint with each method of `SYNC_METHODS`, and load it with each method.

    Return for each pair of methods: the note of the resume, and the names of the replica state's tensors that this
    replica saved and read.
    """
    import torch.distributed as dist

    from pipeline.checkpoint.checkpointer import Checkpointer

    engines = {name: create_engine(rank_info, make_config(2, **parallel)) for name, parallel in SYNC_METHODS.items()}
    group = dist.new_group(backend="gloo")
    results = {}
    for saving_method, engine in engines.items():
        saver = Checkpointer(
            folder / saving_method,
            group,
            keep=9,
            background=False,
            manifest_entries={"layout": {}},
            on_saved=lambda *_: None,
        )
        tensors, extra = engine.checkpoint_state()
        saver.save(tensors, step=1, samples_consumed=0, extra={})
        saver.close()
        saved_names = {name for name in tensors if not name.startswith(("model.", "optimizer."))}
        for loading_method, loading_engine in engines.items():
            read_names: set[str] = set()

            def read_and_record(state: Any, names: set[str] = read_names, saver: Checkpointer = saver) -> None:
                names.update(state)
                saver.read_tensors(1, state)

            saver.restore(loading_engine.state_dict(), lambda *_: None)
            note = loading_engine.finish_loading(extra, read_and_record)
            results[saving_method, loading_method] = (note, saved_names, read_names)
    return results


@pytest.mark.story
def test_a_resume_lists_the_replica_state_that_it_drops(tmp_path: Path) -> None:
    """For each pair of methods, the note lists exactly the saved tensors that no replica reads."""
    results = run_ranks(2, resume_with_each_method, tmp_path)
    for (saving_method, loading_method), (note, *_) in results[0].items():
        pair = (saving_method, loading_method)
        saved_names = set.union(*(rank[pair][1] for rank in results))
        read_names = set.union(*(rank[pair][2] for rank in results))
        expected_texts = {
            "residuals of 2 replicas are dropped" if ".residual." in name
            else {"start": "PowerSGD's Q", "outer": "outer optimizer"}.get(name.split(".")[0], "the mean of 2")
            for name in saved_names - read_names
        }  # fmt: skip
        parts = note.split("; ") if note else []
        assert len(parts) == len(expected_texts), (pair, note)
        assert all(any(text in part for part in parts) for text in expected_texts), (pair, note)
        if saving_method in ("none", "bf16") or saving_method == loading_method:
            assert note is None, (pair, note)


def check_skipped_step(rank_info: RankInfo, config: Config) -> bool:
    """Train two steps, and skip a third one, whose gradient is not finite.

    Return True if the skipped step leaves the residuals and PowerSGD's Q unchanged.
    """
    import torch

    engine = create_engine(rank_info, config)
    for step, batch in list(enumerate(make_batches(config), 1))[:3]:
        hook = engine.replica_sync
        before = {name: tensor.clone() for name, tensor in {**hook.residual, **hook.powersgd_q}.items()}
        if step == 3:
            with torch.no_grad():
                engine.parts[0].get_parameter("lm_head.weight")[0, 0] = float("nan")
        engine.backward({"tokens": batch.chunk(rank_info.world_size)[rank_info.rank]}, step)
        norm = engine.clip_gradients(None).item()
        engine.update_weights(norm, is_good=step != 3)
        after = {**hook.residual, **hook.powersgd_q}
        is_unchanged = all(torch.equal(tensor, before[name]) for name, tensor in after.items())
        if step == 3:
            return is_unchanged and norm != norm  # the norm is NaN
        assert not is_unchanged
    return False


@pytest.mark.parametrize("kind", ["topk", "powersgd"])
def test_skipped_steps_do_not_change_the_residuals(kind: str) -> None:
    config = make_config(2, hook={"kind": kind, "ratio": 0.05, "rank": 2})
    assert run_ranks(2, check_skipped_step, config) == [True, True]


def count_packed_tensors(rank_info: RankInfo, config: Config) -> tuple[int, int, int]:
    """Run one step and count the tensors into which PowerSGD packs values for an all-reduce.

    Return how many tensors the backward pass creates, and how many of them exist after the backward pass and after the
    update of the weights.
    """
    from pipeline.parallel import replica_sync

    engine = create_engine(rank_info, config)
    original_pack = replica_sync._pack
    references: list[Any] = []

    def pack_and_record(tensors: Any) -> Any:
        tensor = original_pack(tensors)
        references.append(weakref.ref(tensor))
        return tensor

    replica_sync._pack = pack_and_record
    engine.backward({"tokens": make_batches(config)[0].chunk(rank_info.world_size)[rank_info.rank]}, 1)
    after_backward = sum(reference() is not None for reference in references)
    engine.update_weights(engine.clip_gradients(None).item())
    deadline = time.monotonic() + 30  # Gloo's threads may release their references later
    while (after_update := sum(reference() is not None for reference in references)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(references), after_backward, after_update


def test_powersgd_keeps_packed_tensors_until_the_update() -> None:
    """On a GPU, callbacks read packed tensors on another stream.

    If a packed tensor were freed earlier, its memory could be reused before the callback has read it.
    """
    config = make_config(2, hook={"kind": "powersgd", "rank": 2})
    for created, after_backward, after_update in run_ranks(2, count_packed_tensors, config):
        assert created == after_backward > 2 and after_update == 0

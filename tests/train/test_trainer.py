"""Tests of the trainer: steps compared with plain torch code, precisions, compilation, resumes and epochs."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode, UserError
from pipeline.base.files import read_jsonl
from pipeline.config.sections import Config
from pipeline.data.manifest import count_training_steps, load_manifest
from pipeline.data.samples import TokenDataset
from pipeline.parallel.mesh import resolve_layout
from pipeline.parallel.traffic import count_traffic
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from tests.support.events import read_event_lines
from tests.support.ranks import run_ranks
from tests.support.tiny import make_run, run_stage_on_rank
from tests.support.tiny_training import tiny_config
from tests.train.test_exact import check_same_result, create_run, interrupt_training, read_steps


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a run and return its data directory. All runs of this module use this data."""
    return make_run(tmp_path_factory.mktemp("data")).data_dir


def train_in_plain_torch(rank_info: RankInfo, path: Path, steps: int) -> list[tuple[float, float]]:
    """Train the run at `path` in plain torch, on one rank and without micro-batches.

    Return the loss and the gradient norm of each step.
    """
    import numpy as np
    import torch
    from torch.nn.functional import cross_entropy

    from pipeline.data.manifest import load_manifest
    from pipeline.data.sample_order import compute_index_range
    from pipeline.model.decoder import Decoder, init_weights
    from pipeline.train.lr_schedule import compute_learning_rate

    run = Run.open(path)
    config = run.config
    manifest = load_manifest(run.data_dir)
    length = config.data.sequence_length
    samples = []
    for shard in manifest.train:
        tokens = np.fromfile(run.data_dir / shard.file, shard.dtype, shard.tokens, offset=shard.offset).astype(np.int64)
        samples += [tokens[i : i + length + 1] for i in range(0, len(tokens) - length, length)]
    model = Decoder(config.model, manifest.vocab_size, length)
    init_weights(model, config.run.seed, config.model.initializer_range)
    decayed_parameters = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    other_parameters = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    weight_decay = config.optimizer.weight_decay
    optimizers: list[torch.optim.Optimizer] = []
    if config.optimizer.name == "muon":
        matrices = [
            parameter for name, parameter in model.named_parameters() if parameter.ndim == 2 and "layers" in name
        ]
        optimizers.append(torch.optim.Muon(matrices, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
        names_of_adamw = ("model.embed_tokens.weight", "lm_head.weight")  # the other matrices are updated by Muon
        decayed_parameters = [model.get_parameter(name) for name in names_of_adamw]
    groups = [
        {"params": decayed_parameters, "weight_decay": weight_decay},
        {"params": other_parameters, "weight_decay": 0.0},
    ]
    if config.optimizer.name == "sgd":
        optimizers.append(torch.optim.SGD(groups, momentum=0.9))
    else:
        optimizers.append(torch.optim.AdamW(groups, betas=config.optimizer.betas, eps=config.optimizer.eps))
    results = []
    for step in range(1, steps + 1):
        global_batch = config.train.global_batch
        sample_indices = compute_index_range(config.run.seed, (step - 1) * global_batch, global_batch, len(samples))
        batch = torch.from_numpy(np.stack([samples[i] for i in sample_indices]))
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = compute_learning_rate(config.optimizer, step, steps)
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        gradient_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm or 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        results.append((loss.item(), gradient_norm.item()))
    return results


@pytest.mark.parametrize(
    ("world_size", "micro_batch", "optimizer"),
    [
        (1, 8, "adamw"),
        (1, 2, "adamw"),
        (2, 4, "adamw"),
        (2, 1, "adamw"),
        (4, 2, "adamw"),
        (2, 4, "sgd"),
        (2, 4, "muon"),
    ],
)
def test_steps_equal_plain_torch_code(
    tmp_path: Path, data: Path, world_size: int, micro_batch: int, optimizer: str
) -> None:
    """Compare losses and gradient norms.

    A wrong reduction or a wrong scale changes the gradient norm long before it changes the loss.
    """
    overrides = (
        f"optimizer.name={optimizer}",
        "model.dropout=0.0",
        f"train.micro_batch={micro_batch}",
        "train.steps=10",
        "optimizer.clip_norm=0.5",
    )
    run = create_run(tmp_path, "sluice", data, *overrides, f"stages.train.tasks_per_node={world_size}")
    assert set(run_ranks(world_size, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    plain_steps = run_ranks(1, train_in_plain_torch, run.path, 10)[0]
    # Muon's bf16 products amplify rounding differences. test_optimizer.py compares Muon's steps bit by bit.
    tolerance = 1e-5 if optimizer != "muon" else 1e-3
    for (_, loss, gradient_norm, *_), (plain_loss, plain_norm) in zip(read_steps(run), plain_steps, strict=True):
        assert loss == pytest.approx(plain_loss, rel=tolerance)
        assert gradient_norm == pytest.approx(plain_norm, rel=tolerance)
    (ready_event,) = (event for event in read_event_lines(run, "train") if event["event"] == "ready")
    layout = resolve_layout(run.config, world_size, world_size)
    vocab = load_manifest(run.data_dir).vocab_size
    planned_bytes = {group: sent_bytes for group, sent_bytes, _ in count_traffic(run.config, layout, vocab)}
    assert ready_event.get("sent_bytes", {}) == planned_bytes and bool(planned_bytes) == (world_size > 1)
    for line in read_jsonl(run.metrics_file):
        assert ("exposed_comm_s" in line) == (world_size > 1), "only a run on several ranks has a communication time"
        assert world_size == 1 or 0 < line["exposed_comm_s"] < line["step_time_s"]


@pytest.mark.parametrize("precision", ["bf16", "fp16", pytest.param("fp8", marks=pytest.mark.story)])
def test_other_precisions_train_and_resume_exactly(tmp_path: Path, data: Path, precision: str) -> None:
    overrides = (f"train.precision={precision}", "train.steps=14", "checkpoint.every_steps=4")
    undisturbed_run = create_run(tmp_path, "undisturbed", data, *overrides)
    run = create_run(tmp_path, "stopped", data, *overrides)
    assert set(run_ranks(2, run_stage_on_rank, undisturbed_run.path, "train")) == {ExitCode.DONE}
    interrupt_training(run, 2, signal.SIGTERM, step=5, signaled_ranks=[1])
    assert len(read_steps(run)) < 14
    assert set(run_ranks(2, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    check_same_result(run, undisturbed_run)
    losses = [loss for _, loss, *_ in read_steps(undisturbed_run)]
    assert losses[-1] < losses[0] - 1.0


def read_fp16_scale(run: Run) -> float:
    """Return the loss scale in the manifest of the newest checkpoint."""
    newest_checkpoint = sorted(run.checkpoints_dir.glob("step-*"))[-1]
    return float(json.loads((newest_checkpoint / "manifest.json").read_text())["extra"]["scaler"]["scale"])


def test_the_fp16_loss_scale_is_saved_in_the_checkpoint(tmp_path: Path, data: Path) -> None:
    run = create_run(tmp_path, "scaled", data, "train.precision=fp16", "train.steps=3")
    assert set(run_ranks(1, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    assert read_fp16_scale(run) > 1.0


def count_reductions_on_rank(rank_info: RankInfo, path: Path) -> int:
    """Train the run at `path` and return how many gradient buckets were reduced. The model fits into one bucket."""
    import torch
    import torch.distributed as dist

    from pipeline.base.signals import StopFlag
    from pipeline.comm import groups
    from pipeline.data.manifest import load_manifest
    from pipeline.train.trainer import Trainer

    run = Run.open(path)
    world = groups.join_process_group(rank_info, run.config)
    trainer = Trainer(run, load_manifest(run.data_dir), rank_info, world, StopFlag())
    reductions = 0

    def count_and_reduce(state: Any, bucket: Any) -> Any:
        nonlocal reductions
        reductions += 1
        work = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    # DDP checks the annotations of a hook. In this file, annotations are strings, which DDP does not accept.
    count_and_reduce.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    trainer.engine.model.register_comm_hook(None, count_and_reduce)  # type: ignore[operator]
    trainer.fit()
    return reductions


def test_gradients_are_reduced_once_per_step(tmp_path: Path, data: Path) -> None:
    """Each of the two ranks has four micro-batches per step."""
    run = create_run(tmp_path, "counted", data, "train.steps=3", "train.micro_batch=1", "checkpoint.every_steps=50")
    assert run_ranks(2, count_reductions_on_rank, run.path) == [3, 3]


@pytest.mark.timeout(400)
def test_compiled_blocks_have_the_same_losses(tmp_path: Path, data: Path) -> None:
    overrides = ("model.dropout=0.0", "train.steps=4", "model.layers=1")
    uncompiled_run = create_run(tmp_path, "plain", data, *overrides)
    compiled_run = create_run(tmp_path, "compiled", data, *overrides, "train.compile=true")
    for run in (uncompiled_run, compiled_run):
        assert set(run_ranks(1, run_stage_on_rank, run.path, "train", timeout=300)) == {ExitCode.DONE}
    for (_, loss, gradient_norm, *_), (_, expected_loss, expected_norm, *_) in zip(
        read_steps(compiled_run), read_steps(uncompiled_run), strict=True
    ):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert gradient_norm == pytest.approx(expected_norm, rel=1e-4)


def read_determinism_on_rank(rank_info: RankInfo, *configs: Config) -> list[tuple[bool | str | None, ...]]:
    """Configure determinism for each config in turn.

    Return for each config: whether torch and its compiler are deterministic, NCCL_ALGO and NCCL_NVLS_ENABLE.
    """
    import torch
    from torch._inductor import config as compiler

    from pipeline.comm import groups

    results = []
    for config in configs:
        groups.configure_determinism(config)
        nccl_variables = [os.environ.get(name) for name in ("NCCL_ALGO", "NCCL_NVLS_ENABLE")]
        results.append((torch.are_deterministic_algorithms_enabled(), bool(compiler.deterministic), *nccl_variables))
    return results


def test_kernels_and_compiler_are_deterministic_unless_the_config_disables_it() -> None:
    train_sections: tuple[dict[str, Any], ...] = ({"deterministic": False}, {}, {"compile": True})
    configs = [tiny_config(1, train=section) for section in train_sections]
    results = run_ranks(1, read_determinism_on_rank, *configs)[0]
    assert results == [(False, False, None, None), (True, False, "Ring", "0"), (True, True, "Ring", "0")]


def train_with_other_versions(rank_info: RankInfo, path: Path) -> int:
    """Train as if on another GPU and with another version of torch than those of the checkpoint."""
    from pipeline.train import trainer

    versions = trainer.collect_versions()
    trainer.collect_versions = lambda: {**versions, "gpu": "NVIDIA H200", "torch": "3.0"}
    return run_stage_on_rank(rank_info, path, "train")


def test_a_resume_on_another_gpu_or_torch_version_records_old_and_new_values(tmp_path: Path, data: Path) -> None:
    import torch

    run = create_run(tmp_path, "moved", data, "train.steps=3")
    assert set(run_ranks(1, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    run.apply_overrides(["train.steps=4"])
    assert set(run_ranks(1, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    run.apply_overrides(["train.steps=5"])
    assert set(run_ranks(1, train_with_other_versions, run.path)) == {ExitCode.DONE}
    same_versions_event, other_versions_event = read_event_lines(run, "train", "restored")
    assert "versions" not in same_versions_event
    assert other_versions_event["versions"] == f"torch {torch.__version__} → 3.0; gpu None → NVIDIA H200"


def run_without_initialization(rank_info: RankInfo, path: Path, stage: str) -> int:
    """Run a stage, which fails if it generates initial weights instead of loading them from a checkpoint."""
    from pipeline.model import decoder, task

    def fail(*_: Any) -> Any:
        raise AssertionError("the stage generates initial weights")

    decoder.sample_initial_values = task.sample_initial_values = fail  # type: ignore[assignment]
    return run_stage_on_rank(rank_info, path, stage)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resume_and_an_evaluation_generate_no_initial_weights(tmp_path: Path, data: Path, world_size: int) -> None:
    overrides = ("optimizer.schedule=constant", "train.evaluate_every=2")
    undisturbed_run = create_run(tmp_path, "undisturbed", data, "train.steps=5", *overrides)
    run = create_run(tmp_path, "resumed", data, "train.steps=3", *overrides)
    for started_run in (undisturbed_run, run):
        assert set(run_ranks(world_size, run_stage_on_rank, started_run.path, "train")) == {ExitCode.DONE}
    run.apply_overrides(["train.steps=5"])
    for stage in ("train", "evaluate"):
        assert set(run_ranks(world_size, run_without_initialization, run.path, stage)) == {ExitCode.DONE}
    check_same_result(run, undisturbed_run)
    assert [line.get("held_out_loss") for line in read_jsonl(run.metrics_file)] == [
        line.get("held_out_loss") for line in read_jsonl(undisturbed_run.metrics_file)
    ]


def run_with_local_copies(rank_info: RankInfo, path: Path, stage: str) -> int:
    """Run a stage that copies shards to a local disk. The second step waits until all shards have been copied."""
    from pipeline.data.local_copy import LocalCopies
    from pipeline.train.trainer import Trainer

    os.environ["SLUICE_TEST_DISK"] = str(path.parent.parent / "disk")
    created: list[LocalCopies] = []
    original_init = LocalCopies.__init__
    original_step = Trainer.step

    def record_and_init(self: LocalCopies, *arguments: Any) -> None:
        created.append(self)
        original_init(self, *arguments)

    def wait_and_step(self: Any, number: int, batch: Any) -> Any:
        deadline = time.monotonic() + 60
        while number == 2 and created[0]._pending and time.monotonic() < deadline:
            time.sleep(0.01)
        assert number == 1 or not created[0]._pending
        return original_step(self, number, batch)

    LocalCopies.poll_interval_s = 0.01
    LocalCopies.__init__ = record_and_init  # type: ignore
    Trainer.step = wait_and_step  # type: ignore
    return run_stage_on_rank(rank_info, path, stage)


def test_copies_on_a_local_disk_do_not_change_the_result_and_are_removed(tmp_path: Path, data: Path) -> None:
    (tmp_path / "disk").mkdir()
    undisturbed_run = create_run(tmp_path, "undisturbed", data, "train.steps=6")
    run = create_run(tmp_path, "copied", data, "train.steps=6", "site.local_disk=$SLUICE_TEST_DISK")
    assert set(run_ranks(2, run_stage_on_rank, undisturbed_run.path, "train")) == {ExitCode.DONE}
    assert set(run_ranks(2, run_with_local_copies, run.path, "train")) == {ExitCode.DONE}
    check_same_result(run, undisturbed_run)
    (event,) = read_event_lines(run, "train", "local_copy")
    assert event["files"] == len(load_manifest(data).train) and not list((tmp_path / "disk").iterdir())


TWO_EPOCHS = ("train.steps=null", "train.epochs=2", "train.global_batch=100", "train.micro_batch=25", "model.layers=1")


def test_a_run_of_epochs_equals_a_run_of_the_same_number_of_steps(tmp_path: Path, data: Path) -> None:
    run = create_run(tmp_path, "epochs", data, *TWO_EPOCHS)
    sample_count = len(TokenDataset(load_manifest(data).train, run.config.data.sequence_length, data))
    steps = count_training_steps(run.config, run.data_dir)
    assert steps is not None and 100 * (steps - 1) < 2 * sample_count < 100 * steps, (
        "the number of steps must be rounded up"
    )
    assert load_stage_module(run, "train").progress(run).description == f"0/{steps} steps"
    assert set(run_ranks(1, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    run_of_steps = create_run(tmp_path, "steps", data, *TWO_EPOCHS, "train.epochs=null", f"train.steps={steps}")
    assert set(run_ranks(1, run_stage_on_rank, run_of_steps.path, "train")) == {ExitCode.DONE}
    check_same_result(run, run_of_steps)
    assert len(read_steps(run)) == steps
    for invalid_override, expected_text in {
        "train.epochs=1": "larger train.epochs",
        "train.steps=99": "steps and epochs are both given",
    }.items():
        with pytest.raises(UserError, match=expected_text):
            run.apply_overrides([invalid_override])
    assert load_stage_module(run, "train").describe_missing_outputs(run) is None
    run.apply_overrides(["train.epochs=3"])
    steps_of_three_epochs = -(-3 * sample_count // 100)  # rounded up
    assert f"of {steps_of_three_epochs}" in (load_stage_module(run, "train").describe_missing_outputs(run) or "")


def test_the_number_of_steps_is_unknown_before_the_data_is_sharded(tmp_path: Path) -> None:
    empty_data_dir = tmp_path / "none"
    empty_data_dir.mkdir()
    run = make_run(tmp_path, "unsharded", TWO_EPOCHS, empty_data_dir)
    assert load_stage_module(run, "train").progress(run).description == "2 epochs (steps known after shard)"
    assert "unknown" in (load_stage_module(run, "train").describe_missing_outputs(run) or "")

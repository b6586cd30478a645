"""Tests of custom optimizers that update shards of parameters (ELEMENTWISE)."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pipeline.base.errors import ExitCode
from tests.model.test_batch_loss import run_stage_and_return_code
from tests.model.test_user_model import (
    check_equal_steps,
    create_prepared_run,
    train_in_plain_torch,
    train_run,
    write_module_with_optimizer,
)
from tests.support.edits import replace_in_file
from tests.support.errors import raises_error
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest
from tests.train.test_exact import interrupt_training, read_steps

OVERRIDES = ("model.target=own", "optimizer.name=own", "optimizer.schedule=own")
TRUST_RATIO = """

class TrustRatio(torch.optim.NAdam):
    \"\"\"NAdam whose gradients have the norm of the weights, as in LAMB.\"\"\"

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_((1 + parameter.norm()) / (1 + parameter.grad.norm()))
        return super().step(closure)


Optimizer = TrustRatio
"""


def write_module(folder: Path, extra: str = "") -> None:
    """Write images, and a module `own.py` with NAdam and ELEMENTWISE."""
    module = write_module_with_optimizer(folder)
    module.write_text(module.read_text() + extra)
    replace_in_file(module, "CUTS = True", "CUTS = True\nELEMENTWISE = True")


def test_an_elementwise_optimizer_has_the_steps_of_plain_torch_on_every_layout(tmp_path: Path) -> None:
    write_module(tmp_path)
    expected_steps = None
    layouts = [("parallel.zero=1",), ("parallel.zero=3",), ("parallel.tensor=2",), ("parallel.pipeline=2",)]
    for number, overrides in enumerate(layouts):
        run = create_prepared_run(tmp_path, f"layout{number}", *OVERRIDES, *overrides, ranks=2)
        expected_steps = expected_steps or run_ranks(1, train_in_plain_torch, run.path, 10)[0]
        check_equal_steps(train_run(run, 2), expected_steps, str(overrides))


def test_a_stop_does_not_change_a_run_with_a_sharded_optimizer(tmp_path: Path) -> None:
    write_module(tmp_path)
    overrides = (*OVERRIDES, "parallel.zero=3", "train.steps=40")
    undisturbed = create_prepared_run(tmp_path, "undisturbed", *overrides, ranks=2)
    train_run(undisturbed, 2)
    run = create_prepared_run(tmp_path, "stopped", *overrides, ranks=2)
    assert set(interrupt_training(run, 2, signal.SIGTERM, 9, [1])) == {ExitCode.STOPPED}
    assert train_run(run, 2) == read_steps(undisturbed)
    assert compute_run_digest(run) == compute_run_digest(undisturbed)


def test_an_optimizer_that_is_not_elementwise_is_an_error_only_if_parameters_are_sharded(tmp_path: Path) -> None:
    write_module(tmp_path, TRUST_RATIO)
    sharded = create_prepared_run(tmp_path, "sharded", *OVERRIDES, "parallel.zero=2", ranks=2)
    assert set(run_ranks(2, run_stage_and_return_code, sharded.path)) == {"model.optimizer_not_elementwise"}
    whole = create_prepared_run(tmp_path, "whole", *OVERRIDES, ranks=2)
    assert set(run_ranks(2, run_stage_and_return_code, whole.path)) == {""}


@pytest.mark.parametrize("key", ["parallel.zero", "parallel.tensor", "parallel.pipeline"])
def test_a_layout_that_splits_parameters_needs_a_declared_optimizer(tmp_path: Path, key: str) -> None:
    write_module_with_optimizer(tmp_path)
    with raises_error("config.conflict", key, "ELEMENTWISE", "own"):
        create_prepared_run(tmp_path, "undeclared", *OVERRIDES, f"{key}=2", ranks=2)

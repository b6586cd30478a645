"""Tests of how the supervisor determines the cause of a stop and the next action."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.errors import ExitCode
from pipeline.base.signals import LOCAL_DEADLINE
from pipeline.config.sections import RecoveryConfig
from pipeline.config.site import SiteConfig
from pipeline.run.attempts import get_budget_key
from pipeline.run.events import USER_REQUESTS, StageState
from slurm.query.current_job import JobInfo
from slurm.supervise.decision import (
    JobFacts,
    NextAction,
    StopFacts,
    choose_next_action,
    determine_cause,
    has_time_to_restart,
    infer_stop_cause,
)

SITE = SiteConfig()
NO_REQUEUE = SiteConfig(requeue=False)


def make_info(state: str = "RUNNING", restarts: int = 0, **fields: Any) -> JobInfo:
    """Return a batch job as the controller shows it, by default 597 seconds before its time limit."""
    return JobInfo(state, restarts, **{"is_preempted": False, "time_left_s": 597.0, "is_batch": True, **fields})


def make_facts(info: JobInfo | None = None, site: SiteConfig = SITE, **fields: Any) -> StopFacts:
    """Return the facts of a stop: by default, of a preempted batch job that made progress."""
    default = StopFacts(
        cause=ExitCode.PREEMPTED,
        stop_reason=None,
        has_progress=True,
        state=StageState(),
        limits=RecoveryConfig(),
        is_batch=True,
        was_signalled=False,
        job=JobFacts(site, info, is_requeued_on_exit=info is not None and info.is_preempted),
    )
    return replace(default, **fields)


# ---- the cause


@pytest.mark.parametrize(
    ("info", "cause"),
    [
        (make_info(is_preempted=True), ExitCode.PREEMPTED),
        (make_info("PREEMPTED", is_preempted=True), ExitCode.PREEMPTED),
        (make_info("COMPLETING", 1), ExitCode.REQUEUED),
        (make_info("PENDING", 1), ExitCode.REQUEUED),
        (make_info("COMPLETING", 1, is_preempted=True), ExitCode.PREEMPTED),
        (make_info(), ExitCode.STOPPED),
        # The limit is site.signal_s (90 s) + SIGNAL_EARLY_S (70 s), because Slurm may send its signal early.
        (make_info(time_left_s=150.0), ExitCode.TIME_LIMIT),
        (make_info(time_left_s=170.0), ExitCode.STOPPED),
        (make_info(time_left_s=None), ExitCode.STOPPED),
        (make_info("COMPLETING", time_left_s=-1.0), ExitCode.TIME_LIMIT),
        (make_info("TIMEOUT", time_left_s=-1.0), ExitCode.TIME_LIMIT),
        (make_info("TIMEOUT", time_left_s=420.0), ExitCode.TIME_LIMIT),  # the end of a reservation, or another limit
        (make_info("NODE_FAIL"), ExitCode.NODE_FAILURE),
        (make_info("COMPLETING"), ExitCode.CANCELLED),
        (make_info("CANCELLED"), ExitCode.CANCELLED),
        (make_info("COMPLETING", time_left_s=10.0), ExitCode.CANCELLED),
        (make_info("CANCELLED", time_left_s=10.0), ExitCode.CANCELLED),
        (make_info("CANCELLED", is_preempted=True), ExitCode.CANCELLED),  # cancelled in its grace period
        (make_info("COMPLETING", is_preempted=True), ExitCode.CANCELLED),
        (None, ExitCode.STOPPED),
    ],
)
def test_cause_is_inferred_from_the_state_of_the_job(info: JobInfo | None, cause: ExitCode) -> None:
    assert infer_stop_cause(JobFacts(SITE, info)) == cause
    assert determine_cause(ExitCode.STOPPED, JobFacts(SITE, info)) == (cause, None)


def test_completing_job_was_preempted_if_the_site_does_not_requeue() -> None:
    """If the site requeues, a preempted job without a restart was cancelled (see the test above)."""
    info = make_info("COMPLETING", is_preempted=True)
    assert infer_stop_cause(JobFacts(NO_REQUEUE, info)) == ExitCode.PREEMPTED


@pytest.mark.parametrize(
    ("accounted_state", "saw_preemption", "cause"),
    [
        ("REQUEUED", False, ExitCode.REQUEUED),
        ("PREEMPTED", False, ExitCode.PREEMPTED),
        ("NODE_FAIL", False, ExitCode.NODE_FAILURE),
        ("RUNNING", False, ExitCode.REQUEUED),  # accounting may be a few seconds behind
        ("CANCELLED", False, ExitCode.REQUEUED),  # but the controller shows that the job was requeued
        ("RUNNING", True, ExitCode.PREEMPTED),
        (None, False, ExitCode.REQUEUED),
        (None, True, ExitCode.PREEMPTED),
    ],
)
@pytest.mark.parametrize("exit_code", [ExitCode.STOPPED, ExitCode.CRASHED])
def test_requeue_by_an_administrator_is_distinguished_from_a_preemption(
    accounted_state: str | None, saw_preemption: bool, cause: ExitCode, exit_code: ExitCode
) -> None:
    info = make_info("COMPLETING", 1)
    job = JobFacts(SITE, info, accounted_state=accounted_state, saw_preemption=saw_preemption)
    determined_cause, message = determine_cause(exit_code, job)
    assert determined_cause == cause and (message is None) == (exit_code == ExitCode.STOPPED)
    assert get_budget_key(determined_cause) in ("preempted", "node_failure"), (
        "a requeue must not charge the budget of crashes"
    )


@pytest.mark.parametrize(
    ("exit_code", "info", "cause"),
    [
        (ExitCode.PEER_LOST, make_info(), ExitCode.NODE_FAILURE),
        (ExitCode.CRASHED, make_info(), ExitCode.NODE_FAILURE),
        (ExitCode.STOPPED, make_info("NODE_FAIL"), ExitCode.NODE_FAILURE),
        (ExitCode.STOPPED, make_info("COMPLETING", 1), ExitCode.NODE_FAILURE),
        (ExitCode.STOPPED, make_info(), ExitCode.STOPPED),
        (ExitCode.OUT_OF_MEMORY, make_info(), ExitCode.OUT_OF_MEMORY),
        (ExitCode.CRASHED, None, ExitCode.CRASHED),
    ],
)
def test_failed_node_is_the_cause_of_lost_ranks(exit_code: ExitCode, info: JobInfo | None, cause: ExitCode) -> None:
    determined_cause, message = determine_cause(exit_code, JobFacts(SITE, info, failed_nodes=["n2"]))
    assert determined_cause == cause and ("n2" in (message or "")) == (cause == ExitCode.NODE_FAILURE)


@pytest.mark.parametrize("info", [None, make_info()])
def test_cause_is_the_time_limit_if_ranks_stop_at_their_own_deadline(info: JobInfo | None) -> None:
    """Ranks compute a deadline from the remaining time of the job. A crash at the deadline remains a crash."""
    cause, _ = determine_cause(ExitCode.STOPPED, JobFacts(SITE, info), reported_reason=LOCAL_DEADLINE)
    assert cause == ExitCode.TIME_LIMIT
    cause, _ = determine_cause(ExitCode.CRASHED, JobFacts(SITE, info), reported_reason=LOCAL_DEADLINE)
    assert cause == ExitCode.CRASHED


# ---- the next action


@pytest.mark.parametrize(
    ("info", "site", "was_signalled", "action"),
    [
        (make_info(), SITE, False, NextAction.REQUEUE),  # for example after a crash or a hang
        (make_info(), SITE, True, NextAction.REQUEUE),
        (make_info(restarts=1), SITE, True, NextAction.AWAIT_REQUEUE),
        (make_info(restarts=1), NO_REQUEUE, True, NextAction.AWAIT_REQUEUE),
        (make_info(), NO_REQUEUE, True, NextAction.HAND_OVER),
        (make_info("COMPLETING"), NO_REQUEUE, True, NextAction.HAND_OVER),  # the successor checks for a cancellation
        (None, NO_REQUEUE, True, NextAction.HAND_OVER),
        (make_info("CANCELLED"), NO_REQUEUE, True, NextAction.CANCEL),
        (make_info("CANCELLED"), SITE, True, NextAction.CANCEL),
        (make_info("COMPLETING"), SITE, True, NextAction.CANCEL),
        (make_info("COMPLETING", time_left_s=0.0), SITE, True, NextAction.REQUEUE),
        (None, SITE, True, NextAction.END_UNKNOWN_CANCELLATION),  # the signal may come from a cancellation
        (None, SITE, False, NextAction.REQUEUE),
        (make_info(is_preempted=True), SITE, True, NextAction.EXIT_FOR_REQUEUE),
        (make_info(is_preempted=True, restarts=1), SITE, True, NextAction.AWAIT_REQUEUE),
        (make_info(is_preempted=True), NO_REQUEUE, True, NextAction.HAND_OVER),
    ],
)
def test_next_action_of_a_batch_job_whose_stage_may_be_retried(
    info: JobInfo | None, site: SiteConfig, was_signalled: bool, action: NextAction
) -> None:
    assert choose_next_action(make_facts(info, site, was_signalled=was_signalled)).action == action


@pytest.mark.parametrize(
    ("cause", "was_signalled", "has_progress", "action"),
    [
        (ExitCode.DONE, False, True, NextAction.END),
        (ExitCode.STOPPED, False, True, NextAction.END),
        (ExitCode.PREEMPTED, False, True, NextAction.END),  # the allocation is about to end
        (ExitCode.TIME_LIMIT, False, True, NextAction.END),
        (ExitCode.CRASHED, True, True, NextAction.END),
        (ExitCode.CRASHED, False, True, NextAction.RESTART_IN_PLACE),
        (ExitCode.CRASHED, False, False, NextAction.FAIL),
        (ExitCode.NODE_FAILURE, False, False, NextAction.RESTART_IN_PLACE),
        (ExitCode.USER_ERROR, False, True, NextAction.FAIL),
    ],
)
def test_next_action_outside_of_a_batch_job(
    cause: ExitCode, was_signalled: bool, has_progress: bool, action: NextAction
) -> None:
    facts = make_facts(cause=cause, is_batch=False, was_signalled=was_signalled, has_progress=has_progress)
    assert choose_next_action(facts).action == action


@pytest.mark.parametrize(
    ("cause", "fields", "info", "action"),
    [
        (ExitCode.CRASHED, {}, make_info(), NextAction.RESTART_IN_PLACE),
        (ExitCode.HANG, {}, make_info(), NextAction.RESTART_IN_PLACE),
        (ExitCode.PEER_LOST, {}, None, NextAction.RESTART_IN_PLACE),  # the controller does not respond
        (ExitCode.NON_FINITE, {}, make_info(), NextAction.RESTART_IN_PLACE),
        (ExitCode.CRASHED, {"can_restart_in_place": False}, make_info(), NextAction.REQUEUE),
        (ExitCode.CRASHED, {"was_signalled": True}, make_info(), NextAction.REQUEUE),
        (ExitCode.CRASHED, {"has_progress": False}, make_info(), NextAction.FAIL),
        (ExitCode.CRASHED, {}, make_info("COMPLETING", 1), NextAction.AWAIT_REQUEUE),
        (ExitCode.PREEMPTED, {}, make_info(is_preempted=True), NextAction.EXIT_FOR_REQUEUE),
        (ExitCode.NODE_FAILURE, {}, make_info(), NextAction.RESTART_IN_PLACE),  # another node replaces the node
        (ExitCode.BAD_NODE, {}, make_info(), NextAction.RESTART_IN_PLACE),
        (ExitCode.NODE_FAILURE, {"can_restart_in_place": False}, make_info(), NextAction.REQUEUE),
        (ExitCode.BAD_NODE, {"can_restart_in_place": False}, make_info(), NextAction.REQUEUE),
        (ExitCode.OUT_OF_MEMORY, {}, make_info(), NextAction.REQUEUE),
    ],
)
def test_ranks_of_a_batch_job_restart_in_place_only_after_some_causes(
    cause: ExitCode, fields: dict[str, Any], info: JobInfo | None, action: NextAction
) -> None:
    facts = make_facts(info, cause=cause, **{"can_restart_in_place": True, **fields})
    assert choose_next_action(facts).action is action


@pytest.mark.parametrize(("time_left_s", "has_time"), [(math.inf, True), (250.0, True), (200.0, False), (0.0, False)])
def test_a_restart_in_place_needs_time_before_the_signal_of_the_time_limit(time_left_s: float, has_time: bool) -> None:
    assert has_time_to_restart(time_left_s, SiteConfig(signal_s=90)) == has_time


def test_stage_fails_if_the_budget_of_the_cause_is_used_up() -> None:
    """The default budget of crashes is 2."""
    facts = make_facts(cause=ExitCode.CRASHED, state=StageState(used_budgets={"crash": 2}))
    decision = choose_next_action(facts)
    assert decision.action is NextAction.FAIL and "recovery.budgets.crash: 2" in str(decision.reason)


job_infos = st.none() | st.builds(
    JobInfo,
    state=st.sampled_from(["RUNNING", "COMPLETING", "CANCELLED", "PREEMPTED", "TIMEOUT", "NODE_FAIL", "PENDING"]),
    restarts=st.integers(0, 2),
    is_preempted=st.booleans(),
    time_left_s=st.none() | st.floats(-10, 1000),
    is_batch=st.just(True),
)
stop_facts = st.builds(
    StopFacts,
    cause=st.sampled_from(ExitCode),
    stop_reason=st.sampled_from([None, "SIGTERM", "SIGUSR2", *USER_REQUESTS]),
    has_progress=st.booleans(),
    state=st.builds(
        StageState,
        used_budgets=st.dictionaries(st.sampled_from(["preempted", "crash", "hang"]), st.integers(0, 5)),
        restarts_without_progress=st.integers(0, 5),
    ),
    limits=st.just(RecoveryConfig()),
    is_batch=st.booleans(),
    was_signalled=st.booleans(),
    job=st.builds(
        JobFacts, site=st.sampled_from([SITE, NO_REQUEUE]), info=job_infos, is_requeued_on_exit=st.booleans()
    ),
    can_restart_in_place=st.booleans(),
)


@settings(deadline=None, max_examples=500)
@given(stop_facts)
def test_next_action_is_consistent_with_the_facts_for_any_facts(facts: StopFacts) -> None:
    decision = choose_next_action(facts)
    job = facts.job
    assert (decision.reason is not None) == (decision.action is NextAction.FAIL)
    if facts.stop_reason in USER_REQUESTS:
        assert decision.action is NextAction.END, "a stage that a user stopped must not be retried"
    if not facts.is_batch:
        assert decision.action in (NextAction.END, NextAction.FAIL, NextAction.RESTART_IN_PLACE)
    elif decision.action is NextAction.RESTART_IN_PLACE:
        assert facts.can_restart_in_place and not facts.was_signalled and not job.was_requeued
    if decision.action in (NextAction.REQUEUE, NextAction.EXIT_FOR_REQUEUE):
        assert job.site.requeue and not job.was_requeued
        assert job.info is None or job.info.state != "CANCELLED", "a cancelled job must not be requeued"
        assert job.info is not None or not facts.was_signalled, "the job may have been cancelled"
    if decision.action is NextAction.HAND_OVER:
        assert not job.site.requeue

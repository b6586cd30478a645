"""The supervisor of a job: it starts the ranks of a stage, watches them, and decides what happens when they stop.

Ranks compute, save and exit with a code; they never requeue. For each attempt, the supervisor:

1. starts the ranks and forwards requests to stop (slurm/supervise/launch.py);
2. finds out how they ended, from their exit codes and reports (slurm/supervise/attempt_end.py) and from Slurm;
3. writes the end to events.jsonl, and chooses the next action (slurm/supervise/decision.py);
4. restarts the ranks in place, requeues the job, leaves the stage to a successor job, or ends it.

A stage is done when its outputs validate. If all ranks exit with 0 and an output is missing, the stage has failed.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.base.dist_env import (
    TIME_LEFT_VARIABLE,
    RankInfo,
    is_in_allocation,
    read_allocated_hosts,
    read_granted_tasks,
    read_rank_info,
)
from pipeline.base.errors import ExitCode, UserError
from pipeline.base.signals import StopFlag
from pipeline.config.stages import STAGES
from pipeline.run import attempts, stages
from pipeline.run.directory import Run
from pipeline.run.events import (
    USER_REQUESTS,
    AttemptEvent,
    Cancelled,
    Done,
    Failed,
    HandedOver,
    Requeued,
    Retried,
    RetryEvent,
    Started,
    Stopped,
    Stopping,
)
from slurm.query import capacity, current_job, preemption
from slurm.query.current_job import JobInfo
from slurm.query.run_jobs import job_identity
from slurm.submit.sbatch import record_own_job
from slurm.submit.site_environment import apply_site_environment
from slurm.supervise import succession
from slurm.supervise.attempt_end import (
    AttemptEnd,
    close_open_attempt,
    find_failure,
    find_hung_rank,
    list_reports,
    measure_log_sizes,
    read_progress_marker,
)
from slurm.supervise.background import EvaluationSubmitter, evaluates_one_checkpoint, run_followers
from slurm.supervise.decision import (
    JobFacts,
    NextAction,
    StopFacts,
    choose_next_action,
    determine_cause,
    may_have_lost_node,
)
from slurm.supervise.launch import RankExit, RankLauncher, create_launcher

POLL_S = 0.05
LOCK_POLL_S = 1.0
"""Each attempt to take a lock is a request to the file system's server."""
REQUEST_POLL_S = 0.5
REQUEUE_EXIT_WAIT_S = 120.0
"""How long a requeued job waits for Slurm to end this run of it."""
LOCK_WAIT_S = 900.0
"""How long to wait for the ranks of the previous attempt after Slurm reported its end. A rank may hang in the kernel
because its file system does not respond, and the locks of a dead node may be released late."""
JOB_INFO_WAIT_S = 3600.0
"""How long to query a controller that does not respond, before the job is requeued. If its time limit is later, until
`JOB_INFO_RESERVE_S` before that."""
JOB_INFO_RESERVE_S = 300.0
JOB_INFO_MAX_PAUSE_S = 60.0
"""The longest pause between two such queries."""
STOP_GRACE_S = 600.0
"""How long ranks may take to exit after a request to stop, in addition to the save (`recovery.save_s`)."""
SIGNAL_SPREAD_S = 2.0
"""Signals that are sent to all processes of a job at once arrive within this time."""
PEER_EXIT_WAIT_S = 5.0
"""How long the other ranks may take to exit by themselves after one failed, before they are killed."""


class Supervisor:
    """Supervises one stage of one run in this job. Two attempts never run at the same time.

    Args:
        run: the run.
        stage: the stage.
        flag: set by the signals that stop this process.
    """

    def __init__(self, run: Run, stage: str, flag: StopFlag) -> None:
        self.run = run
        self.stage = stage
        self.flag = flag
        self.stage_module = stages.load_stage_module(stage)
        self.stage_spec = STAGES[stage]
        self.rank_info: RankInfo = read_rank_info(os.environ)
        self.on_slurm = is_in_allocation(os.environ)
        self.nodes = read_allocated_hosts(os.environ)
        self.task = stages.get_array_task(stage, self.rank_info)
        self.job_id = self.rank_info.submitted_as or str(os.getpid())
        self.evaluations = EvaluationSubmitter(run)
        self.is_batch = self.on_slurm and os.environ.get("ENVIRONMENT") == "BATCH"
        self.job_start_time = ""
        self.identity: dict[str, Any] = {}
        self._log_sizes: dict[Path, int] = {}
        self.job_end_time: float | None = None
        """When the job's time limit ends, by this node's monotonic clock; clocks of nodes may differ."""
        info = self._read_job_info() if self.on_slurm and self.rank_info.job_id else None
        if info is not None:
            self.is_batch = info.is_batch
            self.job_start_time = info.start
            self.identity = job_identity(os.environ.get("SLURM_JOB_NAME", ""), job_submitted=info.submit_time)
            if info.time_left_s is not None:
                self.job_end_time = time.monotonic() + info.time_left_s

    def supervise(self) -> ExitCode:
        """Run the stage until it is done or cannot continue in this job. Return the exit code.

        Raises:
            UserError: if the stage may not start.
        """
        run = self.run
        if self.on_slurm:
            with suppress(OSError):
                record_own_job(run, self.stage, self.rank_info.job_id or "")
        lock = self._lock_stage()
        has_followers = not self._leaves_outputs_to_others()
        with run_followers(run, self.stage, self.nodes, self.on_slurm) if has_followers else nullcontext():
            ended, retry_facts = self._run_attempts(lock)
            if lock is not None:
                os.close(lock)
            return ended.cause if retry_facts is None else self._exit_for_retry(ended, retry_facts)

    # ---- before the first attempt

    def _lock_stage(self) -> int | None:
        """Take the stage's lock and return its file descriptor.

        Returns:
            The file descriptor. None if the previous attempt, which this job should continue, still holds the lock, or
            a stop was requested while waiting for it.

        Raises:
            UserError: if another job or process runs the stage.
        """
        run = self.run
        stage = self.stage
        job = self.rank_info.job_id or ""
        previous_job = job if self.rank_info.restart_count else succession.find_predecessor(run, stage, job)
        last_start = attempts.load_stage_state(run, stage, self.task).start_event
        last_job = last_start.slurm_job if last_start is not None else None
        is_continued = self.is_batch and last_job is not None and last_job == previous_job
        timeout_s = max(self.stage_spec.lock_timeout_s, LOCK_WAIT_S if is_continued else 0.0) if self.on_slurm else 0.0
        lock = run.lock_stage(stage, self.task)
        deadline = time.monotonic() + timeout_s
        while lock is None and time.monotonic() < deadline:
            if is_continued and (self.flag or _read_request(run)):
                break
            time.sleep(LOCK_POLL_S)
            lock = run.lock_stage(stage, self.task, 0.0)
        if lock is None and not is_continued:
            raise UserError("run.stage_running", f"{stage} of {run.name} is already running ({run.lock_holder(stage)})")
        return lock

    def _check_start(self) -> tuple[ExitCode, str] | None:
        """Return the exit code and the reason if the stage need not or may not start; None if it may."""
        run = self.run
        if (refusal := close_open_attempt(run, self.stage, self.rank_info, self.task)) is not None:
            return refusal
        if self.is_batch and (reason := succession.take_over(run, self.stage, self.rank_info)) is not None:
            return ExitCode.CANCELLED, reason
        if not self._leaves_outputs_to_others() and self.stage_module.missing_outputs(run) is None:
            # the job was submitted twice, or by the user
            return ExitCode.DONE, self.stage_module.progress(run).description
        return None

    def _leaves_outputs_to_others(self) -> bool:
        """Return True if another job completes the outputs: this is a task of shard, or evaluates one checkpoint."""
        return self.task is not None or evaluates_one_checkpoint(self.run, self.job_id)

    # ---- attempts

    def _run_attempts(self, lock: int | None) -> tuple[AttemptEnd, StopFacts | None]:
        """Run attempts until the stage ends here.

        Returns:
            How the last attempt ended, and the facts about it if the queue should retry the stage; otherwise None.
        """
        run = self.run
        stage = self.stage
        run.check_not_cancelled()
        if self.on_slurm:
            apply_site_environment(run.config.site, self.rank_info.job_id)
        if (refusal := self._check_start()) is not None:
            cause, reason = refusal
            print(f"{stage} is not tried again ({cause.name.lower()}): {reason}", flush=True)
            self.cancel_unneeded_jobs(is_done=cause == ExitCode.DONE)
            return AttemptEnd(cause), None
        while True:
            marker = read_progress_marker(run, stage)
            ended = self._run_attempt(lock, marker)
            facts = StopFacts(
                cause=ended.cause,
                stop_reason=ended.stop_reason,
                has_progress=read_progress_marker(run, stage) != marker,
                state=attempts.load_stage_state(run, stage, self.task),
                limits=run.config.recovery,
                is_batch=self.is_batch,
                was_signalled=bool(self.flag),
                job=JobFacts(run.config.site, restart_count=self.rank_info.restart_count),
            )
            decision = choose_next_action(facts)
            self._write_end(ended, decision.reason)
            if decision.action in (NextAction.END, NextAction.FAIL):
                self.cancel_unneeded_jobs(is_done=ended.cause == ExitCode.DONE)
                return ended, None
            if decision.action is not NextAction.RESTART_IN_PLACE:
                return ended, facts
            self._write_retry(Retried, ended.cause, facts.has_progress)
            print(f"{stage}: {ended.cause.name.lower()}; restarting from the newest checkpoint", flush=True)

    def _run_attempt(self, lock: int | None, progress_marker: str) -> AttemptEnd:
        """Start the ranks once and return how they ended.

        Args:
            lock: the file descriptor of the stage's lock; None to start no ranks, because it is not available.
            progress_marker: the progress of the stage before the attempt.
        """
        run = self.run
        stage = self.stage
        size = self._count_ranks()
        attempt = run.count_attempts(stage) + 1
        self._write_event(
            Started, attempt=attempt, ranks=size, host=os.uname().nodename, pid=os.getpid(),
            slurm_job=self.rank_info.job_id, restarts=self.rank_info.restart_count, standing=progress_marker,
            **self.identity,
        )  # fmt: skip
        if lock is None:
            return self._end_without_lock(attempt)
        for report in list_reports(run, stage, "*", self.task):
            report.unlink()
        if self.on_slurm and (reason := capacity.find_placement_problem(run, stage, size)) is not None:
            fields = {"attempt": attempt, "cause": "placement", "message": reason}
            return AttemptEnd(ExitCode.USER_ERROR, fields=fields)
        start_time = time.monotonic()
        if self.job_end_time is not None:
            os.environ[TIME_LEFT_VARIABLE] = str(max(0.0, self.job_end_time - start_time))
        try:
            launcher = create_launcher(run, stage, size, lock, on_slurm=self.on_slurm, task=self.task)
        except UserError as error:
            return AttemptEnd(ExitCode.USER_ERROR, fields={"attempt": attempt, "message": str(error)})
        self._log_sizes = measure_log_sizes(run, stage)
        try:
            launcher.start()
            ended = self._watch(launcher)
        finally:
            launcher.kill()  # does nothing unless the lines above failed
            late_request = _take_request(run)
        if late_request is not None and ended.stop_reason not in USER_REQUESTS:
            # the request came after another stop or a failure; it takes precedence
            ended.stop_reason = late_request
            if ended.cause == ExitCode.STOPPED:
                ended.fields["cause"] = late_request
        reason = None
        if ended.cause == ExitCode.DONE and not self._leaves_outputs_to_others():
            reason = self.stage_module.missing_outputs(run)
        if reason is not None:
            fields = {"cause": "outputs", "message": f"all ranks exited with 0, but {reason}"}
            ended = AttemptEnd(ExitCode.CRASHED, ended.stop_reason, fields)
        elif self.on_slurm:
            self._refine_cause(ended)
        ended.fields = {"attempt": attempt, **ended.fields, "seconds": round(time.monotonic() - start_time, 3)}
        return ended

    def _count_ranks(self) -> int:
        size = 1 if self.task is not None else stages.count_ranks(self.run, self.stage, len(self.nodes) or None)
        if self.stage_spec.is_array and self.on_slurm and (granted := read_granted_tasks(os.environ)) is not None:
            tasks_per_node, _ = granted
            size = min(size, sum(tasks_per_node))  # the job behind the array has one task; any number works
        return size

    def _end_without_lock(self, attempt: int) -> AttemptEnd:
        """Return the end of an attempt that started no ranks, because the previous attempt still holds the lock.

        Either the wait was interrupted, or the node of the previous attempt is considered lost.
        """
        stop_reason = _take_request(self.run) or self.flag.reason
        holder = self.run.lock_holder(self.stage) or "it has been released since"
        message = f"no ranks were started, because the previous attempt still held the stage's lock ({holder})"
        fields = {"attempt": attempt, "message": message} | ({"cause": stop_reason} if stop_reason else {})
        ended = AttemptEnd(ExitCode.STOPPED if stop_reason else ExitCode.NODE_FAILURE, stop_reason, fields)
        self._refine_cause(ended)
        return ended

    def _watch(self, launcher: RankLauncher) -> AttemptEnd:
        """Wait for all ranks, forward requests and signals to them, and return how they ended."""
        exits: list[RankExit] = []
        failures: list[RankExit] = []
        stop_reason: str | None = None
        deadline = math.inf
        next_request_poll = 0.0
        grace_s = STOP_GRACE_S + self.run.config.recovery.save_s
        while launcher.is_running:
            now = time.monotonic()
            if stop_reason is None and now >= next_request_poll:
                next_request_poll = now + REQUEST_POLL_S
                stop_reason = _read_request(self.run) or self.flag.reason
                if stop_reason is not None:
                    launcher.send_signal(signal.SIGTERM)
                    deadline = min(deadline, now + grace_s)
                    print(f"stopping ({stop_reason}): the ranks save at their next step boundary", flush=True)
                    self._write_stopping(stop_reason)
            if self.is_batch and self.stage_spec.is_training:
                self.evaluations.poll()
            exits += launcher.poll()
            if not failures:
                failures = [each for each in exits if each.code not in (ExitCode.DONE, ExitCode.STOPPED)]
                if failures:
                    deadline = min(deadline, now + PEER_EXIT_WAIT_S)
            if now >= deadline:
                launcher.kill()
                if not failures:
                    message = f"the ranks did not exit within {grace_s:.0f} s of the request to stop, and were killed"
                    return AttemptEnd(ExitCode.HANG, stop_reason, {"message": message})
            time.sleep(POLL_S)
        return self._interpret_exits(exits, failures, stop_reason, launcher.rank_count)

    def _interpret_exits(
        self, exits: list[RankExit], failures: list[RankExit], stop_reason: str | None, size: int
    ) -> AttemptEnd:
        """Return how the attempt ended.

        Args:
            exits: all ranks.
            failures: the ranks that were the first to exit with an error.
            stop_reason: the request or the signal that was forwarded to them.
            size: the number of ranks.
        """
        run = self.run
        if stop_reason is not None and any(each.code == -signal.SIGTERM for each in failures):
            # a rank was stopped before it had installed its signal handler
            return AttemptEnd(ExitCode.STOPPED, stop_reason, {"cause": stop_reason})
        if failures:
            ended = find_failure(run, self.stage, failures, self.task, self._log_sizes)
            if ended.cause == ExitCode.HANG:
                ended.fields |= find_hung_rank(run, self.stage, self._list_rank_hosts(size)) or {}
            ended.stop_reason = stop_reason
            return ended
        if any(each.code == ExitCode.STOPPED for each in exits):
            request = attempts.load_stage_state(run, self.stage, self.task).stop_request
            cause = stop_reason or (request.signal if request is not None else None) or "signal"
            return AttemptEnd(ExitCode.STOPPED, stop_reason, {"cause": cause})
        return AttemptEnd(ExitCode.DONE, stop_reason)

    def _list_rank_hosts(self, size: int) -> list[str]:
        """Return the host of each rank."""
        if not self.on_slurm:
            return [os.uname().nodename] * size
        per_node = self.run.config.stages.get_resources(self.stage).processes_per_node
        _, distribution = read_granted_tasks(os.environ) or ([], "block")
        node_of_rank = capacity.assign_ranks_to_nodes([per_node] * (size // per_node), distribution)
        return [self.nodes[node] for node in node_of_rank]

    # ---- what Slurm reports about the job

    def _read_job_info(self) -> JobInfo | None:
        return current_job.read_job_info(self.rank_info.job_id or "")

    def _gather_job_facts(self, info: JobInfo | None, exit_code: ExitCode) -> JobFacts:
        """Query what :func:`determine_cause` needs besides `info`."""
        job = JobFacts(self.run.config.site, info, self.rank_info.restart_count, saw_preemption=self._saw_preemption())
        if info is None or not may_have_lost_node(exit_code, job):
            return job
        # Slurm forgets the nodes and the start time of a job once it has requeued it. A node whose slurmd started later
        # had failed, even if it is up again.
        is_requeue_unexplained = job.was_requeued and not info.is_preempted
        since = self.job_start_time if is_requeue_unexplained else ""
        job = replace(job, failed_nodes=current_job.find_failed_nodes(",".join(self.nodes), since))
        if is_requeue_unexplained and not job.failed_nodes and not job.saw_preemption:
            state = current_job.query_accounted_state(self.rank_info.job_id or "", self.job_start_time)
            job = replace(job, accounted_state=state)
        return job

    def _refine_cause(self, ended: AttemptEnd) -> None:
        """Refine the cause by what Slurm reports, unless a user stopped the stage. Record a bad node."""
        info = self._read_job_info()
        if info is not None and info.is_preempted:
            ended.fields["in_grace"] = True  # Slurm may start the job once more, however the attempt ended
        if ended.stop_reason not in USER_REQUESTS:
            job = self._gather_job_facts(info, ended.cause)
            cause, message = determine_cause(ended.cause, job, reported_reason=ended.fields.get("cause"))
            if cause != ended.cause:
                ended.cause = cause
                ended.fields["cause"] = cause.name.lower()
            if message:
                ended.fields["message"] = "\n".join(filter(None, [message, ended.fields.get("message")]))
        if ended.cause == ExitCode.BAD_NODE:
            current_job.record_bad_node(self.run, ended.fields["host"], ended.fields["message"])

    def _saw_preemption(self) -> bool:
        """Return True if this attempt saw a preemption, which Slurm no longer shows once it has requeued the job.

        A preemption with a grace period signals the ranks first, and the batch script with the signal of
        `--signal=B:`. `scontrol requeue` sends TERM to all of them at once.
        """
        state = attempts.load_stage_state(self.run, self.stage, self.task)
        recorded_cause = state.stopping_event.cause if state.stopping_event is not None else None
        if recorded_cause in ("preempted", "time_limit"):
            return bool(recorded_cause == "preempted")
        if self.flag.reason in (signal.SIGUSR1.name, signal.SIGUSR2.name):
            return True
        request = state.stop_request
        if request is None or not str(request.signal).startswith("SIG"):
            return False
        signal_age_s = 0.0 if self.flag.signal_time is None else time.monotonic() - self.flag.signal_time
        return request.timestamp < time.time() - signal_age_s - SIGNAL_SPREAD_S

    # ---- events

    def _write_event(self, event_class: type[AttemptEvent], **fields: Any) -> None:
        self.run.append_event(event_class(stage=self.stage, job_id=self.job_id, task=self.task, **fields))

    def _write_stopping(self, stop_reason: str) -> None:
        """Write at once why the ranks stop, because this process may be killed before they exit."""
        fields: dict[str, Any] = {}
        if self.on_slurm and stop_reason not in USER_REQUESTS:
            cause, _ = determine_cause(
                ExitCode.STOPPED, self._gather_job_facts(self._read_job_info(), ExitCode.STOPPED)
            )
            fields["cause"] = cause.name.lower()
        with suppress(OSError):  # the ranks may still be able to save
            self._write_event(Stopping, by=stop_reason, **fields)

    def _write_end(self, ended: AttemptEnd, no_retry_reason: str | None) -> None:
        """Write how the attempt ended.

        Args:
            ended: the end.
            no_retry_reason: why the stage fails permanently ("" if the message says so already); None if it does not.
        """
        is_final = no_retry_reason is not None
        event_class = attempts.get_end_event(ended.cause, final=is_final)
        if event_class is Stopped and self.run.cancelled_file.exists():
            event_class = Cancelled
        fields = ended.fields if event_class is Done else {"cause": ended.cause.name.lower(), **ended.fields}
        if is_final:
            message = str(fields.get("message", f"stopped ({fields['cause']})")).rstrip()
            fields["message"] = f"{message}\nnot tried again: {no_retry_reason}" if no_retry_reason else message
            fields["final"] = True
        if event_class is Failed:
            print(f"{self.stage} failed: {fields['message']}", file=sys.stderr, flush=True)
        self._write_event(event_class, exit_code=int(ended.cause), **fields)

    def _write_retry(self, event_class: type[RetryEvent], cause: ExitCode, has_progress: bool, **fields: Any) -> None:
        budget = attempts.get_budget_key(cause)
        self._write_event(event_class, cause=cause.name.lower(), budget=budget, progress=has_progress, **fields)

    # ---- the end of a batch job

    def _exit_for_retry(self, ended: AttemptEnd, facts: StopFacts) -> ExitCode:
        """Requeue this job or leave the stage to its successor. Return the exit code when this run of the job ends.

        An exit is final and makes waiting jobs fail, except in the case that slurm/query/preemption.py describes.
        Therefore a requeued job waits here until Slurm ends it.
        """
        job_id = self.rank_info.job_id or ""
        restarts = self.rank_info.restart_count
        signal_count = self.flag.signal_count
        info, query_s = self._wait_for_job_info(signal_count)
        exclude = current_job.excluded_nodes_at_requeue(self.run, self.stage, info) if info else None
        is_requeued_on_exit = info is not None and preemption.is_requeued_on_exit(info, exclude)
        job = replace(facts.job, info=info, is_requeued_on_exit=is_requeued_on_exit)
        action = choose_next_action(replace(facts, was_signalled=bool(self.flag), job=job)).action
        problem = None
        if action is NextAction.CANCEL:
            message = "the job was cancelled, and Slurm does not requeue it"
            ended = AttemptEnd(ExitCode.CANCELLED, fields={"message": message})
            problem = ""
        elif action is NextAction.QUERY_JOB:
            problem = f"Slurm did not report within {query_s:.0f} s whether the job was cancelled"
        elif action is NextAction.HAND_OVER and not self._leaves_outputs_to_others():
            problem = succession.hand_over(self.run, self.stage, job_id)
        elif action is NextAction.REQUEUE and not current_job.requeue_job(job_id, restarts, exclude):
            is_responding = self._read_job_info() is not None
            if is_responding != (info is not None):  # the controller came or went in between
                return self._exit_for_retry(ended, facts)
            problem = f"Slurm did not respond for {query_s:.0f} s, so the job could not be requeued"
            if is_responding:
                problem = "Slurm refused to requeue the job; if the site forbids it, set site.requeue: false"
        if problem is not None:
            self._write_end(ended, problem)
            self.cancel_unneeded_jobs(is_done=False)
            return ended.cause
        by_slurm = {"by": "slurm"} if action in (NextAction.AWAIT_REQUEUE, NextAction.EXIT) else {}
        event_class = HandedOver if action is NextAction.HAND_OVER else Requeued
        self._write_retry(event_class, ended.cause, facts.has_progress, **by_slurm)
        if action in (NextAction.AWAIT_REQUEUE, NextAction.REQUEUE):
            self._sleep_until_signal(REQUEUE_EXIT_WAIT_S, signal_count)  # Slurm ends this run of the job with TERM
        return ended.cause

    def _wait_for_job_info(self, signal_count: int) -> tuple[JobInfo | None, float]:
        """Query the controller about this job until it responds.

        A further signal ends the current pause, because a controller that responds again may send one.

        Args:
            signal_count: the number of signals that were received before.

        Returns:
            The job, or None if the controller did not respond in time; and for how many seconds it was queried.
        """
        start_time = time.monotonic()
        deadline = max(start_time + JOB_INFO_WAIT_S, (self.job_end_time or 0.0) - JOB_INFO_RESERVE_S)
        pause_s = 0.5
        while (info := self._read_job_info()) is None and time.monotonic() < deadline:
            self._sleep_until_signal(pause_s, signal_count)
            pause_s = min(2 * pause_s, JOB_INFO_MAX_PAUSE_S)
            signal_count = self.flag.signal_count
        return info, time.monotonic() - start_time

    def _sleep_until_signal(self, seconds: float, signal_count: int) -> None:
        """Sleep until this process has received more than `signal_count` signals, at most for `seconds`."""
        deadline = time.monotonic() + seconds
        while self.flag.signal_count == signal_count and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def cancel_unneeded_jobs(self, *, is_done: bool) -> None:
        """Cancel jobs that wait for this stage, which ends permanently. Tasks of shard leave this to the job behind."""
        if self.is_batch and self.task is None:
            succession.cancel_unneeded_jobs(self.run, self.stage, self.rank_info, is_done=is_done)


def supervise(run: Run, stage: str, flag: StopFlag) -> ExitCode:
    """Supervise a stage in this process and return the exit code."""
    supervisor = Supervisor(run, stage, flag)
    try:
        return supervisor.supervise()
    except Exception:  # the stage may not start; successors must not try the same again and again
        supervisor.cancel_unneeded_jobs(is_done=False)
        raise


@cache
def _print_once(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _read_request(run: Run) -> str | None:
    """Return the user's request to stop in the run directory; None if there is none or it cannot be read."""
    try:
        if run.cancelled_file.exists():
            return "cancelled"
        return "stop file" if run.stop_file.exists() else None
    except OSError as error:
        _print_once(f"cannot read whether a stop was requested; trying again ({error})")
        return None


def _take_request(run: Run) -> str | None:
    """Return the user's request to stop, and remove the stop file, so that the next start does not stop again.

    Whether the file could be removed decides whether there was a request: one that arrives between a check and the
    removal would be lost.
    """
    request = None
    with suppress(OSError):
        run.stop_file.unlink()
        request = "stop file"
    return "cancelled" if _read_request(run) == "cancelled" else request

"""The supervisor of a job: it starts the ranks of a stage, watches them, and decides what happens when they stop.

Ranks compute, save and exit with a code; they never requeue. For each attempt, the supervisor:

1. starts the ranks, and forwards requests to stop to them (slurm/supervise/launch.py);
2. determines why they stopped, from their exit codes and reports (slurm/supervise/attempt_end.py) and from Slurm;
3. chooses the next action (slurm/supervise/decision.py) and writes the end of the attempt to events.jsonl;
4. restarts the ranks in place, requeues the job, hands over to a successor job, or ends the stage.

A stage is done when its outputs validate. If all ranks exit with 0 and an output is missing, the stage has failed.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
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
from pipeline.checkpoint.catalog import find_newest_step
from pipeline.run import attempts, stages
from pipeline.run.directory import Run
from pipeline.run.events import (
    USER_REQUESTS,
    AttemptEvent,
    Cancelled,
    Done,
    Failed,
    HandedOver,
    RanksStarted,
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
from slurm.supervise.agents import AgentPool
from slurm.supervise.attempt_end import (
    AttemptEnd,
    end_unfinished_attempt,
    find_failure,
    find_hung_rank,
    list_reports,
    measure_log_sizes,
    read_progress_marker,
)
from slurm.supervise.background import EvaluationSubmitter, run_followers, was_submitted_for_checkpoint
from slurm.supervise.decision import (
    JobFacts,
    NextAction,
    StopFacts,
    choose_next_action,
    determine_cause,
    has_time_to_restart,
    may_have_lost_node,
)
from slurm.supervise.launch import RankExit, RankLauncher
from slurm.supervise.launchers import create_agents, create_launcher
from slurm.supervise.next_trials import submit_next_trials, was_replaced

POLL_S = 0.05
"""The pause between two checks of the ranks and of the signals that this process received."""
LOCK_POLL_S = 1.0
"""The pause between two attempts to take the stage's lock. Each attempt sends a request to the file server."""
REQUEST_POLL_S = 0.5
"""The pause between two checks whether the user requested a stop in the run directory."""
REQUEUE_EXIT_WAIT_S = 120.0
"""How long the supervisor of a requeued job waits until Slurm ends its processes."""
LOCK_WAIT_S = 900.0
"""How long to wait for the stage's lock if this job continues the previous attempt. Slurm has reported that the
previous attempt's job ended. But a rank may still hang in the kernel because its file system does not respond, and the
file server may release the locks of a dead node late."""
JOB_INFO_WAIT_S = 3600.0
"""How long to query a controller that does not respond, before the supervisor requests a requeue. If the job's time
limit allows more time, the queries continue until `JOB_INFO_RESERVE_S` before the time limit."""
JOB_INFO_RESERVE_S = 300.0
"""The part of the job's time limit that is reserved for the requeue and the exit after these queries."""
JOB_INFO_MAX_PAUSE_S = 60.0
"""The longest pause between two queries of the controller."""
STOP_GRACE_S = 600.0
"""How long ranks may take to exit after a request to stop, in addition to the time for a save (`recovery.save_s`)."""
SIGNAL_SPREAD_S = 2.0
"""The longest time between the arrivals of a signal at two processes, if Slurm sends it to all processes of a job."""
ANSWER_WAIT_S = 10.0
"""How long an agent may take to answer after an attempt has failed, before its node is considered lost."""
PEER_EXIT_WAIT_S = 5.0
"""After a rank failed, how long the other ranks may take to report and exit before they are killed."""


class Supervisor:
    """Supervises one stage of one run in this job. A lock ensures that two attempts never run at the same time.

    Args:
        run: the run.
        stage: the stage.
        stop_flag: set by the signals that request a stop.
    """

    def __init__(self, run: Run, stage: str, stop_flag: StopFlag) -> None:
        self.run = run
        self.stage = stage
        self.stop_flag = stop_flag
        self.stage_module = stages.load_stage_module(run, stage)
        self.stage_spec = run.config.get_stage(stage)
        self.rank_info: RankInfo = read_rank_info(os.environ)
        """The id of this job, and how often Slurm has restarted the job. The supervisor is not a rank, so it does not
        use the other fields."""
        self.on_slurm = is_in_allocation(os.environ)
        """Whether this process runs in a Slurm job that was started with sbatch or salloc."""
        self.nodes = read_allocated_hosts(os.environ)
        """The nodes of the Slurm job; empty outside a job."""
        self.task = stages.get_array_task(run, stage, self.rank_info)
        """The index of this Slurm array task; None if the job is not part of an array."""
        self.submitted_job_id = self.rank_info.submitted_as or str(os.getpid())
        """The id under which submit.py recorded this Slurm job or local job. If this process was started without
        submit.py, the id of the Slurm job, or outside Slurm the id of the process."""
        self.evaluation_submitter = EvaluationSubmitter(run)
        self.is_batch = self.on_slurm and os.environ.get("ENVIRONMENT") == "BATCH"
        """Whether this is a batch job (sbatch), which Slurm can requeue. Slurm sets ENVIRONMENT=BATCH in batch scripts.
        If the controller responds, `JobInfo.is_batch` replaces this value."""
        self.job_start_time = ""
        """When Slurm started the job: the string that the controller shows; "" if unknown."""
        self.identity: dict[str, Any] = {}
        """Fields of the event `started` that identify this job, because Slurm may reuse the job id for another job."""
        self._agents: AgentPool | None = None
        """The node agents, if agents start the ranks. They live until the last attempt of this job ends."""
        self._failed_nodes: dict[str, None] = {}
        """The nodes of this job that have failed since its start, in order."""
        self._newest_snapshot_step = 0
        """The step of the newest snapshot in memory that an attempt in this job has left."""
        self._log_sizes: dict[Path, int] = {}
        """Sizes of the ranks' logs before the current attempt, in bytes."""
        self.job_deadline: float | None = None
        """When the job reaches its time limit, by the monotonic clock of this node; None if unknown or unlimited."""
        info = self._read_job_info() if self.on_slurm and self.rank_info.job_id else None
        if info is not None:
            self.is_batch = info.is_batch
            self.job_start_time = info.start
            self.identity = job_identity(os.environ.get("SLURM_JOB_NAME", ""), job_submitted=info.submit_time)
            if info.time_left_s is not None:
                self.job_deadline = time.monotonic() + info.time_left_s

    def supervise(self) -> ExitCode:
        """Run the stage until it is done or cannot continue in this job. Return the exit code of this process.

        Raises:
            UserError: if the stage is already running, or the run was cancelled.
        """
        run = self.run
        if self.on_slurm:
            with suppress(OSError):  # Without this event, submit.py can find the job by the key of its submission.
                record_own_job(run, self.stage, self.rank_info.job_id or "")
        lock_fd = self._lock_stage()
        # Jobs that run a part of a stage start no followers, because several of these jobs may run at the same time.
        has_followers = not self._runs_part_of_stage()
        with run_followers(run, self.stage, self.nodes, self.on_slurm) if has_followers else nullcontext():
            try:
                attempt_end, retry_facts = self._run_attempts(lock_fd)
            finally:
                self._close_agents()
            if lock_fd is not None:
                os.close(lock_fd)  # All ranks have exited, so the stage need not stay locked while this process waits.
            if retry_facts is not None:
                return self._exit_for_retry(attempt_end, retry_facts)
            if self.is_batch and self.stage_spec.is_training and run.trial is not None:
                submit_next_trials(run)
            return attempt_end.cause

    # ---- before the first attempt

    def _lock_stage(self) -> int | None:
        """Take the stage's lock, which the ranks of the previous attempt may still hold for a while.

        A batch job continues the previous attempt if Slurm requeued the job, or if the job is the successor of the job
        that ran the previous attempt. Such a job waits for the lock up to `LOCK_WAIT_S` seconds, or up to the
        `lock_timeout_s` of the stage if this is longer. The job stops waiting if a stop is requested. Any other Slurm
        job waits up to `lock_timeout_s`. Outside Slurm, the process waits only for a second (`Run.lock_stage`).

        Returns:
            The file descriptor of the lock. None if this job continues the previous attempt and did not get the lock.

        Raises:
            UserError: if another job or process holds the lock, and this job does not continue its attempt.
        """
        run = self.run
        stage = self.stage
        job_id = self.rank_info.job_id or ""
        was_restarted = self.rank_info.restart_count > 0
        # A requeued job keeps its id, so it continues an attempt of a job with the same id.
        continued_job_id = job_id if was_restarted else succession.find_predecessor(run, stage, job_id)
        last_start = attempts.load_stage_state(run, stage, self.task).start_event
        last_job_id = last_start.slurm_job if last_start is not None else None
        continues_attempt = self.is_batch and last_job_id is not None and last_job_id == continued_job_id
        timeout_s = 0.0
        if self.on_slurm:
            timeout_s = max(self.stage_spec.lock_timeout_s, LOCK_WAIT_S if continues_attempt else 0.0)
        lock_fd = run.lock_stage(stage, self.task)
        deadline = time.monotonic() + timeout_s
        while lock_fd is None and time.monotonic() < deadline:
            if continues_attempt and (self.stop_flag or _read_request(run)):
                break
            time.sleep(LOCK_POLL_S)
            lock_fd = run.lock_stage(stage, self.task, timeout_s=0.0)
        if lock_fd is None and not continues_attempt:
            raise UserError("run.stage_running", f"{stage} of {run.name} is already running ({run.lock_holder(stage)})")
        return lock_fd

    def _check_start(self) -> tuple[ExitCode, str] | None:
        """Return the exit code and the reason if this job must not start the stage; None if it may start the stage.

        The stage must not start if it is done already, if a user stopped it or cancelled the predecessor of this job,
        or if the limits for retries forbid another attempt (`end_unfinished_attempt`).
        """
        run = self.run
        if (refusal := end_unfinished_attempt(run, self.stage, self.rank_info, self.task)) is not None:
            return refusal
        if self.is_batch and (reason := succession.take_over(run, self.stage, self.rank_info)) is not None:
            return ExitCode.CANCELLED, reason
        if self.rank_info.restart_count and run.trial is not None and was_replaced(run, self.submitted_job_id):
            return ExitCode.DONE, "the trial has paused, and a later job continues it"
        if not self._runs_part_of_stage() and self.stage_module.describe_missing_outputs(run) is None:
            # The stage may be done if two jobs were submitted for it, or if the user submitted a job for a finished
            # stage.
            return ExitCode.DONE, self.stage_module.progress(run).description
        return None

    def _runs_part_of_stage(self) -> bool:
        """Return True if this job produces only some outputs of the stage, so that others may be missing afterwards.

        Such jobs are the tasks of a job array (shard), and evaluate jobs for a new checkpoint.
        """
        return self.task is not None or was_submitted_for_checkpoint(self.run, self.submitted_job_id)

    # ---- attempts

    def _run_attempts(self, lock_fd: int | None) -> tuple[AttemptEnd, StopFacts | None]:
        """Run attempts at the stage, until the stage ends or must continue in a requeued job or in a successor job.

        Args:
            lock_fd: the file descriptor of the stage's lock; None if the previous attempt still holds the lock.

        Returns:
            How the last attempt ended. If the stage must continue in a requeued job or in a successor job, also the
            facts about the attempt; otherwise None.
        """
        run = self.run
        stage = self.stage
        run.check_not_cancelled()
        if self.on_slurm:
            apply_site_environment(run.config.site, self.rank_info.job_id)
        if (refusal := self._check_start()) is not None:
            cause, reason = refusal
            print(f"{stage} does not start ({cause.name.lower()}): {reason}", flush=True)
            self.cancel_unneeded_jobs(is_done=cause == ExitCode.DONE)
            return AttemptEnd(cause), None
        while True:
            marker_before = read_progress_marker(run, stage)
            attempt_end = self._run_attempt(lock_fd, marker_before)
            has_newer_snapshot = self._has_newer_snapshot()
            facts = StopFacts(
                cause=attempt_end.cause,
                stop_reason=attempt_end.stop_reason,
                has_progress=read_progress_marker(run, stage) != marker_before or has_newer_snapshot,
                state=attempts.load_stage_state(run, stage, self.task),
                limits=run.config.recovery,
                is_batch=self.is_batch,
                was_signalled=bool(self.stop_flag),
                job=JobFacts(run.config.site, restart_count=self.rank_info.restart_count),
                can_restart_in_place=self._can_restart_in_place(attempt_end),
            )
            # `facts.job` lacks what Slurm reports about the job. Therefore this call only decides whether to end, fail
            # or restart in place. `_exit_for_retry` queries Slurm, and chooses among the other actions.
            decision = choose_next_action(facts)
            self._write_end(attempt_end, decision.reason)
            if decision.action in (NextAction.END, NextAction.FAIL):
                self.cancel_unneeded_jobs(is_done=attempt_end.cause == ExitCode.DONE)
                return attempt_end, None
            if decision.action is not NextAction.RESTART_IN_PLACE:
                return attempt_end, facts
            self._write_retry(Retried, attempt_end.cause, facts.has_progress)
            print(f"{stage}: {attempt_end.cause.name.lower()}; restarting from the newest checkpoint", flush=True)

    def _run_attempt(self, lock_fd: int | None, progress_marker: str) -> AttemptEnd:
        """Start the ranks once, wait for them, and return how they ended.

        If the ranks cannot be started, the reason is the end of the attempt.

        Args:
            lock_fd: the file descriptor of the stage's lock. If it is None, no ranks are started.
            progress_marker: the stage's progress before the attempt (:func:`read_progress_marker`).
        """
        run = self.run
        stage = self.stage
        rank_count = self._count_ranks()
        attempt = run.count_attempts(stage) + 1
        self._write_event(
            Started, attempt=attempt, ranks=rank_count, host=os.uname().nodename, pid=os.getpid(),
            slurm_job=self.rank_info.job_id, restarts=self.rank_info.restart_count, standing=progress_marker,
            **self.identity,
        )  # fmt: skip
        if lock_fd is None:
            return self._end_without_lock(attempt)
        for report in list_reports(run, stage, "*", self.task):
            report.unlink()  # The reports of the previous attempt must not count as reports of this attempt.
        if self.on_slurm and (reason := capacity.find_placement_problem(run, stage, rank_count)) is not None:
            fields = {"attempt": attempt, "cause": "placement", "message": reason}
            return AttemptEnd(ExitCode.USER_ERROR, fields=fields)
        start_time = time.monotonic()
        if self.job_deadline is not None:
            os.environ[TIME_LEFT_VARIABLE] = str(max(0.0, self.job_deadline - start_time))
        try:
            launcher = self._create_launcher(rank_count, lock_fd, attempt)
        except UserError as error:
            return AttemptEnd(ExitCode.USER_ERROR, fields={"attempt": attempt, "message": str(error)})
        self._log_sizes = measure_log_sizes(run, stage)
        try:
            launcher.start()
            attempt_end = self._watch(launcher)
        finally:
            launcher.kill()  # Ranks can only be running here if an exception was raised above.
            late_request = _take_request(run)
        if late_request is not None and attempt_end.stop_reason not in USER_REQUESTS:
            # The user requested a stop after the ranks had begun to stop for another reason. The user's request wins.
            attempt_end.stop_reason = late_request
            if attempt_end.cause == ExitCode.STOPPED:
                attempt_end.fields["cause"] = late_request
        missing = None
        if attempt_end.cause == ExitCode.DONE and not self._runs_part_of_stage():
            missing = self.stage_module.describe_missing_outputs(run)
        if missing is not None and attempt_end.stop_reason is not None:
            # When the request arrived, a command was in its last step, and exited before it wrote its outputs.
            attempt_end = AttemptEnd(ExitCode.STOPPED, attempt_end.stop_reason, {"cause": attempt_end.stop_reason})
            missing = None
        if missing is not None:
            fields = {"cause": "outputs", "message": f"all ranks exited with 0, but {missing}"}
            attempt_end = AttemptEnd(ExitCode.CRASHED, attempt_end.stop_reason, fields)
        elif self.on_slurm:
            self._refine_cause(attempt_end)
        attempt_end.fields = {
            "attempt": attempt,
            **attempt_end.fields,
            "seconds": round(time.monotonic() - start_time, 3),
        }
        return attempt_end

    def _create_launcher(self, rank_count: int, lock_fd: int, attempt: int) -> RankLauncher:
        """Return a launcher for the ranks. Keep the node agents of the previous attempt if enough of them work."""
        agents = self._agents
        if agents is not None:
            agents.poll()  # An agent may have ended since the previous attempt.
            agents.exclude(self._failed_nodes)
            if not agents.can_run(rank_count):
                self._close_agents()
        if self._agents is None:
            self._agents = create_agents(
                self.run, self.stage, rank_count, lock_fd, on_slurm=self.on_slurm, nodes=self.nodes,
                excluded_nodes=list(self._failed_nodes),
            )  # fmt: skip
            if self._agents is not None:
                self._agents.job_deadline = self.job_deadline
        return create_launcher(
            self.run, self.stage, rank_count, lock_fd, on_slurm=self.on_slurm, task=self.task, agents=self._agents,
            attempt=attempt,
        )  # fmt: skip

    def _close_agents(self) -> None:
        """End the node agents."""
        if self._agents is not None:
            self._agents.close()
            self._agents = None

    def _has_newer_snapshot(self) -> bool:
        """Return True if the attempt that just ended left a newer snapshot in memory than all attempts before it."""
        step = self._agents.get_snapshot_step() if self._agents is not None else 0
        if not step:
            return False
        newest_step = max(self._newest_snapshot_step, find_newest_step(self.run.checkpoints_dir))
        self._newest_snapshot_step = max(self._newest_snapshot_step, step)
        return step > newest_step

    def _can_restart_in_place(self, attempt_end: AttemptEnd) -> bool:
        """Return True if this job can restart the ranks.

        The agents have worked, enough nodes have not failed, all ranks have exited, and enough time is left.
        """
        agents = self._agents
        if agents is None or not agents.was_ready or agents.has_running_ranks:
            return False
        if any(self._find_node(host) not in self._failed_nodes for host in agents.list_silent_hosts()):
            return False
        resources = self.run.config.stages.get_resources(self.stage)
        if self.on_slurm and self._count_available_nodes() < resources.min_nodes:
            return False
        if attempt_end.cause == ExitCode.BAD_NODE and self._find_node(attempt_end.fields["host"]) is None:
            return False  # The node that must be replaced is unknown.
        if attempt_end.cause == ExitCode.NODE_FAILURE and not stages.continues_without_node(
            self.run.config, self.stage
        ):
            return False  # Slurm will end the job, because it was submitted without --no-kill.
        if "in_grace" in attempt_end.fields:
            return False
        time_left_s = math.inf if self.job_deadline is None else self.job_deadline - time.monotonic()
        return has_time_to_restart(time_left_s, self.run.config.site)

    def _count_available_nodes(self) -> int:
        """Return on how many nodes of this Slurm job the ranks may run."""
        resources = self.run.config.stages.get_resources(self.stage)
        return resources.count_available_nodes(len(self.nodes), len(self._failed_nodes))

    def _find_node(self, host: str) -> str | None:
        """Return the name in Slurm of a host of this job; None if the host is not part of this job."""
        names = [name for name in (host, host.partition(".")[0]) if name in self.nodes]
        return names[0] if names else None

    def _count_ranks(self) -> int:
        """Return the number of ranks to start."""
        nodes = self._count_available_nodes() if self.nodes else None
        rank_count = 1 if self.task is not None else stages.count_ranks(self.run, self.stage, nodes)
        if self.stage_spec.is_array and self.on_slurm and (granted := read_granted_tasks(os.environ)) is not None:
            # Any number of ranks can do the work of an array stage. So use only the tasks that Slurm granted, which may
            # be fewer than the config requests, for example in the job after the array.
            tasks_per_node, _ = granted
            rank_count = min(rank_count, sum(tasks_per_node))
        return rank_count

    def _end_without_lock(self, attempt: int) -> AttemptEnd:
        """Return the end of an attempt that started no ranks, because the previous attempt still holds the lock.

        If a stop was requested while the job waited for the lock, the cause is STOPPED. Otherwise, it is NODE_FAILURE,
        because the node of the previous attempt is considered lost. Slurm may report a more precise cause.
        """
        stop_reason = _take_request(self.run) or self.stop_flag.reason
        holder = self.run.lock_holder(self.stage) or "released in the meantime"
        message = f"no ranks were started, because the previous attempt still held the stage's lock ({holder})"
        fields = {"attempt": attempt, "message": message} | ({"cause": stop_reason} if stop_reason else {})
        attempt_end = AttemptEnd(ExitCode.STOPPED if stop_reason else ExitCode.NODE_FAILURE, stop_reason, fields)
        self._refine_cause(attempt_end)
        return attempt_end

    def _watch(self, launcher: RankLauncher) -> AttemptEnd:
        """Wait until all ranks have exited, and return how the attempt ended.

        If the user requests a stop, or this process receives a signal, send TERM to the ranks. Kill the ranks if they
        do not exit within `STOP_GRACE_S` + `recovery.save_s` after TERM, or within `PEER_EXIT_WAIT_S` after another
        rank failed.
        """
        exits: list[RankExit] = []
        failures: list[RankExit] = []
        stop_reason: str | None = None
        deadline = math.inf
        are_started = False
        next_request_poll = 0.0
        grace_s = STOP_GRACE_S + self.run.config.recovery.save_s
        while launcher.is_running:
            now = time.monotonic()
            if stop_reason is None and now >= next_request_poll:
                next_request_poll = now + REQUEST_POLL_S
                stop_reason = _read_request(self.run) or self.stop_flag.reason
                if stop_reason is not None:
                    launcher.send_signal(signal.SIGTERM)
                    deadline = min(deadline, now + grace_s)
                    print(f"stopping ({stop_reason}): the ranks save at their next step boundary", flush=True)
                    self._write_stopping(stop_reason)
            if self.is_batch and self.stage_spec.is_training:
                self.evaluation_submitter.poll()
            exits += launcher.poll()
            if not are_started and (processes := launcher.rank_processes):
                are_started = True
                self._write_ranks_started(processes)
            if all(rank_exit.code == ExitCode.PEER_LOST for rank_exit in failures):
                # The exit of the rank that failed first may arrive later than those of ranks on other nodes.
                failures = [rank_exit for rank_exit in exits if rank_exit.code not in (ExitCode.DONE, ExitCode.STOPPED)]
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
        self, exits: list[RankExit], failures: list[RankExit], stop_reason: str | None, rank_count: int
    ) -> AttemptEnd:
        """Return how the attempt ended. All ranks must have exited.

        Args:
            exits: the exits of all ranks.
            failures: the exits of the ranks that were the first to exit with an error; empty if no rank exited with an
                error.
            stop_reason: why this process sent TERM to the ranks: the user's request, or the name of the signal that
                this process received. None if it did not send TERM.
            rank_count: the number of ranks.
        """
        run = self.run
        if stop_reason is not None and any(rank_exit.code == -signal.SIGTERM for rank_exit in failures):
            # TERM killed a rank that had not installed its signal handler yet. The attempt was stopped and did not
            # fail.
            return AttemptEnd(ExitCode.STOPPED, stop_reason, {"cause": stop_reason})
        if failures:
            attempt_end = find_failure(
                run, self.stage, failures, self.task, self._log_sizes, ignored_hosts=self._failed_nodes
            )
            if attempt_end.cause == ExitCode.HANG:
                hosts = self._list_rank_hosts(rank_count)
                attempt_end.fields |= find_hung_rank(run, self.stage, hosts, self._failed_nodes) or {}
            attempt_end.stop_reason = stop_reason
            return attempt_end
        if any(rank_exit.code == ExitCode.STOPPED for rank_exit in exits):
            rank_request = attempts.load_stage_state(run, self.stage, self.task).stop_request
            cause = stop_reason or (rank_request.signal if rank_request is not None else None) or "signal"
            return AttemptEnd(ExitCode.STOPPED, stop_reason, {"cause": cause})
        return AttemptEnd(ExitCode.DONE, stop_reason)

    def _list_rank_hosts(self, rank_count: int) -> list[str]:
        """Return the host of each rank."""
        if not self.on_slurm:
            return [os.uname().nodename] * rank_count
        if self._agents is not None:
            return [self._agents.get_host(rank) for rank in range(rank_count)]
        ranks_per_node = self.run.config.stages.get_resources(self.stage).processes_per_node
        _, distribution = read_granted_tasks(os.environ) or ([], "block")
        node_index_of_rank = capacity.assign_ranks_to_nodes(
            [ranks_per_node] * (rank_count // ranks_per_node), distribution
        )
        return [self.nodes[index] for index in node_index_of_rank]

    # ---- what Slurm reports about the job

    def _read_job_info(self) -> JobInfo | None:
        """Return what the controller reports about this job; None if the controller does not respond."""
        return current_job.read_job_info(self.rank_info.job_id or "")

    def _gather_job_facts(self, info: JobInfo | None, exit_code: ExitCode) -> JobFacts:
        """Return the facts about the job that :func:`determine_cause` needs.

        Slurm is queried about failed nodes only if :func:`may_have_lost_node` returns True.

        Args:
            info: the job as the controller shows it; None if the controller did not respond.
            exit_code: the exit code of the ranks.
        """
        job = JobFacts(self.run.config.site, info, self.rank_info.restart_count, saw_preemption=self._saw_preemption())
        if info is None or not may_have_lost_node(exit_code, job):
            return job
        # If Slurm has requeued the job without showing a preemption, a node may have failed: its slurmd then started
        # after the job. A requeued job no longer shows the nodes and the start time of the previous start, so this
        # method uses the values that were read when this process started.
        is_requeued_without_preemption = job.was_requeued and not info.is_preempted
        since = self.job_start_time if is_requeued_without_preemption else ""
        nodes = [node for node in self.nodes if node not in self._failed_nodes]
        if self._agents is not None and (used_nodes := self._agents.list_used_nodes()):
            nodes = used_nodes  # Other nodes cannot have caused the end of the attempt.
        failed_nodes = current_job.find_failed_nodes(",".join(nodes), since)
        if not failed_nodes and self._agents is not None and exit_code != ExitCode.STOPPED:
            failed_nodes = self._find_lost_nodes()
        elif not failed_nodes and self._agents is not None and is_requeued_without_preemption:
            # Slurm may have requeued the job because a node did not respond, and the node may respond again by now. The
            # ranks may still save, so no agent is given up here.
            failed_nodes = self._agents.list_silent_hosts()
        job = replace(job, failed_nodes=failed_nodes)
        if is_requeued_without_preemption and not job.failed_nodes and not job.saw_preemption:
            state = current_job.query_accounted_state(self.rank_info.job_id or "", self.job_start_time)
            job = replace(job, accounted_state=state)
        return job

    def _find_lost_nodes(self) -> list[str]:
        """Return the nodes with ranks that do not answer, although Slurm has not reported this yet.

        Also give up spare nodes that do not answer.
        """
        agents = self._agents
        assert agents is not None
        agents.wait_for_answers(ANSWER_WAIT_S)
        silent_nodes = [node for host in agents.list_silent_hosts() if (node := self._find_node(host)) is not None]
        # If only the agent has died, the daemon of Slurm on its node still accepts connections.
        unreachable_nodes = current_job.find_unreachable_nodes(agents.list_lost_nodes())
        lost_nodes = {*silent_nodes, *(unreachable_nodes or ())}.difference(self._failed_nodes)
        used_nodes = lost_nodes.intersection(agents.list_used_nodes())
        self._give_up_nodes(sorted(lost_nodes - used_nodes))
        return sorted(used_nodes)

    def _give_up_nodes(self, nodes: Sequence[str]) -> None:
        """Stop using some nodes of this job.

        Inside salloc, the ranks always restart in place, so all nodes are still used if too few would be left.
        """
        failed_nodes = self._failed_nodes | dict.fromkeys(nodes)
        resources = self.run.config.stages.get_resources(self.stage)
        if self.is_batch or len(self.nodes) - len(failed_nodes) >= resources.min_nodes:
            self._failed_nodes = failed_nodes

    def _refine_cause(self, attempt_end: AttemptEnd) -> None:
        """Replace the cause in `attempt_end` by the cause that Slurm reports, if Slurm knows more than the ranks.

        If a user stopped the stage, the cause does not change. If the cause is a bad node, record the node, so that
        later jobs exclude it.
        """
        info = self._read_job_info()
        if info is not None and info.is_preempted:
            # Slurm may requeue a preempted job even if its stage is done. From the field `in_grace` of the end event,
            # the next start of the job recognizes such a requeue (`end_unfinished_attempt`).
            attempt_end.fields["in_grace"] = True
        if attempt_end.stop_reason not in USER_REQUESTS:
            job = self._gather_job_facts(info, attempt_end.cause)
            cause, message = determine_cause(attempt_end.cause, job, reported_reason=attempt_end.fields.get("cause"))
            if cause != attempt_end.cause:
                attempt_end.cause = cause
                attempt_end.fields["cause"] = cause.name.lower()
            if message:
                attempt_end.fields["message"] = "\n".join(filter(None, [message, attempt_end.fields.get("message")]))
            if attempt_end.cause == ExitCode.NODE_FAILURE:
                self._give_up_nodes(job.failed_nodes)
        if attempt_end.cause == ExitCode.BAD_NODE:
            if (node := self._find_node(attempt_end.fields["host"])) is not None:
                self._give_up_nodes([node])
            current_job.record_bad_node(self.run, attempt_end.fields["host"], attempt_end.fields["message"])

    def _saw_preemption(self) -> bool:
        """Return True if the signals of this attempt show that Slurm preempted the job.

        Slurm no longer shows a preemption once the job is requeued. But a preemption with a grace period sends
        other signals than `scontrol requeue`: it sends the signal of `--signal` (USR1 or USR2) to this process, or it
        signals the ranks long before this process. `scontrol requeue` sends TERM to all processes together.

        Slurm also sends the signal of `--signal` before the time limit. So if the event `stopping` of this attempt has
        the cause `preempted` or `time_limit`, which was determined while Slurm still showed it, that event decides.
        """
        state = attempts.load_stage_state(self.run, self.stage, self.task)
        recorded_cause = state.stopping_event.cause if state.stopping_event is not None else None
        if recorded_cause in ("preempted", "time_limit"):
            return bool(recorded_cause == "preempted")
        if self.stop_flag.reason in (signal.SIGUSR1.name, signal.SIGUSR2.name):
            return True
        rank_request = state.stop_request
        if rank_request is None or not str(rank_request.signal).startswith("SIG"):  # the ranks got no signal
            return False
        signal_time = self.stop_flag.signal_time
        signal_age_s = 0.0 if signal_time is None else time.monotonic() - signal_time
        # True if the ranks were signalled long before this process, or before now if this process got no signal.
        return rank_request.timestamp < time.time() - signal_age_s - SIGNAL_SPREAD_S

    # ---- events

    def _write_event(self, event_class: type[AttemptEvent], **fields: Any) -> None:
        """Write an event of the class `event_class` about this job and its stage."""
        event = event_class(stage=self.stage, job_id=self.submitted_job_id, task=self.task, **fields)
        self.run.append_event(event)

    def _write_ranks_started(self, rank_processes: Mapping[int, tuple[str, int]]) -> None:
        """Write the event with the host and the process id of each rank."""
        pids_by_host: dict[str, dict[int, int]] = {}
        for rank, (host, pid) in rank_processes.items():
            pids_by_host.setdefault(host, {})[rank] = pid
        with suppress(OSError):  # The ranks can run without this event.
            assert self._agents is not None
            self._write_event(
                RanksStarted,
                processes=pids_by_host,
                spares=self._agents.list_spare_nodes() or None,
                failed=list(self._failed_nodes) or None,
                replaced=dict(self._agents.replacements) or None,
            )

    def _write_stopping(self, stop_reason: str) -> None:
        """Write the event `stopping` with the reason, because this process may be killed before the ranks exit.

        Args:
            stop_reason: the user's request, or the name of the signal that this process received.
        """
        fields: dict[str, Any] = {}
        if self.on_slurm and stop_reason not in USER_REQUESTS:
            job = self._gather_job_facts(self._read_job_info(), ExitCode.STOPPED)
            cause, _ = determine_cause(ExitCode.STOPPED, job)
            fields["cause"] = cause.name.lower()
        with suppress(OSError):  # Even if the event cannot be written, the ranks may be able to save.
            self._write_event(Stopping, by=stop_reason, **fields)

    def _write_end(self, attempt_end: AttemptEnd, no_retry_reason: str | None) -> None:
        """Write the event that ends the attempt. If the run was cancelled, a stop is recorded as the event `cancelled`.

        Args:
            attempt_end: how the attempt ended.
            no_retry_reason: why the stage fails permanently; "" if the message of `attempt_end` already explains why.
                None if the stage does not fail permanently.
        """
        is_final = no_retry_reason is not None
        event_class = attempts.get_end_event(attempt_end.cause, final=is_final)
        if event_class is Stopped and self.run.cancelled_file.exists():
            event_class = Cancelled
        fields = (
            attempt_end.fields
            if event_class is Done
            else {"cause": attempt_end.cause.name.lower(), **attempt_end.fields}
        )
        if is_final:
            message = str(fields.get("message", f"stopped ({fields['cause']})")).rstrip()
            fields["message"] = f"{message}\nnot retried: {no_retry_reason}" if no_retry_reason else message
            fields["final"] = True
        if event_class is Failed:
            print(f"{self.stage} failed: {fields['message']}", file=sys.stderr, flush=True)
        self._write_event(event_class, exit_code=int(attempt_end.cause), **fields)

    def _write_retry(self, event_class: type[RetryEvent], cause: ExitCode, has_progress: bool, **fields: Any) -> None:
        """Write an event of the class `event_class`, which counts as one of the retries that are allowed for `cause`.

        Args:
            event_class: the class of the event.
            cause: why the attempt ended.
            has_progress: whether the attempt that ended made progress.
            **fields: more fields of the event.
        """
        budget_key = attempts.get_budget_key(cause)
        self._write_event(event_class, cause=cause.name.lower(), budget=budget_key, progress=has_progress, **fields)

    # ---- the end of a batch job

    def _exit_for_retry(self, attempt_end: AttemptEnd, facts: StopFacts) -> ExitCode:
        """Requeue this job, or hand over to its successor job. If neither is possible, end the stage.

        If the job is being requeued, by this method or by Slurm, this method waits until Slurm ends the job, at most
        `REQUEUE_EXIT_WAIT_S` seconds. If this process exited earlier, Slurm would consider the job failed, and jobs
        that depend on its success could never start. If Slurm requeues the job only when it exits
        (slurm/query/preemption.py), this method does not wait.

        Args:
            attempt_end: how the attempt ended.
            facts: the facts from which :func:`choose_next_action` decided that the stage may be retried.

        Returns:
            The exit code of this process.
        """
        job_id = self.rank_info.job_id or ""
        restarts = self.rank_info.restart_count
        signal_count = self.stop_flag.signal_count
        info, query_s = self._wait_for_job_info(signal_count)
        exclude = current_job.excluded_nodes_at_requeue(self.run, self.stage, info) if info else None
        is_requeued_on_exit = info is not None and preemption.is_requeued_on_exit(info, exclude)
        job = replace(facts.job, info=info, is_requeued_on_exit=is_requeued_on_exit)
        facts = replace(facts, can_restart_in_place=False)
        action = choose_next_action(replace(facts, was_signalled=bool(self.stop_flag), job=job)).action
        no_retry_reason = None  # If this remains None, the stage is retried.
        if action is NextAction.CANCEL:
            message = "the job was cancelled, and Slurm does not requeue it"
            attempt_end = AttemptEnd(ExitCode.CANCELLED, fields={"message": message})
            no_retry_reason = ""  # The message already explains why the stage ends.
        elif action is NextAction.END_UNKNOWN_CANCELLATION:
            no_retry_reason = f"Slurm did not report within {query_s:.0f} s whether the job was cancelled"
        elif action is NextAction.HAND_OVER and not self._runs_part_of_stage():
            # Only jobs that run the whole stage have a successor. Array tasks and evaluate jobs for a new checkpoint
            # also write the event `handed_over`, but `resume` submits the missing part of the stage.
            no_retry_reason = succession.hand_over(self.run, self.stage, job_id)
        elif action is NextAction.REQUEUE and not current_job.requeue_job(job_id, restarts, exclude):
            is_responding = self._read_job_info() is not None
            if is_responding != (info is not None):
                # The controller started or stopped responding during the requeue request. The request may have failed
                # only for this reason, so this method starts again.
                return self._exit_for_retry(attempt_end, facts)
            if is_responding:
                no_retry_reason = "Slurm refused to requeue the job; if the site forbids it, set site.requeue: false"
            else:
                no_retry_reason = f"Slurm did not respond for {query_s:.0f} s, so the job could not be requeued"
        if no_retry_reason is not None:
            self._write_end(attempt_end, no_retry_reason)
            self.cancel_unneeded_jobs(is_done=False)
            return attempt_end.cause
        is_requeued_by_slurm = action in (NextAction.AWAIT_REQUEUE, NextAction.EXIT_FOR_REQUEUE)
        requester = {"by": "slurm"} if is_requeued_by_slurm else {}
        event_class = HandedOver if action is NextAction.HAND_OVER else Requeued
        self._write_retry(event_class, attempt_end.cause, facts.has_progress, **requester)
        if action in (NextAction.AWAIT_REQUEUE, NextAction.REQUEUE):
            self._sleep_until_signal(REQUEUE_EXIT_WAIT_S, signal_count)  # Slurm ends a requeued job with TERM.
        return attempt_end.cause

    def _wait_for_job_info(self, signal_count: int) -> tuple[JobInfo | None, float]:
        """Query the controller about this job until it responds.

        A signal to this process ends the pause between two queries. The signal probably comes from Slurm, so the
        controller may respond again.

        Args:
            signal_count: the value of `StopFlag.signal_count` before the call. A later signal ends the first pause.

        Returns:
            Two values: the job as the controller shows it, or None if the controller did not respond in time; and the
            duration of all queries in seconds.
        """
        start_time = time.monotonic()
        deadline = max(start_time + JOB_INFO_WAIT_S, (self.job_deadline or 0.0) - JOB_INFO_RESERVE_S)
        pause_s = 0.5
        while (info := self._read_job_info()) is None and time.monotonic() < deadline:
            self._sleep_until_signal(pause_s, signal_count)
            pause_s = min(2 * pause_s, JOB_INFO_MAX_PAUSE_S)
            signal_count = self.stop_flag.signal_count
        return info, time.monotonic() - start_time

    def _sleep_until_signal(self, seconds: float, signal_count: int) -> None:
        """Sleep for `seconds`, or until this process has received more than `signal_count` signals."""
        deadline = time.monotonic() + seconds
        while self.stop_flag.signal_count == signal_count and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def cancel_unneeded_jobs(self, *, is_done: bool) -> None:
        """Cancel the pending jobs that are not needed after the end of this stage (`succession.cancel_unneeded_jobs`).

        Call this method when the stage is done, or when the stage ends without a retry. In an array task, the method
        does nothing, because the job after the array completes the stage and calls the method. Outside a batch job, it
        also does nothing.

        Args:
            is_done: whether the stage is done.
        """
        if self.is_batch and self.task is None:
            succession.cancel_unneeded_jobs(self.run, self.stage, self.rank_info, is_done=is_done)


def supervise(run: Run, stage: str, stop_flag: StopFlag) -> ExitCode:
    """Supervise a stage in this process and return the exit code.

    If the supervisor raises an error, cancel the pending jobs that depend on this job. The successor of this job would
    fail with the same error, and later stages could never start.

    Args:
        run: the run.
        stage: the stage.
        stop_flag: set by the signals that request a stop.
    """
    supervisor = Supervisor(run, stage, stop_flag)
    try:
        return supervisor.supervise()
    except Exception:  # After any error, the waiting jobs can never start. The error itself is raised again.
        supervisor.cancel_unneeded_jobs(is_done=False)
        raise


@cache
def _print_once(message: str) -> None:
    """Print a message to stderr, but only on the first call with this message, because `cache` skips later calls."""
    print(message, file=sys.stderr, flush=True)


def _read_request(run: Run) -> str | None:
    """Return the request to stop that the user left in the run directory (one of `USER_REQUESTS`).

    Return None if there is no request, or if the directory cannot be read now.
    """
    try:
        if run.cancelled_file.exists():
            return "cancelled"
        return "stop file" if run.stop_file.exists() else None
    except OSError as error:
        _print_once(f"cannot check whether a stop was requested; trying again ({error})")
        return None


def _take_request(run: Run) -> str | None:
    """Return the user's request to stop (one of `USER_REQUESTS`) and remove the stop file; None if there is no request.

    The file is removed, because otherwise the next attempt would stop as well. The removal itself shows whether the
    file existed. With a separate check before the removal, the user could create the file in between. The removal
    would then delete a request that was never read.
    """
    request = None
    with suppress(OSError):
        run.stop_file.unlink()
        request = "stop file"
    return "cancelled" if _read_request(run) == "cancelled" else request

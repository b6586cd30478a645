"""One job's supervisor: starts the ranks of a stage, watches them, and alone decides what their end means.

Ranks compute and leave with a code. From the codes, the error reports that ranks leave in the run directory, the
requests of a person and what Slurm says of the job, the supervisor tells why a stage ended, writes it to events.jsonl,
charges it to its budget (slurm/query/stop_causes.py) and goes on, or leaves with that cause's own exit code. Success is
a matter of outputs: a stage whose ranks all left with 0 and whose outputs do not validate has failed.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from contextlib import nullcontext, suppress
from datetime import datetime
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
from pipeline.base.signals import LOCAL_DEADLINE, StopFlag
from pipeline.config.stages import STAGES
from pipeline.run import attempts, stages
from pipeline.run.directory import Run
from slurm.query import capacity, current_job, stop_causes
from slurm.query import current_job as slurm_job
from slurm.query.job_states import job_identity
from slurm.query.stop_causes import NextAction
from slurm.submit.sbatch import record_own_job
from slurm.supervise import mpi_launch, succession
from slurm.supervise.evaluations import Evaluations
from slurm.supervise.failures import AttemptEnd, find_failure, find_hung_rank, list_reports, measure_log_sizes
from slurm.supervise.followers import run_followers
from slurm.supervise.launch import LocalRanks, RankExit, Ranks, SrunRanks, apply_site_environment

POLL_S = 0.05
LOCK_POLL_S = 1.0
"""Each look is work for the file system's server."""
REQUEST_POLL_S = 0.5
REQUEUED_WAIT_S = 120.0
LOCK_WAIT_S = 900.0
"""How long to wait for the ranks of the attempt before, which Slurm holds for ended: one may hang in the kernel, on a
file system that is away, and the locks of a node that died may go late."""
ANSWER_WAIT_S, NEAR_END_S = 3600.0, 300.0
"""How long at least, and until when before the job's time ends, to ask a controller that does not answer whether the
job was cancelled, before it is requeued."""
ANSWER_POLL_S = 60.0
"""The longest pause between two such questions."""
STOP_GRACE_S = 600.0
"""How long the ranks may take to leave once they were asked to, beside the save (`recovery.save_s`)."""
TOGETHER_S = 2.0
"""Signals that are sent to all processes of a job at once reach them within this time."""
PEERS_LEAVE_S = 5.0
"""After one rank failed, how long the others have to leave by themselves before they are killed."""


class Supervisor:
    """One stage of one run in this job. Ranks are started again in place, or by the queue; never two at once."""

    def __init__(self, run: Run, stage: str, flag: StopFlag) -> None:
        self.run, self.stage, self.flag = run, stage, flag
        self.work, self.row = stages.load_stage_module(stage), STAGES[stage]
        self.rank_info: RankInfo = read_rank_info(os.environ)
        self.on_slurm, self.nodes = is_in_allocation(os.environ), read_allocated_hosts(os.environ)
        self.task = stages.get_array_task(stage, self.rank_info)
        self.job = self.rank_info.submitted_as or str(os.getpid())
        self.evaluations = Evaluations(run)
        self.batch = self.on_slurm and os.environ.get("ENVIRONMENT") == "BATCH"
        self.since, self.identity = "", dict[str, Any]()
        self._begins: dict[Path, int] = {}
        self.ends: float | None = None
        """The end of the job's time; not the hour, for clocks of nodes may differ."""
        facts = slurm_job.read_job_info(self.rank_info.job_id) if self.on_slurm and self.rank_info.job_id else None
        if facts is not None:
            self.batch, self.since = facts.is_batch, facts.start
            self.identity = job_identity(os.environ.get("SLURM_JOB_NAME", ""), job_submitted=facts.submit_time)
            if facts.time_left_s is not None:
                self.ends = time.monotonic() + facts.time_left_s

    def supervise(self) -> ExitCode:
        """Run attempts of the stage until it is done or may not go on here. Raises UserError where it may not start."""
        run, stage = self.run, self.stage
        if self.on_slurm:
            with suppress(OSError):
                record_own_job(run, stage, self.rank_info.job_id or "")
        lock = self._lock()
        with nullcontext() if self._one_of_many() else run_followers(run, stage, self.nodes, self.on_slurm):
            ended, progress = self._attempts(lock)
            if lock is not None:
                os.close(lock)
            return ended.code if progress is None else self._leave(ended, progress)

    def _lock(self) -> int | None:
        """The stage's lock; None where the attempt that this job is to go on from keeps it, or a stop comes meanwhile.

        Raises UserError where somebody else has it.
        """
        run, stage, job = self.run, self.stage, self.rank_info.job_id or ""
        before = job if self.rank_info.restart_count else stop_causes.find_predecessor(run, stage, job)
        last = (attempts.load_stage_state(run, stage, self.task).start_event or {}).get("slurm_job")
        goes_on = self.batch and last is not None and last == before
        patience_s = max(self.row.lock_timeout_s, LOCK_WAIT_S if goes_on else 0.0) if self.on_slurm else 0.0
        lock, deadline = run.lock_stage(stage, self.task), time.monotonic() + patience_s
        while lock is None and time.monotonic() < deadline and not (goes_on and (self.flag or _request(run))):
            time.sleep(LOCK_POLL_S)
            lock = run.lock_stage(stage, self.task, 0.0)
        if lock is None and not goes_on:
            raise UserError("run.stage_running", f"{stage} of {run.name} is already running ({run.lock_holder(stage)})")
        return lock

    def _attempts(self, lock: int | None) -> tuple[AttemptEnd, bool | None]:
        """How the last attempt ended and, where the stage is to go on by the queue, whether that brought something new;
        None where it ends here."""
        run, stage = self.run, self.stage
        run.check_not_cancelled()
        if self.on_slurm:
            apply_site_environment(run.config.site, self.rank_info.job_id)
        refused = stop_causes.close_open_attempt(run, stage, self.rank_info, self.task)
        if refused is None and self.batch and (reason := succession.take_over(run, stage, self.rank_info)) is not None:
            refused = ExitCode.CANCELLED, reason
        if refused is None and not self._one_of_many() and self.work.missing_outputs(run) is None:
            refused = ExitCode.DONE, self.work.progress(run).description  # a person's own job, or one submitted twice
        if refused is not None:
            print(f"{stage} is not tried again ({refused[0].name.lower()}): {refused[1]}", flush=True)
            self.cancel_waiting_jobs(done=refused[0] == ExitCode.DONE)
            return AttemptEnd(refused[0]), None
        while True:
            before = stop_causes.read_progress_marker(run, stage)
            ended = self._attempt(lock, before)
            progress, why_not = stop_causes.read_progress_marker(run, stage) != before, None
            ends_here = ended.code in (ExitCode.DONE, ExitCode.CANCELLED) or ended.stop_reason in attempts.USER_REQUESTS
            if not self.batch:  # here, or inside salloc: an allocation that is taken away has no second attempt
                ends_here |= ended.code in (ExitCode.STOPPED, ExitCode.PREEMPTED, ExitCode.TIME_LIMIT) or bool(
                    self.flag
                )
            if not ends_here:
                so_far = attempts.load_stage_state(run, stage, self.task)
                why_not = attempts.explain_no_retry(so_far, ended.code, progress, run.config.recovery)
            self._write_end(ended, why_not)
            if ends_here or why_not is not None:
                self.cancel_waiting_jobs(done=ended.code == ExitCode.DONE)
                return ended, None
            if self.batch:
                return ended, progress
            self._write_goes_on("retried", ended.code, progress)
            print(f"{stage}: {ended.code.name.lower()}; going on from where the run stands", flush=True)

    def _attempt(self, lock: int | None, before: str) -> AttemptEnd:
        """Start the ranks, once (without the lock none), and tell how that ended. `before`: how the stage stood."""
        run, stage, rank_info = self.run, self.stage, self.rank_info
        size = 1 if self.task is not None else stages.count_ranks(run, stage, len(self.nodes) or None)
        if self.row.is_array and self.on_slurm and (room := read_granted_tasks(os.environ)) is not None:
            size = min(size, sum(room[0]))  # any number will do: the job behind an array has one task
        attempt = run.count_attempts(stage) + 1
        self._tell(
            "started", attempt=attempt, ranks=size, host=os.uname().nodename, pid=os.getpid(),
            slurm_job=rank_info.job_id, restarts=rank_info.restart_count, standing=before, **self.identity,
        )  # fmt: skip
        if lock is None:
            return self._locked_out(attempt)
        for report in list_reports(run, stage, "*", self.task):
            report.unlink()
        if self.on_slurm and (reason := capacity.find_placement_problem(run, stage, size)) is not None:
            return AttemptEnd(ExitCode.USER_ERROR, facts={"attempt": attempt, "cause": "placement", "message": reason})
        started = time.monotonic()
        if self.ends is not None:
            os.environ[TIME_LEFT_VARIABLE] = str(
                max(0.0, self.ends - started)
            )  # less with each attempt, and by the wait before
        try:
            ranks = self._ranks(size, lock)
        except UserError as error:  # no mpirun
            return AttemptEnd(ExitCode.USER_ERROR, facts={"attempt": attempt, "message": str(error)})
        self._begins = measure_log_sizes(run, stage)
        try:
            ranks.start()
            ended = self._watch(ranks)
        finally:
            ranks.kill()  # none is left, unless something failed here
            late = _take_request(run)
        if late is not None and ended.stop_reason not in attempts.USER_REQUESTS:
            ended.stop_reason = late  # it came after another stop was noticed, or with a failure: nothing goes on
            if ended.code == ExitCode.STOPPED:
                ended.facts["cause"] = late
        # one of many does its part only; the job behind them validates the whole
        if (
            ended.code == ExitCode.DONE
            and not self._one_of_many()
            and (reason := self.work.missing_outputs(run)) is not None
        ):
            facts = {"cause": "outputs", "message": f"all ranks left with 0, but {reason}"}
            ended = AttemptEnd(ExitCode.CRASHED, ended.stop_reason, facts)
        elif self.on_slurm:
            self._ask_slurm(ended)
        ended.facts = {"attempt": attempt, **ended.facts, "seconds": round(time.monotonic() - started, 3)}
        return ended

    def _locked_out(self, attempt: int) -> AttemptEnd:
        """The attempt before did not let go: a person or Slurm stopped the wait, or its node is taken for dead."""
        asked = _take_request(self.run) or self.flag.reason
        holder = self.run.lock_holder(self.stage) or "nobody any more"
        message = f"no ranks were started: those of the attempt before had not left the stage ({holder})"
        facts = {"attempt": attempt, "message": message} | ({"cause": asked} if asked else {})
        ended = AttemptEnd(ExitCode.STOPPED if asked else ExitCode.NODE_FAILURE, asked, facts)
        self._ask_slurm(ended)
        return ended

    def _one_of_many(self) -> bool:
        """Whether another job does what this one leaves: behind a task of shard, or one checkpoint's evaluation."""
        return self.task is not None or self.evaluations.one_of_many(self.job)

    def _ranks(self, size: int, lock: int) -> Ranks:
        """The ranks, not started yet; they inherit the run's lock. Raises UserError where there is no mpirun."""
        run, stage = self.run, self.stage
        nodes = -(-size // run.config.stages.get_resources(stage).processes_per_node) if self.row.is_distributed else 1
        if run.config.parallel.backend == "mpi" and self.row.is_distributed:
            return mpi_launch.build_mpi_ranks(run, stage, size, nodes, lock, self.on_slurm)
        if self.on_slurm:
            return SrunRanks(run, stage, size, lock, nodes=nodes, task=self.task)
        return LocalRanks(run, stage, size, lock)

    def _watch(self, ranks: Ranks) -> AttemptEnd:
        """Wait for all ranks, pass requests and signals on to them, and tell how they ended."""
        run, stage = self.run, self.stage
        gone: list[RankExit] = []
        failed: list[RankExit] = []
        asked: str | None = None
        deadline, next_look, grace_s = math.inf, 0.0, STOP_GRACE_S + run.config.recovery.save_s
        while ranks.running:
            clock = time.monotonic()
            if asked is None and clock >= next_look:
                next_look = clock + REQUEST_POLL_S
                asked = _request(run) or self.flag.reason
                if asked is not None:
                    ranks.send(signal.SIGTERM)
                    deadline = min(deadline, clock + grace_s)
                    print(f"stopping ({asked}): the ranks save at their next step boundary", flush=True)
                    self._note_stop(asked)
            if self.batch and self.row.is_training:
                self.evaluations.submit_new_evaluation()
            gone += ranks.poll()
            if not failed and (failed := [left for left in gone if left.code not in (ExitCode.DONE, ExitCode.STOPPED)]):
                deadline = min(deadline, clock + PEERS_LEAVE_S)
            if clock >= deadline:
                ranks.kill()
                if not failed:
                    words = f"the ranks were asked to stop, had not left after {grace_s:.0f} s, and were killed"
                    return AttemptEnd(ExitCode.HANG, asked, {"message": words})
            time.sleep(POLL_S)
        if asked is not None and any(left.code == -signal.SIGTERM for left in failed):
            return AttemptEnd(
                ExitCode.STOPPED, asked, {"cause": asked}
            )  # in its first milliseconds, before it could listen
        if failed:
            ended = find_failure(run, stage, failed, self.task, self._begins)
            if ended.code == ExitCode.HANG:
                ended.facts |= find_hung_rank(run, stage, self._hosts(ranks.size)) or {}
            ended.stop_reason = asked
            return ended
        if any(left.code == ExitCode.STOPPED for left in gone):
            told = [{}, *run.read_events(stage, "started", "stop_requested")][-1]  # of this attempt
            return AttemptEnd(ExitCode.STOPPED, asked, {"cause": asked or told.get("signal", "signal")})
        return AttemptEnd(ExitCode.DONE, asked)

    def _hosts(self, size: int) -> list[str]:
        """The host of each rank."""
        if not self.on_slurm:
            return [os.uname().nodename] * size
        per_node = self.run.config.stages.get_resources(self.stage).processes_per_node
        _, spread = read_granted_tasks(os.environ) or ([], "block")
        return [self.nodes[n] for n in capacity.assign_ranks_to_nodes([per_node] * (size // per_node), spread)]

    def _note_stop(self, asked: str) -> None:
        """Write at once why a stop came: this process may be killed before the ranks have left."""
        more: dict[str, Any] = {}
        if self.on_slurm and asked not in attempts.USER_REQUESTS:
            facts = slurm_job.read_job_info(self.rank_info.job_id or "")
            more["cause"] = self._cause(ExitCode.STOPPED, facts)[0].name.lower()
        with suppress(OSError):  # the ranks may still save
            self._tell("stopping", by=asked, **more)

    def _cause(self, code: ExitCode, facts: slurm_job.JobInfo | None) -> tuple[ExitCode, str | None]:
        nodes, site = ",".join(self.nodes), self.run.config.site
        signs = self._saw_preemption()
        return stop_causes.refine_stop_cause(code, facts, self.rank_info, nodes, self.since, site, preempted=signs)

    def _saw_preemption(self) -> bool:
        """Whether this attempt saw a preemption, of which Slurm shows nothing once it has requeued the job.

        A preemption with grace time signals the ranks first, and the batch script with the signal of `--signal=B:`.
        `scontrol requeue` sends TERM to all of them at once.
        """
        noted = (attempts.load_stage_state(self.run, self.stage, self.task).stopping_event or {}).get("cause")
        if noted in ("preempted", "time_limit"):
            return bool(noted == "preempted")
        if self.flag.reason in (signal.SIGUSR1.name, signal.SIGUSR2.name):
            return True
        asked = self.run.read_events(self.stage, "started", "stop_requested")[-1:]
        if not asked or not str(asked[0].get("signal")).startswith("SIG"):
            return False
        age_s = 0.0 if self.flag.signal_time is None else time.monotonic() - self.flag.signal_time
        return datetime.fromisoformat(asked[0]["time"]).timestamp() < time.time() - age_s - TOGETHER_S

    def _ask_slurm(self, ended: AttemptEnd) -> None:
        """Refine the cause by what Slurm knows, where no person is the cause, and remember nodes that failed."""
        facts = slurm_job.read_job_info(self.rank_info.job_id or "")
        if facts is not None and facts.is_preempted:
            ended.facts["in_grace"] = True  # Slurm may start the job once more, whatever this end is
        if ended.stop_reason not in attempts.USER_REQUESTS:
            code, words = self._cause(ended.code, facts)
            if code == ExitCode.STOPPED and ended.facts.get("cause") == LOCAL_DEADLINE:
                code = ExitCode.TIME_LIMIT
            if code != ended.code:
                ended.code, ended.facts["cause"] = code, code.name.lower()
            if words:
                ended.facts["message"] = "\n".join(filter(None, [words, ended.facts.get("message")]))
        if ended.code == ExitCode.BAD_NODE:
            current_job.record_bad_node(self.run, ended.facts["host"], ended.facts["message"])

    def _tell(self, event: str, **facts: Any) -> None:
        self.run.event(event, self.stage, job_id=self.job, task=self.task, **facts)

    def _write_end(self, ended: AttemptEnd, why_not: str | None) -> None:
        """Write how the attempt ended, and why the stage does not go on where that is so."""
        name = attempts.get_end_event(ended.code, final=why_not is not None)
        if name == "stopped" and self.run.cancelled_file.exists():
            name = "cancelled"
        facts = ended.facts if name == "done" else {"cause": ended.code.name.lower(), **ended.facts}
        if why_not is not None:
            message = str(facts.get("message", f"stopped ({facts['cause']})")).rstrip()
            facts["message"] = f"{message}\nnot tried again: {why_not}" if why_not else message
            facts["final"] = True
        if name == "failed":
            print(f"{self.stage} failed: {facts['message']}", file=sys.stderr, flush=True)
        self._tell(name, exit_code=int(ended.code), **facts)

    def _write_goes_on(self, event: str, cause: ExitCode, progress: bool, **more: Any) -> None:
        self._tell(event, cause=cause.name.lower(), budget=attempts.get_budget_key(cause), progress=progress, **more)

    def _leave(self, ended: AttemptEnd, progress: bool) -> ExitCode:
        """Put this job back into the queue, or leave the stage to its successor; returns when this run of it ends.

        But for what slurm/query/preemption.py tells an exit is final and fails what waits: so it stays until it is
        killed.
        """
        job, restarts, signals = self.rank_info.job_id or "", self.rank_info.restart_count, self.flag.signal_count
        facts, asked_s = self._facts_at_last(signals)
        exclude = current_job.excluded_nodes_at_requeue(self.run, self.stage, facts) if facts else None
        way = stop_causes.choose_next_action(facts, restarts, self.run.config.site, bool(self.flag), exclude)
        why_not = None
        if way == NextAction.CANCELLED:
            message = "Slurm ends the job without putting it back: it was cancelled, and does not go on by itself"
            ended, why_not = AttemptEnd(ExitCode.CANCELLED, facts={"message": message}), ""
        elif way == NextAction.UNKNOWN:
            why_not = f"Slurm did not say within {asked_s:.0f} s whether the job was cancelled"
        elif way == NextAction.SUCCESSOR and not self._one_of_many():
            why_not = succession.hand_over(self.run, self.stage, job)
        elif way == NextAction.REQUEUE and not slurm_job.requeue_job(job, restarts, exclude):
            answers = slurm_job.read_job_info(job) is not None
            if answers != (facts is not None):  # the controller came or went in between
                return self._leave(ended, progress)
            why_not = f"Slurm did not answer for {asked_s:.0f} s, and so could not be asked to requeue the job"
            if answers:
                why_not = "Slurm refused to requeue the job; where the site forbids it, set site.requeue: false"
        if why_not is not None:
            self._write_end(ended, why_not)
            self.cancel_waiting_jobs(done=False)
            return ended.code
        by_slurm = {"by": "slurm"} if way in (NextAction.ALREADY_REQUEUED, NextAction.EXIT) else {}
        event = "handed_over" if way == NextAction.SUCCESSOR else "requeued"
        self._write_goes_on(event, ended.code, progress, **by_slurm)
        if way in (NextAction.ALREADY_REQUEUED, NextAction.REQUEUE):
            self._rest(REQUEUED_WAIT_S, signals)  # Slurm ends this run of the job with TERM
        return ended.code

    def _facts_at_last(self, signals: int) -> tuple[slurm_job.JobInfo | None, float]:
        """What Slurm says of the job, asked until it answers; for how many seconds that was. A signal, as a controller
        that is back sends, is a reason to ask at once."""
        job, began, pause_s = self.rank_info.job_id or "", time.monotonic(), 0.5
        until = max(began + ANSWER_WAIT_S, (self.ends or 0.0) - NEAR_END_S)
        while (facts := slurm_job.read_job_info(job)) is None and time.monotonic() < until:
            self._rest(pause_s, signals)
            pause_s, signals = min(2 * pause_s, ANSWER_POLL_S), self.flag.signal_count
        return facts, time.monotonic() - began

    def _rest(self, seconds: float, signals: int) -> None:
        """Wait so long, or until there were more than so many signals."""
        deadline = time.monotonic() + seconds
        while self.flag.signal_count == signals and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def cancel_waiting_jobs(self, *, done: bool) -> None:
        """This job's stage ends for good. A task of the array of shard has others beside it, and a job behind them."""
        if self.batch and self.task is None:
            succession.cancel_unneeded_jobs(self.run, self.stage, self.rank_info, done=done)


def supervise(run: Run, stage: str, flag: StopFlag) -> ExitCode:
    """Supervise `stage` here; the exit code."""
    one = Supervisor(run, stage, flag)
    try:
        return one.supervise()
    except Exception:  # it may not start: no successor may try the same for ever
        one.cancel_waiting_jobs(done=False)
        raise


@cache
def _say_once(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _request(run: Run) -> str | None:
    """A person's request in the run directory; None where the file system does not say: that is no reason to stop."""
    try:
        if run.cancelled_file.exists():
            return "cancelled"
        return "stop file" if run.stop_file.exists() else None
    except OSError as error:
        _say_once(f"cannot see whether a stop was asked for; looking again and again ({error})")
        return None


def _take_request(run: Run) -> str | None:
    """A person's request, the stop file taken away: honoured now, or too late, so the next start need not stop again.

    Whether it could be removed says whether there was one: a request between a look and the removal would be lost.
    """
    stop = None
    with suppress(OSError):
        run.stop_file.unlink()
        stop = "stop file"
    return "cancelled" if _request(run) == "cancelled" else stop

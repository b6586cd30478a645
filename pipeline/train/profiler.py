"""Profile training steps with torch.profiler, on every `train.profile_every`-th step or on request.

`submit.py profile` requests a profile with a file in the run directory. Rank 0 finds this file, and informs the other
ranks when all ranks exchange their requests (pipeline/resilience/stop.py). Before the step, each rank measures the
offset of its clock from that of rank 0. After the step, each rank divides its trace into parts
(pipeline/train/step_trace.py) and writes the spans to `profiles/step-N/rank-R.json.gz`. The times of the parts,
averaged over the ranks, are added to the metrics. cli/profile.py merges the files.

torch.profiler records the thread that starts it, the threads of autograd, and Gloo's operations from call to end. MPI
operations are added from Sluice's own records. If profiling fails, a warning is printed and the run continues.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from pipeline.base.files import open_regular_file, write_json
from pipeline.comm.groups import World, broadcast_from_rank0
from pipeline.mpi.work import MpiWork
from pipeline.parallel.mesh import Layout
from pipeline.resilience.stop import PROFILE_REQUEST, RequestFile, StopCoordinator
from pipeline.resilience.watchdog import list_recent_collectives
from pipeline.run.directory import Run
from pipeline.train.callback import Callback, TrainerContext
from pipeline.train.step_trace import GROUP, PIPELINE, STEP, average_parts_over_ranks, divide_step, parse_trace

ROUND_TRIPS = 5
"""Number of round trips with which each rank compares its clock to that of rank 0."""
MAX_COLLECTIVES = 1000
"""Number of recent collectives among which the profiler looks for the group of a Gloo operation."""
MAX_SPANS = 100_000
"""Maximum number of spans that are saved for one step of a rank. The shortest spans are dropped."""
MAX_STEPS = 20
"""Maximum number of profiled steps that a run keeps, and that one request may record."""
MAX_TRACE_BYTES = 300_000_000
"""Maximum size of a step's trace in bytes. Parsing the trace takes several times as much memory."""
MIN_DURATION_S = 30.0
"""Time reserved for saving a profile. If a profile took longer, its duration is reserved instead."""


class Profiler(Callback):
    """Profiles steps on this rank. All ranks must call each method together.

    Args:
        run: the run.
        layout: the sizes of all kinds of parallelism.
        world: the process group of all ranks.
        coordinator: exchanges requests. The deadline of the coordinator shows whether there is time for a profile.
    """

    def __init__(self, run: Run, layout: Layout, world: World, coordinator: StopCoordinator) -> None:
        self.run = run
        self.layout = layout
        self.world = world
        self.coordinator = coordinator
        self.group = coordinator.group
        self.deadline = coordinator.deadline
        self.request = RequestFile(run.profile_file)
        coordinator.add_request(PROFILE_REQUEST, self.request.is_pending if world.is_rank0 else lambda: False)
        self.overhead_s = 0.0
        """Seconds spent on profiling since the metrics of the previous step, without the step itself."""
        self._longest_profile_s = MIN_DURATION_S
        """Duration of the longest profile of a step, without the step itself; at least `MIN_DURATION_S`."""
        self._steps_left = 0
        """Number of requested steps that are not recorded yet."""
        self._requested_steps = 0
        """Number of steps of the latest request; 0 if there was none in this attempt."""
        self._ranks: Sequence[int] = range(world.size)
        """The ranks that record a trace."""
        self._clock_error_and_offset_ns = (0, 0)
        """The latest result of `_compare_clocks`."""
        self._annotation: record_function | None = None
        """The annotation around the step that is being recorded; None between profiles."""
        self._recorder: profile | None = None
        if world.is_rank0:
            # If the previous attempt ended while it carried out a request, this attempt does not repeat the request.
            with suppress(OSError):
                run.accepted_profile_request_file.unlink()

    def on_step_begin(self, trainer: TrainerContext, step: int) -> None:
        """Start recording the step if a request or `train.profile_every` selects it."""
        self.begin_step(step)

    def on_step_end(self, trainer: TrainerContext, step: int, metrics: dict[str, Any]) -> None:
        """Stop recording, and add the times of the step's parts to its metrics. Save no trace if the ranks stop now."""
        metrics.update(self.end_step(step, save=self.coordinator.stop_reason is None))
        if self.overhead_s:
            trainer.overhead_s["profile_s"] = self.overhead_s
            self.overhead_s = 0.0

    def on_metrics(self, trainer: TrainerContext, step: int, metrics: Mapping[str, Any]) -> None:
        """Accept the request for a profile on all ranks, if rank 0 had a request at the latest exchange."""
        if PROFILE_REQUEST in self.coordinator.pending_requests:
            self.accept_request()

    def accept_request(self) -> None:
        """Read the request file, and profile the requested number of steps, from the next step on.

        Rank 0 renames the request file, so that the request is not read twice. If the time limit is too near, the file
        keeps its name, and the next attempt carries out the request.
        """
        steps_and_ranks: list[Any] = [0, None]  # The number of steps, and the ranks; None means all ranks.
        if self.world.is_rank0 and self.deadline.should_stop(self._longest_profile_s):
            self.request.defer()
        elif self.world.is_rank0:
            steps_and_ranks = [1, None]  # An empty or damaged file requests one step of all ranks.
            with self._warn_on_error("reading the request"):
                os.replace(self.request.file, self.run.accepted_profile_request_file)
                with open_regular_file(self.run.accepted_profile_request_file) as file:
                    content = json.loads(file.read() or b"{}")
                requested_steps = int(content.get("steps", 1))
                steps_and_ranks = [min(max(1, requested_steps), MAX_STEPS), content.get("ranks")]
            self.request.accept()
        self._steps_left, ranks = broadcast_from_rank0(self.group, steps_and_ranks)
        self._requested_steps = self._steps_left
        self._ranks = ranks or range(self.world.size)

    def begin_step(self, step: int) -> None:
        """Start recording `step` if the user requested a profile, or if `train.profile_every` selects this step.

        If the time limit is too near, do not record this step or further steps of the request. If no step of the
        request was recorded yet, rename the request file back, so that the next attempt carries out the request.
        """
        profile_every = self.run.config.train.profile_every
        start_time = time.perf_counter()
        is_requested = self._steps_left > 0
        is_selected = profile_every is not None and step % profile_every == 0
        if not is_requested and not is_selected:
            return
        # Rank 0 decides whether there is enough time, because only rank 0 measures the duration of saves.
        if broadcast_from_rank0(self.group, self.deadline.should_stop(self._longest_profile_s)):
            has_recorded_steps = self._steps_left < self._requested_steps
            if is_requested and not has_recorded_steps and self.world.is_rank0:
                with suppress(OSError):
                    os.replace(self.run.accepted_profile_request_file, self.request.file)
                self.request.defer()
            self._steps_left = 0
            return
        self._clock_error_and_offset_ns = self._compare_clocks()
        with self._warn_on_error("starting the profiler"):
            if self.world.rank in self._ranks:
                # 99 turns off the log of Kineto, which would otherwise report each start and stop.
                os.environ.setdefault("KINETO_LOG_LEVEL", "99")
                gpu_activities = [ProfilerActivity.CUDA] if self.world.device.type == "cuda" else []
                recorder = profile(activities=[ProfilerActivity.CPU, *gpu_activities])
                recorder.start()
                self._recorder = recorder
                MpiWork.recorded = []
        dist.barrier(self.group)
        self.overhead_s += time.perf_counter() - start_time
        self._annotation = record_function(STEP)
        self._annotation.__enter__()

    def end_step(self, step: int, *, save: bool) -> dict[str, Any]:
        """Stop recording `step`. If this step is not being profiled, return {}.

        Args:
            step: the number of the step.
            save: whether to save the traces.

        Returns:
            Under the key `profile`, the seconds by part (:func:`divide_step`), as the mean over the ranks that saved a
            trace. Empty if no rank saved a trace.
        """
        if self._annotation is None:
            return {}
        if self.world.device.type == "cuda":  # Wait for the last kernels, which belong to the step.
            torch.cuda.synchronize()
        self._annotation.__exit__(None, None, None)
        start_time = time.perf_counter()
        folder = self.run.profiles_dir / f"step-{step:08}"
        parts: dict[str, Any] | None = None
        with self._warn_on_error("saving the trace"):
            if self._recorder is not None:
                self._recorder.stop()
            if self._recorder is not None and save:
                folder.mkdir(parents=True, exist_ok=True)
                parts = self._save_trace(folder / f"rank-{self.world.rank}.json.gz", self._recorder)
        self._annotation = None
        self._recorder = None
        MpiWork.recorded = None
        all_ranks_parts: list[Any] = [None] * self.world.size
        dist.all_gather_object(all_ranks_parts, parts, group=self.group)
        parts_by_rank = {rank: rank_parts for rank, rank_parts in enumerate(all_ranks_parts) if rank_parts}
        self._steps_left = max(0, self._steps_left - 1)
        if self._steps_left == 0:
            self._ranks = range(self.world.size)
        if self.world.is_rank0:
            self._update_folder(folder, parts_by_rank)
        self.overhead_s += time.perf_counter() - start_time
        self._longest_profile_s = max(self._longest_profile_s, self.overhead_s)
        return {"profile": average_parts_over_ranks(list(parts_by_rank.values()))} if parts_by_rank else {}

    def _update_folder(self, folder: Path, parts_by_rank: Mapping[int, Any]) -> None:
        """Write the times of all ranks to `folder`, and remove all profiles except the `MAX_STEPS` newest ones.

        After the last step of a request, remove the file of the request.

        Args:
            folder: the directory of the profiled step.
            parts_by_rank: the result of :func:`divide_step` for each rank that saved a trace.
        """
        with self._warn_on_error("updating the folder"):
            if parts_by_rank:
                write_json(folder / "parts.json", parts_by_rank)
            for old_profile in sorted(self.run.profiles_dir.glob("step-*"), key=os.path.getmtime)[:-MAX_STEPS]:
                shutil.rmtree(old_profile)
        if self._steps_left == 0:
            with self._warn_on_error("removing the request"):
                self.run.accepted_profile_request_file.unlink(missing_ok=True)

    @contextmanager
    def _warn_on_error(self, activity: str) -> Iterator[None]:
        """Print an exception of the block as a warning, because a failed profile must not end the run.

        Args:
            activity: what the block does, as a phrase such as `saving the trace`.
        """
        try:
            yield
        except Exception as error:
            print(
                f"WARNING: profile: {activity} failed on rank {self.world.rank}: {error}", file=sys.stderr, flush=True
            )

    def _compare_clocks(self) -> tuple[int, int]:
        """Compare the clock of this rank with that of rank 0.

        In each round trip, this rank sends a message, and rank 0 replies with its time. Rank 0 reads its clock at some
        moment during the round trip, so the shortest round trip gives the best estimate (Cristian, "Probabilistic clock
        synchronization", Distributed Computing 3, 1989).

        Returns:
            The maximum error of the offset, and the offset to add to this rank's clock, both in nanoseconds.
        """
        # Rank 0 itself has no error and no offset.
        errors_and_offsets = [(0, 0)] if self.world.is_rank0 else []
        clock = torch.zeros(1, dtype=torch.int64)  # The message in both directions. Only the replies have a value.
        # One rank after another compares its clock, so that the round trips do not delay each other.
        for rank in [rank for rank in range(1, self.world.size) for _ in range(ROUND_TRIPS)]:
            if self.world.is_rank0:
                dist.recv(clock, rank, group=self.group)
                dist.send(clock.fill_(time.time_ns()), rank, group=self.group)
            elif rank == self.world.rank:
                sent_ns = time.time_ns()
                dist.send(clock, 0, group=self.group)
                dist.recv(clock, 0, group=self.group)
                received_ns = time.time_ns()
                middle_ns = (sent_ns + received_ns) // 2
                error_ns = (received_ns - sent_ns) // 2
                offset_ns = int(clock.item()) - middle_ns
                errors_and_offsets.append((error_ns, offset_ns))
        return min(errors_and_offsets)  # The pair with the smallest error.

    def _save_trace(self, file: Path, recorder: profile) -> dict[str, Any]:
        """Write the spans of this rank's step to `file`. Return the seconds of its parts (:func:`divide_step`).

        Raises ValueError if the trace is larger than `MAX_TRACE_BYTES`, or does not contain the step.
        """
        with tempfile.NamedTemporaryFile(suffix=".json") as exported:
            recorder.export_chrome_trace(exported.name)
            if (size := os.path.getsize(exported.name)) > MAX_TRACE_BYTES:
                raise ValueError(
                    f"torch's trace has {size:,} bytes, more than {MAX_TRACE_BYTES:,}: use fewer micro-batches"
                )
            # torch has replaced the file, so `exported` refers to the old file, and the new file is opened by its name.
            trace = json.loads(Path(exported.name).read_bytes())
        # All times of events (`ts`) are in microseconds since `baseTimeNanoseconds`. "X" marks events with a duration.
        base_ns = trace["baseTimeNanoseconds"]
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        self._mark_gloo_operations(events, base_ns)
        groups = trace.get("distributedInfo", {}).get("pg_config", ())
        group_descriptions = {group["pg_name"]: group["pg_desc"] for group in groups}
        for name, group, start_ns, end_ns in MpiWork.recorded or ():
            # Only the pipeline sends point-to-point messages, whose names contain a tag.
            arguments = {GROUP: PIPELINE if "tag" in name else group_descriptions.get(group, group)}
            times = {"ts": (start_ns - base_ns) / 1000, "dur": (end_ns - start_ns) / 1000}
            events.append({"name": name, "cat": "communication", "args": arguments, **times})
        begin_us, step_us, spans = parse_trace(events)
        error_ns, offset_ns = self._clock_error_and_offset_ns
        place = self.layout.coordinates(self.world.rank).name_positions(self.layout)
        content = {
            "rank": self.world.rank, "host": os.uname().nodename, "clock_error_ns": error_ns,
            "place": place,
            "step_us": step_us, "begin_ns": base_ns + round(1000 * begin_us) + offset_ns,
            "spans": sorted(spans, key=lambda span: span.start - span.end)[:MAX_SPANS],  # The longest spans first.
        }  # fmt: skip
        file.write_bytes(gzip.compress(json.dumps(content).encode(), 1))  # 1 is the fastest compression level.
        return divide_step(spans, step_us)

    def _mark_gloo_operations(self, events: Sequence[dict[str, Any]], base_ns: int) -> None:
        """Set the category of Gloo's operations to communication, and add their process group.

        torch's flight recorder lists the recent collectives with their groups. The group of an operation is the group
        of the latest collective with the same name that began before the operation.

        Args:
            events: the events of the trace, which are changed in place.
            base_ns: the time to which the events' times (`ts`, in microseconds) refer.
        """
        collectives = list_recent_collectives(MAX_COLLECTIVES)
        for event in events:
            if event["name"].startswith("gloo:"):
                start_ns = base_ns + 1000 * event["ts"]
                earlier_count = bisect_right(collectives, start_ns, key=lambda collective: collective["time_ns"])
                earlier = collectives[:earlier_count]
                groups = [each["group"] for each in earlier if each["operation"] == event["name"]]
                if groups:
                    group = groups[-1]
                elif event["name"].startswith(("gloo:send", "gloo:recv")):
                    # The recorder lists no point-to-point messages, but only the pipeline sends them.
                    group = PIPELINE
                else:  # In torch 2.11, the recorder lists no Gloo operation at all.
                    group = "unknown"
                event.update({"cat": "communication", "args": {GROUP: group}})

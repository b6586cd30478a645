"""Saver processes: they write asynchronous checkpoints from memory that outlives the rank.

A node agent forks a saver beside each rank of the train stage. The rank copies its state to one of its buffers
(pipeline/checkpoint/memory_snapshot.py), sends a :class:`SaveRequest`, and continues to train. The saver writes the
checkpoint from the buffer together with the savers of the other ranks, and then answers. A saver imports nothing and
uses no GPU, and its work does not compete with the Python threads of the rank.

If the rank exits, its saver finishes the save in progress and exits. The ranks of the next attempt wait for that. So a
rank that exits after the copy does not lose the save.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import CheckpointError
from pipeline.checkpoint.memory_snapshot import MemorySnapshots, StateDict, map_snapshot
from pipeline.checkpoint.writer import CheckpointWriter, SaveError, append_saved_event, explain_save_error
from pipeline.comm.groups import COLLECTIVE_TIMEOUT
from pipeline.run.directory import Run

SAVER_VARIABLE = "SLUICE_SAVER_FD"
"""The environment variable with the file descriptor of the rank's connection to its saver."""
PREVIOUS_SAVERS_VARIABLE = "SLUICE_PREVIOUS_SAVERS"
"""The environment variable with the savers of earlier attempts that have not exited yet, separated by commas. Each is
`PID:FD`, and FD is the reading end of a pipe whose writing end only this saver has."""
CONNECT_TIMEOUT = timedelta(minutes=2)
"""How long a saver tries to connect to the store in rank 0, which has existed before the saver gets its address."""
KILL_WAIT_S = 10.0
"""How long to wait until a saver has exited after KILL."""


@dataclass(frozen=True)
class SaveRequest:
    """A checkpoint to write."""

    buffer: int
    """The index of the buffer with the rank's tensors."""
    plan: SavePlan
    """DCP's description of the rank's tensors: which part of each tensor the rank has."""
    manifest: dict[str, Any]
    """The manifest without the list of files."""
    start_time: float
    """When the save began, by `time.monotonic`, which is the same in all processes of a node."""


class _StoredPlanner(DefaultSavePlanner):
    """Saves tensors according to a plan that another process has made of its DTensors.

    Args:
        plan: the plan.
        tensors: the local part of each tensor, by name.
    """

    def __init__(self, plan: SavePlan, tensors: StateDict) -> None:
        super().__init__()
        self._stored_plan = plan
        self._tensors = tensors

    def create_local_plan(self) -> SavePlan:
        """Return the stored plan."""
        self.plan = self._stored_plan
        return self.plan

    def lookup_object(self, index: Any) -> torch.Tensor:
        """Return the tensor of an item of the plan."""
        return self._tensors[index.fqn]


def create_plan(state: StateDict, *, is_coordinator: bool) -> SavePlan:
    """Return DCP's plan for this rank's tensors, as `dcp.save` makes it.

    Args:
        state: this rank's tensors by name.
        is_coordinator: whether this is rank 0.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=is_coordinator)
    return planner.create_local_plan()


# -- in the rank -----------------------------------------------------------------------------------------


class Saver:
    """The connection of a rank to its saver. All ranks must make the same calls in the same order.

    Args:
        connection: the connection.
        rank_info: this rank.
        snapshots: the buffers that the saver reads.
    """

    def __init__(self, connection: Connection, rank_info: RankInfo, snapshots: MemorySnapshots) -> None:
        self._connection = connection
        self._rank = rank_info.rank
        self._snapshots = snapshots
        self._identity = (rank_info.rank, rank_info.world_size, (rank_info.master_host, rank_info.master_port))
        self._is_connected = False

    def connect(self) -> None:
        """Let the saver connect with those of the other ranks, if it has not done so yet.

        The first call is after the first step, so that the savers do not compete with the start of the ranks.
        """
        if not self._is_connected:
            self._is_connected = True
            with suppress(BrokenPipeError, ConnectionResetError):  # `finish` reports that the saver has exited.
                self._connection.send(self._identity)

    def start(self, state: StateDict, manifest: dict[str, Any], start_time: float) -> None:
        """Copy the tensors to a buffer, and let the saver write the checkpoint from it.

        The buffer is not overwritten until :meth:`finish` has returned. From the return of this method on, the saver
        needs the rank no longer.

        Args:
            state: this rank's tensors by name.
            manifest: the manifest without the list of files.
            start_time: when the save began, by `time.monotonic`.
        """
        self.connect()
        plan = create_plan(state, is_coordinator=self._rank == 0)
        fields = {name: manifest[name] for name in ("step", "samples_consumed", "extra")}
        buffer = self._snapshots.save(state, **fields, protect=True)
        with suppress(BrokenPipeError, ConnectionResetError):  # `finish` reports that the saver has exited.
            self._connection.send(SaveRequest(buffer, plan, manifest, start_time))

    def finish(self) -> float:
        """Wait until the checkpoint is committed. Return the duration of the save in seconds.

        Raises:
            StorageError: if the save failed because of the disk or the file system.
            SaveError: if the save failed for another reason.
        """
        try:
            result = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise SaveError(
                f"the process that saves the checkpoints of rank {self._rank} has ended, perhaps for lack of memory"
            ) from error
        finally:
            self._snapshots.release()
        if isinstance(result, BaseException):
            raise result
        return float(result)

    def close(self) -> None:
        """Let the saver exit."""
        self._connection.close()


def open_saver(environment: Mapping[str, str], rank_info: RankInfo, snapshots: MemorySnapshots) -> Saver | None:
    """Return the connection to this rank's saver; None if no agent has forked one.

    Args:
        environment: the environment variables of this rank.
        rank_info: this rank.
        snapshots: the buffers that the saver reads.
    """
    text = environment.get(SAVER_VARIABLE)
    return Saver(Connection(int(text)), rank_info, snapshots) if text else None


def wait_for_previous_savers(environment: Mapping[str, str], timeout_s: float) -> None:
    """Wait until the savers of earlier attempts on this node have exited. Kill those that take longer.

    Args:
        environment: the environment variables of this rank.
        timeout_s: how long to wait before a saver is killed, in seconds.
    """
    deadline = time.monotonic() + timeout_s
    for text in filter(None, environment.get(PREVIOUS_SAVERS_VARIABLE, "").split(",")):
        pid, descriptor = map(int, text.split(":"))
        # The pipe becomes readable when the saver has exited.
        if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            print(f"the save of an earlier attempt takes longer than {timeout_s:.0f} s; it is abandoned", flush=True)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            select.select([descriptor], [], [], KILL_WAIT_S)
        os.close(descriptor)


# -- in the saver ----------------------------------------------------------------------------------------


def run_saver(connection: Connection, buffers: Sequence[int], run: Run) -> None:
    """Write checkpoints as long as the rank is connected.

    Args:
        connection: the connection to the rank.
        buffers: the file descriptors of the rank's own buffers.
        run: the run.
    """
    torch.set_num_threads(1)
    try:
        writer = _connect_savers(connection, run)
        while True:
            request: SaveRequest = connection.recv()
            result: float | BaseException
            try:
                result = _write(writer, buffers[request.buffer], request)
            except BaseException as error:  # The rank raises the error.
                result = explain_save_error(error, run.checkpoints_dir)
                print(f"step {request.manifest['step']} was not saved: {result}", flush=True)
            with suppress(BrokenPipeError, ConnectionResetError):  # The rank may have exited.
                connection.send(result)
    except (EOFError, ConnectionResetError):  # The rank has exited.
        return


def _connect_savers(connection: Connection, run: Run) -> CheckpointWriter:
    """Connect this saver with those of the other ranks, and return a writer for them."""
    rank, world_size, address = connection.recv()
    store: dist.Store = dist.HashStore()
    if world_size > 1:
        # The store is in rank 0. It is only used until the savers are connected with each other.
        host, port = address
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECT_TIMEOUT)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("savers", store),
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    group = dist.group.WORLD
    assert group is not None
    return CheckpointWriter(
        run.checkpoints_dir,
        group,
        keep=run.config.checkpoint.keep,
        metrics_file=run.metrics_file,
        on_committed=partial(append_saved_event, run),
    )


def _write(writer: CheckpointWriter, buffer: int, request: SaveRequest) -> float:
    """Write a checkpoint from a buffer. Return the duration of the save in seconds."""
    snapshot = map_snapshot(buffer)

    def check() -> None:
        """Raise an error if the buffer has changed since the rank wrote it."""
        if not snapshot.is_intact():
            raise CheckpointError(
                "checkpoint.damaged_memory", f"the copy of step {request.manifest['step']} in memory is damaged"
            )

    planner = _StoredPlanner(request.plan, snapshot.tensors)
    return writer.write(snapshot.tensors, request.manifest, request.start_time, planner=planner, check=check)

"""Tell the supervisor how srun places and binds a rank: `python -I -S report_placement.py ADDRESS_FILE`.

srun starts this program with the options of the ranks, once per rank. The agents then give the same variables, CPUs,
GPUs and NUMA policy to the ranks that they fork. This program uses only the standard library, so it starts within
milliseconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import socket
import subprocess
import sys

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
TASK_PREFIXES = ("SLURM_", "PMI")
"""Prefixes of the variables that describe a task of srun."""
DEVICE_VARIABLES = (
    GPU_VARIABLE,
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "GPU_DEVICE_ORDINAL",
)
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
"""The number of the system call get_mempolicy(2), by architecture."""


def list_gpu_uuids() -> list[str]:
    """Return the UUIDs of the GPUs that this process may use, in the order of Slurm's numbers.

    The list is empty if `nvidia-smi` does not work here.
    """
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in result.stdout.splitlines() if line.startswith("GPU-")]


def name_gpus_by_uuid(value: str) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES with UUIDs instead of numbers.

    A number counts the GPUs that the rank's cgroup allows. The agent may use all GPUs of the job on the node, so there
    the same number can mean another GPU.
    """
    entries = value.split(",")
    if not all(entry.isdigit() for entry in entries):
        return value
    uuids = list_gpu_uuids()
    if any(int(entry) >= len(uuids) for entry in entries):
        return value
    return ",".join(uuids[int(entry)] for entry in entries)


def read_memory_policy() -> list[int] | None:
    """Return mode and node mask of this process's NUMA policy; None if it is the default, or cannot be read."""
    number = GET_MEMPOLICY.get(platform.machine())
    if number is None:
        return None
    mode = ctypes.c_int()
    node_mask = ctypes.c_ulong()
    libc = ctypes.CDLL(None)
    failed = libc.syscall(number, ctypes.byref(mode), ctypes.byref(node_mask), 64, None, 0)
    return None if failed or mode.value == 0 else [mode.value, node_mask.value]


def main(address_file: str) -> None:
    """Connect to the supervisor and send the placement of this task."""
    with open(address_file) as file:
        address = json.load(file)
    names = [name for name in os.environ if name.startswith(TASK_PREFIXES) or name in DEVICE_VARIABLES]
    environment = {name: os.environ[name] for name in names}
    if environment.get(GPU_VARIABLE):
        environment[GPU_VARIABLE] = name_gpus_by_uuid(environment[GPU_VARIABLE])
    message = {
        "kind": "placement",
        "token": address["token"],
        "task": int(os.environ["SLURM_PROCID"]),
        "node": int(os.environ["SLURM_NODEID"]),
        "host": os.uname().nodename,
        "environment": environment,
        "cpus": sorted(os.sched_getaffinity(0)),
        "memory_policy": read_memory_policy(),
    }
    problems = []
    for host in address["hosts"]:
        try:
            with socket.create_connection((host, address["port"]), 30) as connection:
                connection.sendall(json.dumps(message).encode() + b"\n")
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)  # The supervisor closes the connection when it has read the message.
            return
        except OSError as error:
            problems.append(f"{host}: {error}")
    sys.exit(f"cannot connect to the supervisor, port {address['port']}: {'; '.join(problems)}")


if __name__ == "__main__":
    main(sys.argv[1])

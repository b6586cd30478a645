"""The command line of the test cluster: see `python -m tests.cluster --help`."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from pipeline.base.errors import UserError
from tests.cluster.cluster import Cluster, get_default_directory
from tests.cluster.config import NODES, Options

app = typer.Typer(no_args_is_help=True, add_completion=False, help="A real Slurm with four nodes on this machine.")
Directory = Annotated[Path, typer.Option(help="Directory of the cluster.", default_factory=get_default_directory)]
Node = Annotated[str, typer.Argument(help=f"One of {', '.join(NODES)}.")]


@app.command()
def up(
    directory: Directory,
    user_signal: Annotated[bool, typer.Option(help="Send the signal of a job's --signal when it is preempted.")] = True,
    accounting: Annotated[bool, typer.Option(help="Run MariaDB and slurmdbd, which sacct needs.")] = False,
    netns: Annotated[bool, typer.Option("--netns", help="Give each node its own network namespace.")] = False,
    switches: Annotated[bool, typer.Option("--switches", help="Use two leaf switches with two nodes each.")] = False,
    grace: Annotated[int, typer.Option(min=0, help="GraceTime of the partition low, in seconds.")] = 10,
    preempt: Annotated[str, typer.Option(help="PreemptMode of the partition low: REQUEUE or CANCEL.")] = "REQUEUE",
    slurmd_timeout: Annotated[
        int, typer.Option(min=1, help="SlurmdTimeout in seconds, after which a node is down.")
    ] = 15,
) -> None:
    """Start the cluster and wait until its nodes are idle."""
    start = time.monotonic()
    options = Options(
        user_signal=user_signal,
        accounting=accounting,
        netns=netns,
        grace=grace,
        preempt=preempt,
        switches=switches,
        slurmd_timeout=slurmd_timeout,
    )
    Cluster(directory).up(options)
    print(f'up in {time.monotonic() - start:.1f} s; now: eval "$({sys.executable} -m tests.cluster env)"')


@app.command()
def down(directory: Directory) -> None:
    """End all processes of the cluster and remove its files and networks."""
    Cluster(directory).down()


@app.command()
def status(directory: Directory) -> None:
    """Print which machines run and the state of each node in Slurm. Exit with code 1 if there is no cluster."""
    cluster = Cluster(directory)
    machines = cluster.machines()
    if not machines:
        print(f"no cluster in {cluster.directory}")
        raise typer.Exit(1)
    states = cluster.node_states()
    for name in sorted({*machines, *states}):
        print(f"{name:10} {'runs' if machines.get(name) else 'off':5} {states.get(name, '')}".rstrip())


@app.command()
def env(directory: Directory) -> None:
    """Print the commands that set the variables of Slurm. Usage: eval "$(python -m tests.cluster env)"."""
    for name, value in Cluster(directory).environment().items():
        print(f"export {name}={shlex.quote(value)}")


@app.command()
def crash(node: Node, directory: Directory) -> None:
    """Simulate a power failure of a node."""
    Cluster(directory).crash(node)


@app.command()
def boot(node: Node, directory: Directory) -> None:
    """Start a crashed node again."""
    Cluster(directory).boot(node)


@app.command()
def disconnect(node: Node, directory: Directory) -> None:
    """Disconnect a node from the network (needs up --netns)."""
    Cluster(directory).disconnect_node(node)


@app.command()
def reconnect(node: Node, directory: Directory) -> None:
    """Reconnect a node to the network."""
    Cluster(directory).reconnect_node(node)


@app.command()
def drain(node: Node, directory: Directory) -> None:
    """Drain a node, so that no new job starts on it."""
    Cluster(directory).drain(node)


@app.command()
def undrain(node: Node, directory: Directory) -> None:
    """Undrain a node, so that jobs can start on it again."""
    Cluster(directory).undrain(node)


if __name__ == "__main__":
    try:
        app()
    except (UserError, RuntimeError, TimeoutError) as error:
        sys.exit(f"cluster: {error}")

"""The test cluster from a shell: `python -m tests.cluster --help`."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from pipeline.base.errors import UserError
from tests.cluster.cluster import Cluster, default_directory
from tests.cluster.config import NODES, Options

app = typer.Typer(no_args_is_help=True, add_completion=False, help="A real Slurm with four nodes on this machine.")
Directory = Annotated[Path, typer.Option(help="Where the cluster lies.", default_factory=default_directory)]
Node = Annotated[str, typer.Argument(help=f"One of {', '.join(NODES)}.")]


@app.command()
def up(
    directory: Directory,
    user_signal: Annotated[bool, typer.Option(help="Send the signal of --signal on preemption.")] = True,
    accounting: Annotated[bool, typer.Option(help="Run MariaDB and slurmdbd, so that sacct answers.")] = False,
    netns: Annotated[bool, typer.Option("--netns", help="A network of its own for each node.")] = False,
    switches: Annotated[bool, typer.Option("--switches", help="Two leaf switches of two nodes each.")] = False,
    grace: Annotated[int, typer.Option(min=0, help="GraceTime of partition low, in seconds.")] = 10,
    preempt: Annotated[str, typer.Option(help="REQUEUE or CANCEL: what becomes of a preempted job.")] = "REQUEUE",
    slurmd_timeout: Annotated[int, typer.Option(min=1, help="A node silent for so many seconds is down.")] = 15,
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
    """End every process of the cluster and remove all that it left."""
    Cluster(directory).down()


@app.command()
def status(directory: Directory) -> None:
    """Say what runs, and what Slurm thinks of its nodes; exit code 1 where no cluster is up."""
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
    """Print what a shell needs: eval "$(python -m tests.cluster env)"."""
    for name, value in Cluster(directory).environment().items():
        print(f"export {name}={shlex.quote(value)}")


@app.command()
def crash(node: Node, directory: Directory) -> None:
    """Cut the node's power."""
    Cluster(directory).crash(node)


@app.command()
def boot(node: Node, directory: Directory) -> None:
    """Switch a crashed node on again."""
    Cluster(directory).boot(node)


@app.command()
def cut(node: Node, directory: Directory) -> None:
    """Pull the node's network cable (needs up --netns)."""
    Cluster(directory).cut(node)


@app.command()
def heal(node: Node, directory: Directory) -> None:
    """Put the node's network cable back."""
    Cluster(directory).heal(node)


@app.command()
def drain(node: Node, directory: Directory) -> None:
    """Let nothing new start on the node."""
    Cluster(directory).drain(node)


@app.command()
def undrain(node: Node, directory: Directory) -> None:
    """Let jobs start on the node again."""
    Cluster(directory).undrain(node)


if __name__ == "__main__":
    try:
        app()
    except (UserError, RuntimeError, TimeoutError) as error:
        sys.exit(f"cluster: {error}")

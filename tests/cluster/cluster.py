"""The cluster as an object: bring it up, break its nodes, run commands on it, take it down.

All state is in the directory, so that a shell's `python -m tests.cluster crash n1` and a test's object speak
of the same cluster, and `down` can clean up after an `up` that was killed half-way.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

import psutil

from pipeline.base.errors import UserError
from tests.cluster.config import CONTROL, NODES, Options, Site, free_ports, write
from tests.cluster.machines import NAMESPACES, Machine
from tests.cluster.network import Network, free_subnet

DAEMONS = ("munge", "database", "slurmdbd", "slurmctld")
DATABASE = """
export TMPDIR="$1" # its temporary tables are named by process ids, which two clusters have alike
mariadb-install-db --no-defaults --user=root --auth-root-authentication-method=normal --skip-test-db \
    --skip-name-resolve --datadir="$1/data" &&
exec mariadbd --no-defaults --user=root --datadir="$1/data" --socket="$2" --pid-file="$1/pid" --skip-networking \
    --innodb-log-file-size=8M --innodb-buffer-pool-size=32M --innodb-flush-log-at-trx-commit=0
"""
"""Makes an empty database in the folder $1 and serves it at the socket $2; nothing of it need outlive a crash."""
SOCKET_LENGTH = 107
"""The longest path of a Unix socket."""


def default_directory() -> Path:
    """Where the cluster of this user lies if nothing else is said."""
    return Path(f"/tmp/sluice-cluster-{os.getuid()}")


def missing(options: Options) -> str | None:
    """Why this machine cannot run such a cluster, None if it can."""
    if os.geteuid() != 0:
        return "the test cluster needs root (for namespaces, mounts and devices)"
    programs = ["munged", "slurmctld", "slurmd", "srun", "unshare"]
    programs += ["mariadbd", "mariadb-install-db", "slurmdbd"] if options.accounting else []
    programs += ["ip"] if options.netns else []
    absent = [name for name in programs if not shutil.which(name)]
    if absent:
        return f"the test cluster lacks {', '.join(absent)}: run .ci/install-packages"
    tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, timeout=10)
    return f"root may not make namespaces here: {tried.stderr.strip()}" if tried.returncode else None


class Cluster:
    """A Slurm of four nodes in `directory`. `with Cluster(directory).up() as cluster:` takes it down at the end."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = (directory or default_directory()).resolve()
        self.network = Network(self.directory)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.down()

    # Up and down

    def up(self, options: Options | None = None, timeout: float = 120) -> Cluster:
        """Bring the cluster up and wait until its nodes are idle; whatever fails on the way is cleaned up.

        Raises UserError where it cannot run or a cluster is there already, RuntimeError or TimeoutError, with
        the end of the logs, when a daemon does not start.
        """
        options = options or Options()
        if reason := missing(options):
            raise UserError("cluster.failed", reason)
        longest = self.directory / "database" / "socket"
        if len(str(longest)) > SOCKET_LENGTH:
            raise UserError(
                "cluster.failed",
                f"the directory's path is too long for a socket in it ({longest}): choose a shorter one",
            )
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (self.directory / "site.json").exists():
            raise UserError(
                "cluster.failed", f"a cluster is already in {self.directory}: take it `down`, or name another directory"
            )
        if any(self.directory.iterdir()) or self.directory.stat().st_uid != os.geteuid():
            raise UserError(
                "cluster.failed", f"{self.directory} holds other things or belongs to someone else: name another"
            )
        site = Site(options, free_ports(), free_subnet() if options.netns else None)
        try:
            write(self.directory, site)
            if site.subnet:
                self.network.lay(site.subnet)
            self._start_daemons(site, timeout)
            for node in NODES:
                self._start_node(site, node)
            self.wait_idle(timeout)
        except BaseException as error:
            logs = self._logs()
            self.down()
            if isinstance(error, (RuntimeError, TimeoutError)):
                raise type(error)(f"{error}\n{logs}") from error
            raise
        return self

    def down(self) -> None:
        """End every machine and remove the network and the directory; nothing is left of the cluster.

        Works on whatever an `up` left that was killed, and does nothing where there is no cluster.
        """
        for machine in self._machines():
            machine.end()
        with contextlib.suppress(UserError):
            if self._site().subnet:
                for node in NODES:
                    self.network.remove(self.network.cable(node))
                self.network.remove(self.network.bridge)
            # The record goes last: a `down` that is killed can be repeated.
            for entry in self.directory.iterdir():
                if entry.name != "site.json":
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            (self.directory / "site.json").unlink()
            self.directory.rmdir()

    def _start_daemons(self, site: Site, timeout: float) -> None:
        """Start what is not a node, each when it can reach what it needs."""
        at = self.directory
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
        munge = [f"--log-file={at}/log/munged.log", *(f"--{name}={at}/munge.{end}" for name, end in files.items())]
        daemon = partial(self._start_daemon, timeout)
        daemon("munge", ["munged", "--foreground", "--force", "--num-threads=2", *munge], at / "munge.socket")
        if site.options.accounting:
            sql = at / "database" / "socket"
            daemon("database", ["bash", "-c", DATABASE, "database", at / "database", sql], sql)
            # The variable is MariaDB's own; slurmdbd.conf has no setting for the path of the socket.
            daemon("slurmdbd", ["slurmdbd", "-D"], (site.host, site.ports["slurmdbd"]), MYSQL_UNIX_PORT=str(sql))
        daemon("slurmctld", ["slurmctld", "-D"], (site.host, site.ports["slurmctld"]))

    def _start_daemon(
        self, timeout: float, name: str, command: Sequence[str | Path], address: Path | tuple[str, int], **more: str
    ) -> None:
        """Start a daemon with `more` variables and wait until it listens at `address`."""
        self._machine(name).start(CONTROL, command, environment=self.environment() | more)
        self._wait_for(name, address, timeout)

    def _wait_for(self, name: str, address: Path | tuple[str, int], timeout: float) -> None:
        def listens() -> bool:
            if not self._machine(name).alive():
                raise RuntimeError(f"{name} ended at its start")
            return connects(address)

        self._wait(listens, timeout, f"{name} does not listen at {address}")

    def _start_node(self, site: Site, node: str) -> None:
        self._machine(node).start(
            node,
            ["slurmd", "-D", "-N", node],
            address=f"{site.address(node)}/24" if site.subnet else None,
            plug=(lambda pid: self.network.plug(node, pid)) if site.subnet else None,
            environment=self.environment(),
        )

    # What happens to nodes

    def crash(self, node: str) -> None:
        """A power failure: everything on the node ends at once. With netns its cable goes dead first."""
        site = self._site(node)
        if site.subnet and self._machine(node).processes():
            self.network.set(node, "down")
        self._machine(node).end()
        if site.subnet:
            self.network.remove(self.network.cable(node))

    def boot(self, node: str) -> None:
        """Switch a crashed node on again and wait until its daemon listens.

        Whether Slurm counts on it is another matter (`wait_nodes`): a node that was off for less than
        SlurmdTimeout was never down for Slurm, which then finds that the node's jobs are gone.
        """
        site = self._site(node)
        if self._machine(node).alive():
            raise UserError("cluster.failed", f"{node} is running: `crash` it first")
        self._machine(node).end()  # what a daemon that ended by itself left on record
        if site.subnet:
            self.network.remove(self.network.cable(node))
        self._start_node(site, node)
        self._wait_for(node, (site.address(node), site.ports[node]), timeout=10)

    def cut(self, node: str) -> None:
        """Pull the node's network cable; its processes go on. Needs netns."""
        self._cable(node, "down")

    def heal(self, node: str) -> None:
        """Put the cable back. Slurm notices at its own pace."""
        self._cable(node, "up")

    def _cable(self, node: str, state: str) -> None:
        if not self._site(node).subnet:
            raise UserError(
                "cluster.failed",
                "the nodes of this cluster share the host's network: bring it up with --netns to cut it",
            )
        if not self._machine(node).alive():
            raise UserError("cluster.failed", f"{node} is off: `boot` it first")
        self.network.set(node, state)

    def drain(self, node: str) -> None:
        """Let nothing new start on the node."""
        self._site(node)
        self.output(["scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=drained by hand"])

    def undrain(self, node: str) -> None:
        """Let jobs start on the node again; brings a node that is down back as well."""
        self._site(node)
        self.output(["scontrol", "update", f"NodeName={node}", "State=RESUME"])

    def lose_state(self, timeout: float = 120) -> None:
        """The controller comes back without what it knew: every job is gone, and ids start from 1 again."""
        site = self._site()
        self._machine("slurmctld").end()
        shutil.rmtree(self.directory / "state")
        (self.directory / "state").mkdir()
        self._start_daemon(timeout, "slurmctld", ["slurmctld", "-D"], (site.host, site.ports["slurmctld"]))
        self.wait_idle(timeout)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """The controller hangs: its port is open, and it answers nobody."""
        self._site()
        stopped = psutil.Process(self._machine("slurmctld").processes()[0].pid).children(recursive=True)
        for process in stopped:
            process.suspend()
        try:
            yield
        finally:
            for process in stopped:
                process.resume()

    # Commands

    def environment(self) -> dict[str, str]:
        """What to add to `os.environ` so that Slurm's commands speak to this cluster."""
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    def run(self, command: Sequence[str | Path], timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command of the host on the cluster, whatever its exit code; output is captured as text.

        The variables of a surrounding Slurm job are kept from it. Raises subprocess.TimeoutExpired.
        """
        outside = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=outside | self.environment()
        )

    def output(self, command: Sequence[str | Path], timeout: float = 120) -> str:
        """The stripped standard output of a command that must succeed. Raises RuntimeError with what it said."""
        done = self.run(command, timeout)
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))}: exit code {done.returncode}: {done.stderr.strip()}")
        return done.stdout.strip()

    # What is

    def machines(self) -> dict[str, bool]:
        """Each machine that was started and not ended, and whether it still runs."""
        return {machine.name: machine.alive() for machine in self._machines()}

    def node_states(self) -> dict[str, str]:
        """Slurm's word for each node: idle, allocated, mixed, down, drained …; a final `*`: does not answer."""
        lines = self.output(["sinfo", "--noheader", "--Node", "--partition=low", "--format=%N %T"]).splitlines()
        return dict(line.split() for line in lines)

    def job_state(self, job: str) -> str:
        """Slurm's word for a job of the last ten minutes: PENDING, RUNNING, COMPLETED, FAILED …"""
        return self.output(["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"])

    def wait_nodes(self, *states: str, nodes: Sequence[str] = NODES, timeout: float = 120) -> None:
        """Wait until each of `nodes` is in one of `states`. Raises TimeoutError."""
        self._wait(
            lambda: {self.node_states()[node] for node in nodes} <= set(states),
            timeout,
            lambda: f"{', '.join(nodes)} should be {' or '.join(states)}; the nodes: {self.node_states()}",
        )

    def wait_idle(self, timeout: float = 120) -> None:
        """Wait until every node is up and free. Raises TimeoutError."""
        self.wait_nodes("idle", timeout=timeout)

    def wait_job(self, job: str, *states: str, timeout: float = 120) -> None:
        """Wait until the job is in one of `states`. Raises TimeoutError."""
        self._wait(
            lambda: self.job_state(job) in states,
            timeout,
            lambda: f"job {job} should be {' or '.join(states)}: {self.output(['scontrol', 'show', 'job', job])}",
        )

    def clear(self, timeout: float = 120) -> None:
        """Cancel every job and wait until the nodes are free: a clean table for the next test."""
        self.output(["scancel", "--user=root"])
        self.wait_idle(timeout)

    def _wait(self, condition: Callable[[], bool], timeout: float, problem: str | Callable[[], str]) -> None:
        end = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"{problem if isinstance(problem, str) else problem()} (after {timeout:g} s)")
            time.sleep(0.05)

    def _site(self, node: str | None = None) -> Site:
        """The site of the cluster that is up. Raises UserError where none is, or for a node that it has not."""
        if node is not None and node not in NODES:
            raise UserError("cluster.failed", f"there is no node {node!r}: the nodes are {', '.join(NODES)}")
        try:
            return Site.load(self.directory)
        except FileNotFoundError:
            raise UserError("cluster.failed", f"there is no cluster in {self.directory}: bring it `up` first") from None

    def _machine(self, name: str) -> Machine:
        return Machine(name, self.directory)

    def _machines(self) -> list[Machine]:
        """Every machine on record, nodes first."""
        return [machine for name in (*NODES, *reversed(DAEMONS)) if (machine := self._machine(name)).processes()]

    def _logs(self) -> str:
        """The last lines of each log."""
        logs = sorted((self.directory / "log").glob("*"))
        ends = ((log.name, log.read_text(errors="replace").splitlines()[-25:]) for log in logs)
        return "\n".join(f"{name}: {line}" for name, lines in ends for line in lines)


def connects(address: Path | tuple[str, int]) -> bool:
    """Whether something listens at a Unix socket or (host, port)."""
    with socket.socket(socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(address) if isinstance(address, Path) else address)
        except OSError:
            return False
        return True

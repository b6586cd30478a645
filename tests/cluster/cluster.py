"""Start a test cluster, simulate failures, run commands on it, and remove it.

All state is in the directory of the cluster. Therefore, a test and a command such as `python -m tests.cluster crash n1`
can use the same cluster, and `down` can clean up after an `up` that was killed.
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
from tests.cluster.config import CONTROL, NODES, Options, Site, find_free_ports, write_cluster_files
from tests.cluster.machines import NAMESPACES, Machine
from tests.cluster.network import Network, find_free_subnet

DAEMONS = ("munge", "database", "slurmdbd", "slurmctld")
DATABASE_SCRIPT = """
export TMPDIR="$1" # the names of temporary tables contain PIDs, which can be equal in two clusters
mariadb-install-db --no-defaults --user=root --auth-root-authentication-method=normal --skip-test-db \
    --skip-name-resolve --datadir="$1/data" &&
exec mariadbd --no-defaults --user=root --datadir="$1/data" --socket="$2" --pid-file="$1/pid" --skip-networking \
    --innodb-log-file-size=8M --innodb-buffer-pool-size=32M --innodb-flush-log-at-trx-commit=0
"""
"""Shell script that creates an empty database in the folder $1 and starts its server at the Unix socket $2.

The server does not flush each transaction to the disk.
"""
MAX_SOCKET_PATH_LENGTH = 107
"""Maximum length of the path of a Unix socket."""


def get_default_directory() -> Path:
    """Return the directory that the command line uses by default, which depends on the user."""
    return Path(f"/tmp/sluice-cluster-{os.getuid()}")


def find_cluster_problem(options: Options) -> str | None:
    """Return why a cluster with these options cannot run on this machine; None if it can."""
    if os.geteuid() != 0:
        return "the test cluster needs root (for namespaces, mounts and devices)"
    programs = ["munged", "slurmctld", "slurmd", "srun", "unshare"]
    programs += ["mariadbd", "mariadb-install-db", "slurmdbd"] if options.accounting else []
    programs += ["ip"] if options.netns else []
    missing_programs = [name for name in programs if not shutil.which(name)]
    if missing_programs:
        return f"the test cluster needs {', '.join(missing_programs)}: run .ci/install-packages"
    result = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, timeout=10)
    return f"root cannot create namespaces on this machine: {result.stderr.strip()}" if result.returncode else None


class Cluster:
    """A Slurm cluster with four nodes. All its files are in `directory`.

    `with Cluster(directory).up() as cluster:` removes the cluster at the end of the block.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = (directory or get_default_directory()).resolve()
        self.network = Network(self.directory)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.down()

    # Up and down

    def up(self, options: Options | None = None, timeout: float = 120) -> Cluster:
        """Start the cluster and wait until its nodes are idle. If this fails, remove everything again.

        Args:
            options: options of the cluster; None for the default values.
            timeout: seconds to wait for each daemon, and for the nodes.

        Raises:
            UserError: the cluster cannot run on this machine, or the directory is in use.
            RuntimeError: a daemon exited. The message contains the end of the logs.
            TimeoutError: a daemon does not start in time. The message contains the end of the logs.
        """
        options = options or Options()
        if reason := find_cluster_problem(options):
            raise UserError("cluster.failed", reason)
        longest_path = self.directory / "database" / "socket"
        if len(str(longest_path)) > MAX_SOCKET_PATH_LENGTH:
            raise UserError(
                "cluster.failed",
                f"the path {longest_path} has more than {MAX_SOCKET_PATH_LENGTH} characters, which is too long for a "
                "socket: choose a shorter directory",
            )
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (self.directory / "site.json").exists():
            raise UserError(
                "cluster.failed",
                f"{self.directory} already has a cluster: take it `down`, or choose another directory",
            )
        if any(self.directory.iterdir()) or self.directory.stat().st_uid != os.geteuid():
            raise UserError(
                "cluster.failed",
                f"{self.directory} contains other files or belongs to another user: choose another directory",
            )
        site = Site(options, find_free_ports(), find_free_subnet() if options.netns else None)
        try:
            write_cluster_files(self.directory, site)
            if site.subnet:
                self.network.create_bridge(site.subnet)
            self._start_daemons(site, timeout)
            for node in NODES:
                self._start_node(site, node)
            self.wait_idle(timeout)
        except BaseException as error:
            logs = self._read_last_log_lines()
            self.down()
            if isinstance(error, (RuntimeError, TimeoutError)):
                raise type(error)(f"{error}\n{logs}") from error
            raise
        return self

    def down(self) -> None:
        """End all machines and remove the network and the directory.

        This also cleans up after an `up` that was killed. If there is no cluster, nothing happens.
        """
        for machine in self._machines():
            machine.end()
        with contextlib.suppress(UserError):
            if self._site().subnet:
                for node in NODES:
                    self.network.remove_interface(self.network.veth_name(node))
                self.network.remove_interface(self.network.bridge)
            # site.json is removed last, so that a `down` that is killed can be repeated.
            for path in self.directory.iterdir():
                if path.name != "site.json":
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            (self.directory / "site.json").unlink()
            self.directory.rmdir()

    def _start_daemons(self, site: Site, timeout: float) -> None:
        """Start the daemons that are not nodes. A daemon starts after the daemons to which it connects."""
        folder = self.directory
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
        munge_options = [f"--{name}={folder}/munge.{ending}" for name, ending in files.items()]
        munge = ["munged", "--foreground", "--force", "--num-threads=2", f"--log-file={folder}/log/munged.log"]
        start = partial(self._start_daemon, timeout)
        start("munge", [*munge, *munge_options], folder / "munge.socket")
        if site.options.accounting:
            database_socket = folder / "database" / "socket"
            database: list[str | Path] = [
                "bash",
                "-c",
                DATABASE_SCRIPT,
                "database",
                folder / "database",
                database_socket,
            ]
            start("database", database, database_socket)
            # This variable of MariaDB is needed because slurmdbd.conf has no setting for the path of the socket.
            variables = {"MYSQL_UNIX_PORT": str(database_socket)}
            start("slurmdbd", ["slurmdbd", "-D"], (site.host, site.ports["slurmdbd"]), **variables)
        start("slurmctld", ["slurmctld", "-D"], (site.host, site.ports["slurmctld"]))

    def _start_daemon(
        self,
        timeout: float,
        name: str,
        command: Sequence[str | Path],
        address: Path | tuple[str, int],
        **variables: str,
    ) -> None:
        """Start a daemon and wait until it listens at `address`. `variables`: further environment variables."""
        self._machine(name).start(CONTROL, command, environment=self.environment() | variables)
        self._wait_for(name, address, timeout)

    def _wait_for(self, name: str, address: Path | tuple[str, int], timeout: float) -> None:
        """Wait until a daemon listens at `address`.

        Raises:
            RuntimeError: the daemon has exited.
            TimeoutError: the daemon does not listen within `timeout` seconds.
        """

        def is_listening() -> bool:
            if not self._machine(name).is_alive():
                raise RuntimeError(f"{name} exited right after its start")
            return accepts_connections(address)

        self._wait(is_listening, timeout, f"{name} does not listen at {address}")

    def _start_node(self, site: Site, node: str) -> None:
        """Start the machine of a node, with slurmd."""
        self._machine(node).start(
            node,
            ["slurmd", "-D", "-N", node],
            address=f"{site.address(node)}/24" if site.subnet else None,
            connect_network=(lambda pid: self.network.connect_node(node, pid)) if site.subnet else None,
            environment=self.environment(),
        )

    # Failures of nodes and of the controller

    def crash(self, node: str) -> None:
        """Kill all processes of the node at once, as in a power failure.

        With netns, disconnect the node first, so that no packet closes the connections of its processes.
        """
        site = self._site(node)
        if site.subnet and self._machine(node).processes():
            self.network.set_link_state(node, "down")
        self._machine(node).end()
        if site.subnet:
            self.network.remove_interface(self.network.veth_name(node))

    def boot(self, node: str) -> None:
        """Start a crashed node again and wait until its daemon listens.

        Use `wait_nodes` to wait until Slurm considers the node up. If the node was off for less than SlurmdTimeout,
        Slurm never considers the node down. Slurm then finds that the jobs of the node have disappeared.
        """
        site = self._site(node)
        if self._machine(node).is_alive():
            raise UserError("cluster.failed", f"{node} is running: `crash` it first")
        self._machine(node).end()  # removes the record if the daemon exited without a crash
        if site.subnet:
            self.network.remove_interface(self.network.veth_name(node))
        self._start_node(site, node)
        self._wait_for(node, (site.address(node), site.ports[node]), timeout=10)

    def disconnect_node(self, node: str) -> None:
        """Disconnect the node from the network. Its processes keep running. The cluster must have the option netns."""
        self._set_link_state(node, "down")

    def reconnect_node(self, node: str) -> None:
        """Reconnect the node to the network. Slurm may need some time to notice this."""
        self._set_link_state(node, "up")

    def _set_link_state(self, node: str, state: str) -> None:
        """Set the network link of a node `up` or `down`. Raise UserError if the cluster or the node has no link."""
        if not self._site(node).subnet:
            raise UserError(
                "cluster.failed",
                "the nodes of this cluster share the host's network: start it with --netns to disconnect nodes",
            )
        if not self._machine(node).is_alive():
            raise UserError("cluster.failed", f"{node} is off: `boot` it first")
        self.network.set_link_state(node, state)

    def drain(self, node: str) -> None:
        """Drain the node, so that no new job starts on it."""
        self._site(node)
        self.output(["scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=drained by a test"])

    def undrain(self, node: str) -> None:
        """Let jobs start on the node again, even if Slurm considers the node down."""
        self._site(node)
        self.output(["scontrol", "update", f"NodeName={node}", "State=RESUME"])

    def restart_controller_without_state(self, timeout: float = 120) -> None:
        """Restart the controller without its saved state. It then has no jobs, and job IDs start from 1 again."""
        site = self._site()
        self._machine("slurmctld").end()
        shutil.rmtree(self.directory / "state")
        (self.directory / "state").mkdir()
        self._start_daemon(timeout, "slurmctld", ["slurmctld", "-D"], (site.host, site.ports["slurmctld"]))
        self.wait_idle(timeout)

    @contextlib.contextmanager
    def suspend_controller(self) -> Iterator[None]:
        """Suspend the controller during the block. Its port remains open, but it does not respond."""
        self._site()
        processes = psutil.Process(self._machine("slurmctld").processes()[0].pid).children(recursive=True)
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    # Commands

    def environment(self) -> dict[str, str]:
        """Return the environment variables with which the Slurm commands use this cluster."""
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    def run(self, command: Sequence[str | Path], timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command on the host with the variables of this cluster. Return its result, whatever the exit code.

        If this process itself runs in a Slurm job, the command does not get the variables of that job.

        Raises:
            subprocess.TimeoutExpired: the command runs for more than `timeout` seconds.
        """
        variables = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=variables | self.environment()
        )

    def output(self, command: Sequence[str | Path], timeout: float = 120) -> str:
        """Run a command and return its stripped output. If it fails, raise RuntimeError with its error output."""
        result = self.run(command, timeout)
        if result.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))}: exit code {result.returncode}: {result.stderr.strip()}")
        return result.stdout.strip()

    # State of machines, nodes and jobs

    def machines(self) -> dict[str, bool]:
        """Return, by the name of each machine that has a record, whether it still runs."""
        return {machine.name: machine.is_alive() for machine in self._machines()}

    def node_states(self) -> dict[str, str]:
        """Return the state of each node in Slurm, such as idle. If a node does not respond, its state ends with `*`."""
        lines = self.output(["sinfo", "--noheader", "--Node", "--partition=low", "--format=%N %T"]).splitlines()
        return dict(line.split() for line in lines)

    def job_state(self, job_id: str) -> str:
        """Return the state of a job in Slurm, such as PENDING or FAILED.

        squeue shows a job until MinJobAge after its end. Later, this method raises RuntimeError.
        """
        return self.output(["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T"])

    def wait_nodes(self, *states: str, nodes: Sequence[str] = NODES, timeout: float = 120) -> None:
        """Wait until each of `nodes` is in one of `states`. Raise TimeoutError after `timeout` seconds."""
        self._wait(
            lambda: {self.node_states()[node] for node in nodes} <= set(states),
            timeout,
            lambda: f"{', '.join(nodes)} should be {' or '.join(states)}; the nodes: {self.node_states()}",
        )

    def wait_idle(self, timeout: float = 120) -> None:
        """Wait until all nodes are idle. Raise TimeoutError after `timeout` seconds."""
        self.wait_nodes("idle", timeout=timeout)

    def wait_job(self, job_id: str, *states: str, timeout: float = 120) -> None:
        """Wait until the job is in one of `states`. Raise TimeoutError after `timeout` seconds."""

        def describe_problem() -> str:
            return f"job {job_id} should be {' or '.join(states)}: {self.output(['scontrol', 'show', 'job', job_id])}"

        self._wait(lambda: self.job_state(job_id) in states, timeout, describe_problem)

    def clear(self, timeout: float = 120) -> None:
        """Cancel all jobs and wait until the nodes are idle, so that the next test can start."""
        self.output(["scancel", "--user=root"])
        self.wait_idle(timeout)

    def _wait(self, condition: Callable[[], bool], timeout: float, problem: str | Callable[[], str]) -> None:
        """Wait until `condition` returns True. After `timeout` seconds, raise TimeoutError with `problem`."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{problem if isinstance(problem, str) else problem()} (after {timeout:g} s)")
            time.sleep(0.05)

    def _site(self, node: str | None = None) -> Site:
        """Return the Site of the running cluster. Raise UserError if there is no cluster, or no such node."""
        if node is not None and node not in NODES:
            raise UserError("cluster.failed", f"there is no node {node!r}: the nodes are {', '.join(NODES)}")
        try:
            return Site.load(self.directory)
        except FileNotFoundError:
            raise UserError("cluster.failed", f"there is no cluster in {self.directory}: start it with `up`") from None

    def _machine(self, name: str) -> Machine:
        return Machine(name, self.directory)

    def _machines(self) -> list[Machine]:
        """Return all machines with a record: first the nodes, then the daemons in the reverse order of their start."""
        return [machine for name in (*NODES, *reversed(DAEMONS)) if (machine := self._machine(name)).processes()]

    def _read_last_log_lines(self) -> str:
        """Return the last lines of each log."""
        logs = sorted((self.directory / "log").glob("*"))
        last_lines = ((log.name, log.read_text(errors="replace").splitlines()[-25:]) for log in logs)
        return "\n".join(f"{name}: {line}" for name, lines in last_lines for line in lines)


def accepts_connections(address: Path | tuple[str, int]) -> bool:
    """Return True if a process listens at a Unix socket or at (host, port)."""
    with socket.socket(socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(address) if isinstance(address, Path) else address)
        except OSError:
            return False
        return True

"""Mount a file system that is slow to read, like the shared storage of a busy cluster.

The file system is ext4 on a loop device. A control group (cgroup v1, blkio.throttle.read_bps_device) limits how many
bytes per second the processes in the group read from the device. Other processes read at full speed. Reads from the
page cache are not limited; `SlowMount.drop_page_cache` empties the cache.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup/blkio")


def find_slow_mount_problem() -> str | None:
    """Return why this machine cannot provide a slow mount; None if it can."""
    if os.geteuid() != 0:
        return "a slow mount needs root (for a loop device and a control group)"
    if not (CONTROL_GROUPS / "blkio.throttle.read_bps_device").exists():
        return f"a slow mount needs the blkio controller of cgroup v1 at {CONTROL_GROUPS}"
    if missing := [name for name in ("losetup", "mkfs.ext4", "mount") if not shutil.which(name)]:
        return f"a slow mount needs {', '.join(missing)} (packages util-linux and e2fsprogs)"
    result = subprocess.run(["losetup", "--find"], capture_output=True, text=True, timeout=60)
    return f"no loop device is available: {result.stderr.strip()}" if result.returncode else None


class SlowMount:
    """The file system that `slow_mount` mounted at `folder`, and its control group."""

    def __init__(self, folder: Path, device: str, group: Path) -> None:
        self.folder = folder
        self.group = group
        self._device_state = Path("/sys/block") / Path(device).name

    def limit_reads(self, bytes_per_s: int) -> None:
        """Limit the bytes per second that the processes of the control group can read. 0 removes the limit."""
        device_number = (self._device_state / "dev").read_text().strip()
        (self.group / "blkio.throttle.read_bps_device").write_text(f"{device_number} {bytes_per_s}")

    def wrap_command(self, command: list[str]) -> list[str]:
        """Return a command that runs `command` in the control group."""
        return ["sh", "-c", f'echo $$ > "{self.group}/cgroup.procs" && exec "$@"', "sh", *command]

    def drop_page_cache(self) -> None:
        """Remove the files of the mount from the page cache, except pages that a process has mapped."""
        subprocess.run(["sync", "-f", str(self.folder)], check=True, timeout=60)
        for path in filter(Path.is_file, self.folder.rglob("*")):
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def count_bytes_read(self) -> int:
        """Return the number of bytes that were read from the device since it was created.

        The statistics of Linux count sectors of 512 bytes (Documentation/block/stat.rst).
        """
        return int((self._device_state / "stat").read_text().split()[2]) * 512


@contextmanager
def slow_mount(size: int) -> Iterator[SlowMount]:
    """Mount an empty file system with space for about `size` bytes during the block, at first without a limit."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        image = Path(name) / "image"
        folder = Path(name) / "mount"
        group = CONTROL_GROUPS / Path(name).name
        with open(image, "wb") as file:
            file.truncate(size * 5 // 4 + (32 << 20))  # extra space for the journal and the blocks reserved for root
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, timeout=60)
        command = ["losetup", "--find", "--show", str(image)]
        device = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
        try:
            folder.mkdir()
            subprocess.run(["mount", device, str(folder)], check=True, timeout=60)
            group.mkdir()
            mount = SlowMount(folder, device, group)
            yield mount
        finally:
            with suppress(OSError, UnboundLocalError):  # `mount` is unbound if the file system was not mounted
                mount.limit_reads(0)  # otherwise unmounting waits for the limited requests
            with suppress(OSError):
                group.rmdir()
            subprocess.run(["umount", "-l", str(folder)], check=False, timeout=60)
            subprocess.run(["losetup", "--detach", device], check=False, timeout=60)

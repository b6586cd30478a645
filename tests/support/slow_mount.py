"""A file system that is slow to read, as shared storage of a busy cluster is: ext4 on a loop device, and a control
group of processes that may read so many bytes a second of it (cgroup v1, blkio.throttle.read_bps_device).

Others read it at full speed, and what the page cache holds costs nobody anything: `forget` empties that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/blkio")


def find_slow_mount_problem() -> str | None:
    """Why this machine cannot have one, None if it can."""
    if os.geteuid() != 0:
        return "a slow mount needs root (for a loop device and a control group)"
    if not (GROUPS / "blkio.throttle.read_bps_device").exists():
        return f"a slow mount needs the blkio controller of cgroup v1 at {GROUPS}"
    if absent := [name for name in ("losetup", "mkfs.ext4", "mount") if not shutil.which(name)]:
        return f"a slow mount lacks {', '.join(absent)} (util-linux and e2fsprogs)"
    found = subprocess.run(["losetup", "--find"], capture_output=True, text=True, timeout=60)
    return f"no loop device: {found.stderr.strip()}" if found.returncode else None


class SlowMount:
    """What is mounted at `folder`, while :func:`slow_mount` lasts."""

    def __init__(self, folder: Path, device: str, group: Path) -> None:
        self.folder, self.group = folder, group
        self._device, self._state = device, Path("/sys/block") / Path(device).name

    def limit(self, bytes_per_s: int) -> None:
        """Let the processes of the group read so much a second from now on; 0: as much as they like."""
        number = (self._state / "dev").read_text().strip()
        (self.group / "blkio.throttle.read_bps_device").write_text(f"{number} {bytes_per_s}")

    def inside(self, command: list[str]) -> list[str]:
        """The command, as one that runs in the group."""
        return ["sh", "-c", f'echo $$ > "{self.group}/cgroup.procs" && exec "$@"', "sh", *command]

    def forget(self) -> None:
        """Let the page cache hold nothing that is on the device, but for pages that somebody has mapped."""
        subprocess.run(["sync", "-f", str(self.folder)], check=True, timeout=60)
        for path in filter(Path.is_file, self.folder.rglob("*")):
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def bytes_read(self) -> int:
        """What the device was asked for so far (Documentation/block/stat.rst: sectors of 512 bytes)."""
        return int((self._state / "stat").read_text().split()[2]) * 512


@contextmanager
def slow_mount(size: int) -> Iterator[SlowMount]:
    """An empty one with room for about `size` bytes, and no limit yet."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        image, folder, group = Path(name) / "image", Path(name) / "mount", GROUPS / Path(name).name
        with open(image, "wb") as file:
            file.truncate(size * 5 // 4 + (32 << 20))  # the journal, what is kept for root
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
            with suppress(OSError, UnboundLocalError):
                mount.limit(0)  # or unmounting would wait for what is left to write
            with suppress(OSError):
                group.rmdir()
            subprocess.run(["umount", "-l", str(folder)], check=False, timeout=60)
            subprocess.run(["losetup", "--detach", device], check=False, timeout=60)

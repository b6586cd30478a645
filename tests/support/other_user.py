"""Run a part of a test as a user without the rights of root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.requirements import skip_or_fail_in_ci

OTHER_UID = 1234


@contextmanager
def as_other_user(folder: Path) -> Iterator[None]:
    """Run the block as user OTHER_UID, who may enter `folder`. Afterwards, restore the user and all changed modes.

    Without root, the test is skipped.
    """
    if os.geteuid() != 0:
        skip_or_fail_in_ci("running as another user needs root")
    # folders that other users may not enter (the last bit of the mode), with their modes
    modes = {parent: parent.stat().st_mode for parent in (folder, *folder.parents) if not parent.stat().st_mode & 1}
    try:
        for parent in modes:
            parent.chmod(0o755)
        os.seteuid(OTHER_UID)
        try:
            yield
        finally:
            os.seteuid(0)
    finally:
        for parent, mode in modes.items():
            parent.chmod(mode)

"""Skip a test if this machine lacks what the test needs."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def skip_or_fail_in_ci(reason: str) -> NoReturn:
    """Skip the test. If the environment variable CI is "true", fail instead.

    On the laptop of a contributor, root or a Debian package may be missing, but the other tests can still run. CI
    installs everything, so a test that cannot run in CI is a failure.

    Args:
        reason: what the machine lacks, such as root or a Debian package.
    """
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}; no test may be skipped in CI")
    pytest.skip(reason)  # Only outside CI: a contributor without root can still run the other tests.

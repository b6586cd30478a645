"""Skip a test if this machine lacks what the test needs."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def skip_or_fail_in_ci(reason: str) -> NoReturn:
    """Skip the test; fail instead if CI=true.

    A contributor's laptop may have no root and no Debian packages. The rest of the suite is still useful there. CI
    installs everything, so a test that cannot run there is a failure.

    Args:
        reason: what is missing and how to get it.
    """
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}; no test may be skipped in CI")
    pytest.skip(reason)

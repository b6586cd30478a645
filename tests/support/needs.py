"""What a test needs and this machine lacks."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def lacking(reason: str) -> NoReturn:
    """Skip the test, with the reason: a person's machine may lack root or a package. Under CI=true it fails."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}; under CI nothing may be skipped")
    # A stranger's laptop has no root, no Debian packages: there the rest of the suite is still worth running. Who calls
    # this names what is lacking and where it comes from; CI, which installs all of it, cannot come here.
    pytest.skip(reason)

"""The end of forked processes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def run_and_exit(run: Callable[[], int]) -> NoReturn:
    """Call a function in a forked process, and exit with the code that it returns; with 1 if it raises an error."""
    code = 1
    try:
        code = run()
    except BaseException:
        # Also SystemExit and KeyboardInterrupt: this process must never return into the code of the process of which it
        # is a copy. `finally` ends the process, so the traceback would be lost if it were not printed here.
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        # Exit without joining threads, because threads of a failed process group or save may wait for lost ranks
        # forever.
        os._exit(code)

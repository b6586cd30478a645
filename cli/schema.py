"""`schema`: print the JSON Schema of configs."""

from __future__ import annotations

import os
import sys


def schema() -> None:
    """Print the JSON Schema of configs, for completion and checks in an editor."""
    os.environ["SLUICE_DOCSTRINGS"] = "1"  # must be set before the sections are imported (pipeline/config/types.py)
    from pipeline.config.schema import format_json_schema

    sys.stdout.write(format_json_schema())

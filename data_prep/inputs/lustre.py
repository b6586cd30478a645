"""Stripe rule of the shard folder on Lustre: as `site.stripe` says, by default one storage target for each shard.

Every task writes files of its own, so parallelism comes from the number of files; striping each of them over
several targets only makes opening dearer, until shards are so few that targets idle. `lfs setstripe -c 1 DIR` sets
the folder's default, which files inherit when they are created, so it runs before the first shard is written
(Lustre manual, "Managing file layout (striping)"). On other file systems, or without `lfs`, nothing happens; when
`lfs` fails, that is a warning: a shard with another stripe count is slower, not wrong.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from pipeline.base.files import file_system_type
from pipeline.config.site import StripeConfig

_TIMEOUT_S = 60


def stripe(
    directory: Path,
    rule: StripeConfig,
    log: Callable[[str], None],
    file_system: Callable[[Path], str] = file_system_type,
) -> str:
    """Stripe new files of `directory` by `rule` where it lies on Lustre; the options that `lfs setstripe` took, ""
    where it took none. Never raises for what `lfs` does."""
    lfs = shutil.which("lfs")
    if lfs is None or file_system(directory) != "lustre":
        return ""
    size = [] if rule.size_mb is None else ["-S", f"{rule.size_mb}M"]
    pool = [] if rule.pool is None else ["-p", rule.pool]
    options = ["-c", str(rule.count), *size, *pool]
    command = [lfs, "setstripe", *options, os.fspath(directory)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip()
        log(f"warning: {' '.join(command)} failed, the folder keeps its stripe count: {detail}")
        return ""
    return " ".join(options)

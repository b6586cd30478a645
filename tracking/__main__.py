"""The follower's process: `python -m tracking SINK|telemetry RUN`, or `… SINK RUN --once [KEY=VALUE …]`.

The supervisor starts the first form beside the ranks, and ends it; the second brings a sink up to date, by hand.
"""

from __future__ import annotations

import sys

from pipeline.base.errors import UserError, print_error
from pipeline.base.signals import StopFlag
from pipeline.config.read import config_from_mapping, overridden
from pipeline.run.directory import Run
from tracking import registry


def main(arguments: list[str]) -> int:
    """Feed a sink, or watch a node; returns the exit code."""
    flag = StopFlag().install()
    try:
        name, path, *more = arguments
        run = Run.open(path)
        run.refuse_foreign()
        if overrides := [word for word in more if "=" in word]:
            values = overridden(run.config.model_dump(mode="json"), overrides)
            run._config = config_from_mapping(values, "command line")  # for this process alone
        if name == "telemetry":
            from tracking.telemetry import sample

            return sample(run, run.config.track.telemetry_s or 10.0, flag)
        if name not in registry.wanted(run.config):
            raise UserError(f"track.{name} is not set: give it as KEY=VALUE; sinks are {', '.join(registry.SINKS)}")
        registry.refuse_missing(run.config)
        from tracking.follower import follow

        return follow(run, name, flag, "--once" in more)
    except Exception as error:
        return print_error(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

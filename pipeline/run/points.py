"""The points of a sweep as runs: made from the sweep's own run, with links to its data and code.

runs/NAME/points/000/   config.yaml (the sweep's, with the point's values), data -> ../../data, code -> ../../code,
                        and jobs/, metrics.jsonl, checkpoints/, evaluation/ like any run
"""

from __future__ import annotations

import os

from pipeline.base.files import write_atomic, write_json
from pipeline.base.yaml12 import dump_yaml
from pipeline.config.read import dump_metadata, make_point_configs, make_run_values_dumper, remove_metadata
from pipeline.run.directory import Run
from pipeline.run.events import Created


def list_points(run: Run) -> list[Run]:
    """The runs of a sweep's points, where the sweep lies now; none where `run` is no sweep.

    Nothing is made: a point that is not there yet is known by the config that it will have.
    """
    return [Run(run.path / "points" / config.run.name, config) for config in make_point_configs(run.config)]


def create_points(run: Run) -> list[Run]:
    """The same, those that are missing made: for whoever writes into them."""
    found = list_points(run)
    missing = [point for point in found if not point.config_file.exists()]
    if not missing:
        return found
    values_of = make_run_values_dumper(run.config_file)
    for point in missing:
        for folder in (point.jobs_dir, point.checkpoints_dir, point.evaluation_dir):
            folder.mkdir(parents=True, exist_ok=True)
        for link in (point.data_dir, point.code_dir):
            if not os.path.lexists(link):
                link.symlink_to(f"../../{link.name}")
        values = values_of(point.config)
        if run.metadata_file.exists():  # otherwise the code of the run is older and reads all values from config.yaml
            write_json(point.metadata_file, dump_metadata(point.config))
            values = remove_metadata(values)
        write_atomic(point.config_file, dump_yaml(values))
        point.append_event(Created(config=str(point.config_file), sweep=run.config.run.name))
    return found

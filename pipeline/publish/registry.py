"""An entry in an MLflow model registry for each published version, by MLflow's own client.

A version of the registered model has the folder as its source and says in tags what it is of, so that the same step of
the same run is entered once, however often somebody tries. A server takes no plain path of a folder as a source (that
is for its own artifacts), so it is written as `folder:///…`; nothing is uploaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.base.errors import UserError

_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "60", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3"}
"""Seconds of a request, and how often one is tried again; otherwise a server that is away takes MLflow minutes."""
_SAME = ("run", "step", "weights_sha256")


def register(uri: str, model: str, folder: Path, tags: Mapping[str, Any]) -> str:
    """Enter the published `folder` as a version of `model`, unless one is there of the same run, step and weights; what
    was done, in words. Raises UserError where MLflow is missing and, naming it, where the server does not answer or
    refuses."""
    for name, value in _PATIENCE.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise UserError("publish.mlflow needs MLflow's client: pip install -e '.[mlflow]'") from error
    server, said = MlflowClient(tracking_uri=uri, registry_uri=uri), {key: str(value) for key, value in tags.items()}
    try:
        if not server.search_registered_models(f"name = '{model}'"):
            try:
                server.create_registered_model(model)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":  # by another run, since the search
                    raise
        for known in server.search_model_versions(f"name = '{model}'"):
            if all(known.tags.get(key) == said[key] for key in _SAME):
                return f"version {known.version} of {model} at {uri} is it already"
        entry = server.create_model_version(model, f"folder://{folder}", tags=said)
    except MlflowException as error:
        raise UserError(f"publish.mlflow: {uri} made no entry of {folder}, which is published: {error}") from error
    return f"version {entry.version} of {model} at {uri}"

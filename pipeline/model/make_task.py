"""Choose the task of a run."""

from __future__ import annotations

from pipeline.data.manifest import Manifest, SampleManifest
from pipeline.model.task import CustomModelTask, DecoderTask, Task
from pipeline.model.transformers_task import TransformersTask
from pipeline.run.directory import Run


def make_task(run: Run, manifest: Manifest | SampleManifest) -> Task:
    """Return the task of a run: for tokens a `TokenTask`, for arrays a `CustomModelTask`.

    Raises UserError if the user's module cannot be imported, or if its `transform` does not return the expected arrays.
    """
    if isinstance(manifest, Manifest):
        token_task = TransformersTask if run.config.model.backend == "transformers" else DecoderTask
        return token_task(run.config, manifest.vocab_size, manifest.eos_id, manifest.eos_starts_next)
    assert run.user_model is not None
    return CustomModelTask(run, run.user_model, run.user_model.load(run.code_dir), manifest)

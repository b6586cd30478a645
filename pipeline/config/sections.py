"""The config of a run: every key that `config.yaml` may contain, its type, its default and its meaning.

Each section is a pydantic model. Unknown keys are errors. The docstring under a field is the documentation of its key.
The JSON Schema (`submit.py schema`, for editors) and docs/config.md contain these docstrings. pipeline/config/read.py
reads files, `extends` and command-line overrides. `data`, `site` and `stages` are in separate modules.

Nothing here imports torch, numpy or h5py, because the login node also reads configs.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    Field,
    PositiveInt,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    Tag,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from pipeline.base.errors import UserError
from pipeline.config.datasets import DataConfig
from pipeline.config.search import DEFAULT_TRIALS_AT_ONCE, UNSEARCHABLE_KEYS, SearchConfig, find_search_conflicts
from pipeline.config.site import SiteConfig
from pipeline.config.stages import COMMAND_TAG, STAGES, Stage, StagesConfig, find_placeholders
from pipeline.config.types import (
    FilePath,
    Fraction,
    Name,
    NonNegativeInt,
    Policy,
    PositiveFloat,
    RopeScaling,
    Section,
    StateConfig,
    check_unused_keys,
    must_match,
)


class RunConfig(Section):
    """The name of the run and where its files are."""

    name: Annotated[Name, Policy.CHANGEABLE]
    """Name of the run. The run directory is `root/name`, and the Slurm jobs are named `STAGE-NAME`, such as
    `train-demo`."""
    root: Annotated[FilePath, Policy.CHANGEABLE, Policy.PATH] = Path("runs")
    """Directory that contains the run directories. On a cluster, all nodes must share the file system of this
    directory. A relative path in a config file starts from the directory of that file. A relative path on the command
    line, and the default `runs`, start from the working directory."""
    seed: Annotated[NonNegativeInt, Policy.SWEEPABLE] = 1
    """Seed of all randomness: initial weights, order of the samples, dropout."""
    sharing: Literal["private", "group", "all"] = "private"
    """Who may read the files of the run: `private` (modes 0700 and 0600), `group` (0750, 0640) or `all` (0755,
    0644)."""


# -- model ---------------------------------------------------------------------------------------------------


class ModelConfig(Section):
    """A decoder like Llama, with keys named after Hugging Face's `LlamaConfig`, a model of the package transformers, or
    a custom model."""

    init_from: Annotated[FilePath | None, Policy.PATH, Policy.NOT_IN_IDENTITY] = None
    """Directory with an open model in Hugging Face's format (config.json, safetensors, tokenizer). Training starts from
    its weights. Its config.json sets this section, and its tokenizer sets `data.tokenizer`. null: the initial weights
    are random."""
    backend: Literal["decoder", "transformers"] | None = None
    """What builds the model: `decoder`, Sluice's own, or `transformers`, the package with this name. `transformers` has
    more families, but the model cannot be split (`parallel.tensor`, `parallel.pipeline`, `parallel.context`), and it
    needs `init_from`. null: `decoder`, or `transformers` if only transformers has the family of the model in
    `init_from`."""

    target: Annotated[str | None, Policy.NOT_SWEEPABLE] = None
    """Python module that defines a custom model, such as `my_package.my_model` (docs/models.md). Of the other keys in
    this section, only `options`, `layers` and `initializer_range` then have an effect. null: use the decoder."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the custom model: any keys and values, passed to its functions unchanged. With the backend
    `transformers`, `init_from` sets this key: the content of config.json."""
    dim: PositiveInt = 256
    """Width of the residual stream (`hidden_size`)."""
    layers: PositiveInt = 4
    """Number of decoder blocks (`num_hidden_layers`)."""
    heads: PositiveInt = 8
    """Number of query heads (`num_attention_heads`)."""
    kv_heads: PositiveInt | None = None
    """Number of key and value heads (`num_key_value_heads`); null: the number of query heads."""
    head_dim: PositiveInt | None = None
    """Width of one attention head; null: `dim / heads`."""
    intermediate_size: PositiveInt | None = None
    """Width of the SwiGLU layer; null: 8/3 of `dim`, rounded up to a multiple of 64."""
    vocab_size: PositiveInt | None = None
    """Number of rows of the embedding and the output layer, at least the number of token ids of the tokenizer. null:
    the number of token ids."""
    sliding_window: PositiveInt | None = None
    """Number of tokens that a token reads in attention: itself and those before it. null: all tokens before it."""
    max_window_layers: NonNegativeInt | None = None
    """Number of blocks, counted from the first, without `sliding_window`. Models of the Qwen family have this value.
    null: all blocks have the window."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Which projections of attention have biases: `none`, `qkv` (queries, keys and values, as in Qwen2) or `all` (also
    the output projection)."""
    qk_norm: bool = False
    """Normalize the queries and keys of each head before rotary positions are applied, as in Qwen3."""
    rope_theta: Annotated[PositiveFloat, Policy.CHANGEABLE_IN_FORK] = 10_000.0
    """Base of the frequencies of rotary positions."""
    rope_scaling: Annotated[RopeScaling | None, Policy.CHANGEABLE_IN_FORK] = None
    """Scaling of the frequencies of rotary positions; null: no scaling."""
    rms_norm_eps: PositiveFloat = 1e-5
    """Epsilon of the RMS norms."""
    tie_word_embeddings: bool = False
    """Use the weights of the embedding as those of the output layer."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0), Policy.CHANGEABLE_IN_FORK] = 0.0
    """Dropout probability on the outputs of attention and MLP."""

    @property
    def all_options(self) -> dict[str, Any]:
        """The options that the functions of a custom model receive: `options` and `layers`."""
        return {**self.options, "layers": self.layers}

    @property
    def other_model_key(self) -> str | None:
        """The key that replaces Sluice's decoder by another model, with its value; None if the decoder is trained."""
        if self.target is not None:
            return f"model.target {self.target}"
        return "model.backend transformers" if self.backend == "transformers" else None

    def describe(self) -> str:
        """Return the kind of the model and its sizes, as text."""
        if self.target is not None:
            return self.target
        if self.backend == "transformers":
            return f"{self.options['architectures'][0]} of transformers, {self.layers} layers"
        return f"a decoder of {self.layers} layers, {self.dim} wide, {self.heads} heads ({self.num_kv_heads} kv)"

    @model_validator(mode="after")
    def _check_sizes(self) -> ModelConfig:
        """Raise ValueError if keys of this section contradict each other, or a value cannot be used."""
        try:
            json.dumps(self.options, allow_nan=False)
        except ValueError:
            raise ValueError(
                "options: JSON has no .nan and .inf, so they would be lost: use a number or text instead"
            ) from None
        if self.target is not None:
            if not all(part.isidentifier() for part in self.target.split(".")):
                raise ValueError(f"target ({self.target}) is not a name of a Python module such as my_package.my_model")
            if self.backend is not None:
                raise ValueError(f"backend ({self.backend}) is for language models: remove it, or target")
            if "layers" in self.options:
                raise ValueError("options.layers is model.layers: set that key instead")
            used_keys = {"target", "options", "layers", "initializer_range"}
            check_unused_keys(self, used_keys, "with model.target, use options")
            return self
        if self.backend == "transformers":
            if self.init_from is None or not self.options:
                raise ValueError("backend transformers needs init_from: set it to the directory of a model")
            used_keys = {"init_from", "backend", "options", "layers", "vocab_size"}
            check_unused_keys(self, used_keys, "with model.backend transformers, config.json of init_from sets it")
            return self
        if self.options:
            raise ValueError("options are for a custom model: set target to its module")
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(
                f"dim ({self.dim}) is not a multiple of heads ({self.heads}): set head_dim, or change one of them"
            )
        if self.heads % self.num_kv_heads:
            raise ValueError(f"heads ({self.heads}) is not a multiple of kv_heads ({self.num_kv_heads})")
        if self.rope_scaling is not None and self.rope_scaling.rope_type == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"rope_scaling.rope_type yarn needs rope_theta above 1, not {self.rope_theta:g}")
        if self.head_size % 2:
            raise ValueError(f"the head size ({self.head_size}) is odd, but rotary positions need an even one")
        return self

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads: `kv_heads`, or its default."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """Width of one head: `head_dim`, or its default."""
        return self.head_dim or self.dim // self.heads

    def get_window(self, layer: int) -> int | None:
        """Return the number of tokens that a token reads in the block `layer`; None without a limit."""
        return None if layer < (self.max_window_layers or 0) else self.sliding_window

    @property
    def ffn_size(self) -> int:
        """Width of the SwiGLU layer: `intermediate_size`, or its default."""
        return self.intermediate_size or 64 * math.ceil(self.dim * 8 / 3 / 64)


class AdapterConfig(Section):
    """Train a low-rank addition to each of some linear layers (LoRA, arXiv 2106.09685). All other weights are
    frozen."""

    kind: Literal["lora"] = "lora"
    """The kind of adapter."""
    rank: PositiveInt = 16
    """Rank of each addition: the width between its two matrices."""
    alpha: PositiveFloat = 32.0
    """The addition is multiplied by `alpha / rank`."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0), Policy.CHANGEABLE_IN_FORK] = 0.0
    """Dropout probability on the inputs of the adapters."""
    targets: list[str] = Field(default_factory=lambda: ["*.q_proj", "*.v_proj"], min_length=1)
    """Patterns (`*`, `?`, `[…]`) for the names of linear layers that get an adapter, such as `*.mlp.*` or
    `model.layers.[0-3].*`. The output layer gets none."""
    base: Literal["nf4"] | None = None
    """How the frozen weights of linear layers are stored: `nf4`, in about 4 bits (QLoRA, arXiv 2305.14314; needs
    torchao, and data parallelism without ZeRO), or null, in the type in which they are multiplied."""


# -- parallel ------------------------------------------------------------------------------------------------


class HookConfig(Section):
    """How gradients are compressed when whole replicas exchange them."""

    kind: Literal["none", "fp16", "bf16", "powersgd", "topk"] = "none"
    """Compression: `none`, `fp16` or `bf16` (half the bytes), `powersgd` (products of two thin matrices) or `topk`
    (only the largest entries). `powersgd` and `topk` add the part of the gradient that they omit to the gradient of the
    next step."""
    rank: PositiveInt = 4
    """Number of columns of the thin matrices of PowerSGD."""
    ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.05
    """Fraction of the entries of each gradient that Top-K sends."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps, at the start of the run, with less compression. `topk` lowers the fraction from 1 to `ratio` by
    the same factor each step. `powersgd` sends whole gradients."""


class LocalSgdConfig(Section):
    """Each replica takes its own optimizer steps, and all replicas average their weights periodically."""

    every: PositiveInt
    """Number of steps between two averages."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps, at the start of the run, that average gradients in every step, as without local SGD."""
    outer_lr: PositiveFloat = 1.0
    """Step size of the outer step, which moves the weights from the last average towards the new one. With 1 and
    without momentum, the weights become the new average."""
    outer_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Nesterov momentum of the outer step. DiLoCo (arXiv 2311.08105) uses `outer_lr` 0.7 and `outer_momentum` 0.9."""


class DataParallel(Section):
    """Explicit data-parallel sizes."""

    replicate: PositiveInt = 1
    """Number of replicas of the model."""
    shard: PositiveInt = 1
    """Number of ranks that split the parameters of one replica (ZeRO)."""


class ParallelConfig(Section):
    """How the ranks split the work. The product of the parallel sizes is the number of ranks."""

    tensor: PositiveInt = 1
    """Tensor-parallel size: the number of ranks that split the matrices of each layer."""
    pipeline: PositiveInt = 1
    """Pipeline-parallel size: the number of ranks along the pipeline."""
    context: PositiveInt = 1
    """Context-parallel size: the number of ranks that split each sequence."""
    data: Literal["auto"] | DataParallel = "auto"
    """Data-parallel sizes. `auto`: use all ranks that are left after `tensor`, `pipeline` and `context`."""
    zero: Literal[0, 1, 2, 3] = 0
    """What data-parallel ranks shard (ZeRO level): 0 nothing, 1 optimizer state, 2 also gradients, 3 also
    parameters."""
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipe_v"] = "1f1b"
    """Pipeline schedule. This key has no effect if `pipeline` is 1."""
    virtual_stages: PositiveInt = 1
    """Number of pipeline-parallel stages per rank. This key has no effect if `pipeline` is 1."""
    sequence: bool = True
    """Sequence parallelism: outside the layers that tensor parallelism splits (in norms and the residual stream),
    tensor-parallel ranks split the sequence."""
    loss_parallel: bool = True
    """Each tensor-parallel rank computes the loss for its own part of the vocabulary, so that logits are never
    gathered."""
    reduce: Literal["auto", "step", "micro_batch"] = "auto"
    """When data-parallel ranks reduce gradients: once per `step`, or after each `micro_batch` (more traffic, but only a
    shard of the gradients is in memory). `auto`: per micro-batch with `zero` 2 or 3 and no pipeline, otherwise per
    step."""
    offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and copy them to the GPU when they are needed."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass recomputes instead of storing it: nothing (`none`), everything except matrix products and
    attention (`selective`), or everything (`full`)."""
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """Communication library. `auto`: NCCL on GPUs, otherwise Gloo. `mpi` needs mpi4py and an MPI library
    (docs/communication.md)."""
    accurate_sums: bool = False
    """With `backend: mpi`: sum fp16 and bf16 values in fp32 and round once, instead of after every addition. This
    doubles the bytes that are sent."""
    bucket_mb: PositiveInt = 25
    """Size of the buckets in which DDP reduces gradients, in MiB."""
    hook: HookConfig = HookConfig()
    """Compression of the gradients that whole replicas exchange (docs/communication.md)."""
    local_sgd: LocalSgdConfig | None = None
    """Local SGD: each replica takes its own optimizer steps, and all replicas average their weights periodically. null:
    gradients are averaged in every step."""


# -- train ---------------------------------------------------------------------------------------------------


class LengthConfig(Section):
    """A length of training sequences, and the step from which it applies."""

    from_step: NonNegativeInt
    """The first optimizer step with this length. Steps are counted from 1; in the first entry, 0 means the same."""
    length: PositiveInt
    """Number of tokens in a training sample."""


class EmaConfig(Section):
    """An exponential moving average of the trained weights. `resume` cannot change these keys after the first
    checkpoint."""

    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.999
    """Factor of the previous average. The new weights have the factor `1 - decay`. The initial weights still have the
    factor `decay` to the power of the number of updates."""
    every_steps: PositiveInt = 1
    """Number of optimizer steps between two updates of the average. A skipped step does not update the average."""


class EarlyStoppingConfig(Section):
    """Complete the train stage when a metric on held-out data no longer improves."""

    metric: str = "loss"
    """The metric, by its name in metrics.jsonl without `held_out_`: `loss`, `ema_loss` with `train.ema`, `SOURCE.loss`
    of a mixture, a metric of a custom model, or one that a callback adds in `on_evaluation`."""
    patience: PositiveInt = 5
    """Number of evaluations in a row without an improvement after which the stage is completed."""
    min_delta: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    """A value is an improvement if it is better than the best value so far by more than this difference."""
    mode: Literal["min", "max"] | None = None
    """Whether lower (`min`) or higher (`max`) values are better. null: `min` for a metric whose name ends in `loss`,
    and `max` for one whose name ends in `accuracy`; set the key for any other metric."""

    @property
    def resolved_mode(self) -> str | None:
        """The value of `mode`, or the one that follows from the name of the metric; None if none follows."""
        modes = {"loss": "min", "accuracy": "max"}
        return self.mode or next((mode for suffix, mode in modes.items() if self.metric.endswith(suffix)), None)

    @property
    def rule(self) -> dict[str, Any]:
        """What counts as an improvement: all values of this section except the patience."""
        return {"metric": self.metric, "mode": self.resolved_mode, "min_delta": self.min_delta}

    @model_validator(mode="after")
    def _check_mode(self) -> EarlyStoppingConfig:
        """Raise ValueError if it is unknown whether lower or higher values of the metric are better."""
        if self.resolved_mode is None:
            raise ValueError(f"mode is missing: set it to min or max, because the metric is {self.metric}")
        return self


class TrainConfig(Section):
    """The training loop."""

    steps: Annotated[PositiveInt | None, Policy.NOT_IN_IDENTITY, Policy.INCREASABLE] = None
    """Number of optimizer steps of the whole run. Set either `steps` or `epochs`. null: the number follows from
    `epochs`."""
    epochs: Annotated[PositiveInt | None, Policy.NOT_IN_IDENTITY, Policy.INCREASABLE] = None
    """Number of times that each sample is used. The number of steps follows from the number of samples in the shards.
    The last batch is filled up with the first samples of the next epoch."""
    global_batch: Annotated[PositiveInt, Field(le=2**24), Policy.FIXED_IN_FORK] = 16
    """Number of sequences per optimizer step, over all ranks."""
    micro_batch: PositiveInt = 4
    """Number of sequences per forward and backward pass on one rank."""
    gather: bool = False
    """For a custom model with `LOSS = "batch"`: compute the loss of a micro-batch on the samples of all data-parallel
    ranks. Each rank gathers the outputs of the others, and gradients flow back. The loss then compares
    `micro_batch` × data-parallel ranks samples. false: each rank compares its `micro_batch` samples only."""
    sequence_schedule: Annotated[
        Annotated[list[LengthConfig], Field(min_length=1)] | None,
        Policy.CHANGEABLE,
        Policy.NOT_IN_IDENTITY,
        Policy.NOT_SWEEPABLE,
    ] = None
    """Lengths of the training sequences, which grow during the run, as a list of `{from_step: 0, length: 4096}`. The
    number of sequences per step stays the same. `data.sequence_length` is the last of these lengths, with which the
    model is also evaluated and exported. `resume` may change the lengths of future steps. null: all sequences have
    `data.sequence_length` tokens."""
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    """Data type of the forward and backward pass. `optimizer.state` sets the types of weights and optimizer state.
    `fp8`: bf16, with the matrix products of the blocks in float8 (needs torchao and a GPU such as an H100)."""
    fp8_scales: Literal["rowwise", "tensorwise"] = "rowwise"
    """Which values share a scale in float8: those of a row, or those of a whole tensor (faster but less exact)."""
    threads: Annotated[PositiveInt, Policy.NOT_SWEEPABLE] = 1
    """Number of CPU threads per rank. A different number may change the last digits of the result."""
    deterministic: bool = True
    """Allow only deterministic kernels. If an operation has none, the run fails."""
    compile: bool = False
    """Compile each decoder block with torch.compile."""
    loss_chunk: PositiveInt | None = None
    """Number of tokens for which logits, loss and gradient are computed at a time. This saves memory, because the
    logits of a whole micro-batch are never stored. The key changes the last digits of the result. Good values for large
    vocabularies are 1024 to 4096. null: all tokens at once."""
    ema: Annotated[EmaConfig | None, Policy.FIXED_IN_FORK] = None
    """An exponential moving average of the trained weights in fp32. Evaluations also measure its loss (`ema_loss`), and
    `export --ema` writes it (docs/averaging.md). null: no average."""
    balance: Annotated[bool, Policy.CHANGEABLE, Policy.NOT_IN_IDENTITY] = True
    """With `data.document_mask`, assign the samples of each global batch to ranks so that all ranks have about the same
    work in attention. false: in the order of the samples. Batches are not balanced with `parallel.local_sgd` and with
    the hooks `powersgd` and `topk`, whose results depend on which samples a rank has."""
    log_every: Annotated[PositiveInt, Policy.CHANGEABLE, Policy.NOT_IN_IDENTITY] = 10
    """Number of steps between two lines in the log. metrics.jsonl always contains every step."""
    evaluate_every: Annotated[PositiveInt | None, Policy.NOT_IN_IDENTITY] = None
    """Number of steps between two evaluations on held-out data in the train stage. The results are `held_out_loss` in
    metrics.jsonl and a second curve in report.html. null: no evaluations in the train stage. This key does not affect
    the stage `evaluate`."""
    evaluate_sequences: Annotated[PositiveInt, Policy.NOT_IN_IDENTITY] = 64
    """Number of held-out sequences in each evaluation of the train stage (`evaluate_every`). All evaluations use the
    same sequences: the first ones of the held-out data."""
    early_stopping: Annotated[EarlyStoppingConfig | None, Policy.CHANGEABLE, Policy.NOT_IN_IDENTITY] = None
    """When the train stage is completed before its last step, by the evaluations of `evaluate_every`
    (docs/callbacks.md). null: never."""
    callbacks: Annotated[list[str], Policy.CHANGEABLE, Policy.NOT_IN_IDENTITY, Policy.NOT_SWEEPABLE] = Field(
        default_factory=list
    )
    """Python modules with a function `callbacks(config)`, whose callbacks take part in the training, by their dotted
    names, such as `examples.gradient_statistics` (docs/callbacks.md). They work with all models. The run has a copy of
    them, so after a change of this key, use `resume --update-code`. A custom model may also define callbacks itself."""
    profile_every: Annotated[PositiveInt | None, Policy.CHANGEABLE, Policy.NOT_IN_IDENTITY] = None
    """With the value N, all ranks record every Nth step with torch.profiler (docs/profiling.md). null: record no steps.
    Regardless of this key, `submit.py profile` records the next steps."""

    @field_validator("sequence_schedule")
    @classmethod
    def _check_schedule(cls, schedule: list[LengthConfig] | None) -> list[LengthConfig] | None:
        """Return the schedule with `from_step` 1 in its first entry.

        Raises ValueError unless the schedule begins with the first step, and steps and lengths increase.
        """
        if schedule is None:
            return None
        if schedule[0].from_step == 0:
            schedule = [LengthConfig(from_step=1, length=schedule[0].length), *schedule[1:]]
        steps = [entry.from_step for entry in schedule]
        if steps[0] != 1 or any(after <= before for before, after in pairwise(steps)):
            raise ValueError(f"from_step must be 0 or 1 in the first entry and increase in the list, not {steps}")
        lengths = [entry.length for entry in schedule]
        if any(after <= before for before, after in pairwise(lengths)):
            raise ValueError(f"each length must be larger than the one before, but the lengths are {lengths}")
        return schedule

    @field_validator("callbacks")
    @classmethod
    def _check_callbacks(cls, modules: list[str]) -> list[str]:
        """Return the modules. Raises ValueError if one is named twice."""
        if repeated := [name for name in modules if modules.count(name) > 1]:
            raise ValueError(f"{repeated[0]} is named twice: remove one of the two")
        return modules

    @model_validator(mode="after")
    def _check_lengths(self) -> TrainConfig:
        """Raise ValueError unless either `steps` or `epochs` is set and micro-batches divide the global batch."""
        if (self.steps is None) == (self.epochs is None):
            problem = "are both given: set one of them to null" if self.steps else "are both missing: set one of them"
            raise ValueError(f"steps and epochs {problem}")
        if self.global_batch % self.micro_batch:
            raise ValueError(
                f"global_batch ({self.global_batch}) is not a multiple of micro_batch ({self.micro_batch})"
            )
        return self


# -- optimizer -----------------------------------------------------------------------------------------------


KEYS_OF_OPTIMIZER = {
    "adamw": {"betas", "eps", "state"},
    "sgd": {"momentum"},
    "muon": {"momentum", "betas", "eps"},
    "own": {"momentum", "betas", "eps"},
}
"""Value of `optimizer.name` → the keys that this optimizer uses, of the keys that only some optimizers use."""


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    name: Annotated[Literal["adamw", "sgd", "muon", "own"], Policy.FIXED_IN_FORK] = "adamw"
    """`adamw` (Loshchilov and Hutter, arXiv 1711.05101). `sgd`. `muon`: Muon for the matrices of the blocks, with
    updates scaled to the size of those of AdamW (Liu et al., arXiv 2502.16982), and AdamW for all other parameters.
    `own`: the function `optimizer` of the custom model in `model.target`."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate."""
    min_lr_ratio: Fraction = 0.1
    """Final learning rate, as a fraction of the peak."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps over which the learning rate rises linearly from 0 to the peak."""
    schedule: Literal["constant", "cosine", "linear", "wsd", "own"] = "cosine"
    """Learning rate after the warm-up: `constant`, `cosine`, `linear` or `wsd` (warm-up, stable, decay). `own`: the
    function `learning_rate` of the custom model in `model.target` sets the learning rate of all steps."""
    schedule_counts_from: Literal[0, 1] = 1
    """The number of the first step in the schedule. `1`: the last step has the final learning rate. `0`: each step has
    the same learning rate as with the schedulers of transformers. The first step of a warm-up then has the rate 0, and
    the last step is one step before the end of the decay."""
    decay_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """Fraction of the steps, at the end of the run, in which `wsd` decays linearly."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Constant added to the square root of the second moment."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Momentum of `sgd` and `muon`; null: 0.9 for `sgd`, 0.95 for `muon`."""
    weight_decay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.1
    """Weight decay of matrices. `adamw` and `muon` decouple it from the gradient; `sgd` adds it to the gradient.
    Vectors (norms, biases) have no weight decay."""
    state: Annotated[StateConfig, Policy.FIXED_IN_FORK] = StateConfig()
    """Data types in which `adamw` stores weights and moments between steps. If another optimizer is selected, this
    section must not be set."""
    freeze: list[str] = Field(default_factory=list)
    """Patterns (`*`, `?`, `[…]`) for the names of parameters that are not trained, such as `model.embed_tokens.*` or
    `model.layers.[0-3].*`."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest norm of the gradient over all parameters. A larger gradient is scaled down. null: no clipping."""

    @model_validator(mode="after")
    def _check_keys_are_used(self) -> OptimizerConfig:
        """Raise ValueError if a key is set that the optimizer does not use.

        `schedule_counts_from` must not be set with the schedule `own`. Other keys of schedules are not checked.
        """
        unused_keys = set().union(*KEYS_OF_OPTIMIZER.values()) - KEYS_OF_OPTIMIZER[self.name]
        check_unused_keys(self, type(self).model_fields.keys() - unused_keys, f"optimizer.name is {self.name}")
        if self.schedule == "own" and self.schedule_counts_from != 1:
            raise ValueError(
                f"schedule_counts_from ({self.schedule_counts_from}) has no effect: schedule is own, and your "
                "`learning_rate` gets the steps from 1; remove the key"
            )
        return self


def check_warmup(config: Config, steps: int) -> None:
    """Raise UserError if the warm-up is longer than a run of `steps` steps."""
    warmup = config.optimizer.warmup_steps
    epochs = config.train.epochs
    if warmup > steps:
        length = f"train.steps ({steps})"
        if epochs is not None:
            length = f"the {steps} steps of train.epochs ({epochs}): resume with more epochs, or start a new run"
        raise UserError("config.out_of_range", f"optimizer.warmup_steps ({warmup}) is more than {length}")


# -- checkpoint, evaluate, publish ---------------------------------------------------------------------------


class KeepConfig(Section):
    """Which checkpoints are kept: those that `last`, `every_steps` or `best` selects, up to the size `at_most_gb`. The
    newest intact checkpoint is always kept."""

    last: PositiveInt = 3
    """Number of the newest checkpoints to keep."""
    every_steps: PositiveInt | None = None
    """Also keep each checkpoint whose step is a multiple of this number. null: none."""
    best: PositiveInt | None = None
    """Also keep this number of checkpoints with the lowest held-out loss in the train stage. Only the steps that
    `train.evaluate_every` evaluates have this loss. null: none."""
    at_most_gb: PositiveFloat | None = None
    """Largest total size of the kept checkpoints in GB (1e9 bytes). If they are larger, checkpoints are deleted in this
    order: those of `every_steps`, the oldest first; those of `best`, the highest loss first; those of `last`, the
    oldest first. While a checkpoint is written, it takes up additional space. null: no limit."""

    @classmethod
    def from_value(cls, value: int | KeepConfig) -> KeepConfig:
        """Return the value of `checkpoint.keep` as rules: a plain number is the value of `last`."""
        return value if isinstance(value, KeepConfig) else cls(last=value)


class CheckpointConfig(Section):
    """When checkpoints are saved and how many are kept."""

    every_steps: PositiveInt = 100
    """Number of steps between two checkpoints. The last step is always saved."""
    memory_every_steps: PositiveInt | None = None
    """Number of steps between two snapshots in memory. After a restart in place, the ranks load the newest snapshot,
    unless a checkpoint is newer. Each rank needs memory for two copies of its state. A snapshot is lost when the job
    ends. null: no snapshots, except those of asynchronous saves."""
    memory_copies: Literal[1, 2] = 1
    """2: each rank also sends its snapshots to a rank on the next node, so that they survive the loss of one node. Each
    rank then needs memory for two more copies of its state."""
    keep: PositiveInt | KeepConfig = 3
    """Which checkpoints to keep: the number of the newest ones, or rules such as `{last: 3, every_steps: 10000}`
    (docs/checkpoints.md). All other checkpoints are deleted."""
    mode: Literal["sync", "async"] = "async"
    """`async`: write in the background while training continues. Each rank needs memory for one copy of its state.
    `sync`: wait until the checkpoint is written."""

    @property
    def keep_rules(self) -> KeepConfig:
        """`keep` as rules: a plain number is the value of `last`."""
        return KeepConfig.from_value(self.keep)


class EvaluateConfig(Section):
    """When the model is evaluated, and on which data."""

    every: Annotated[Literal["end", "checkpoint"], Policy.CHANGEABLE] = "end"
    """`end`: evaluate the newest checkpoint when the train stage is done. `checkpoint`: evaluate every checkpoint that
    `checkpoint.keep` keeps."""
    batch: PositiveInt = 8
    """Largest number of sequences per forward pass. If the fp32 logits would take more than 2 GiB, fewer sequences are
    used. The batch size changes only the last digits of the result."""
    max_sequences: PositiveInt | None = None
    """Largest number of sequences to evaluate; null: all held-out text."""
    tasks: Annotated[Path | list[Path], Policy.PATH] = Field(default_factory=list)
    """One or more JSONL files of evaluation tasks: questions with choices or answers (docs/evaluation.md). The name of
    each result starts with the name of its file."""
    answer_tokens: PositiveInt = 32
    """Largest number of tokens that are generated for an answer."""

    @property
    def task_files(self) -> list[Path]:
        """`tasks` as a list."""
        return self.tasks if isinstance(self.tasks, list) else [self.tasks]


class Bounds(Section):
    """The allowed range of a result."""

    max: float | None = Field(default=None, allow_inf_nan=False)
    """Largest allowed value."""
    min: float | None = Field(default=None, allow_inf_nan=False)
    """Smallest allowed value."""

    @model_validator(mode="after")
    def _check_has_bound(self) -> Bounds:
        """Raise ValueError if neither bound is set."""
        if self.max is None and self.min is None:
            raise ValueError("set max, min or both")
        return self


class RegistryConfig(Section):
    """An MLflow model registry."""

    uri: Annotated[
        str,
        must_match(
            re.compile(r"https?://[^@\s]+"),
            "write http(s)://HOST:PORT without a user; pass user and password in the variables of MLflow",
        ),
    ]
    """URL of the server, such as `http://mlflow.example:5000`. MLflow reads user and password, or a token, from
    environment variables (`MLFLOW_TRACKING_USERNAME`, …). Pass these with `site.pass` or `site.secrets`."""
    model: Name | None = None
    """Name of the registered model; null: the name of the run. The model is created if it does not exist."""


class PublishConfig(Section):
    """Publish the newest checkpoint after its evaluation, as `TO/NAME/step-…`. It appears there completely or not at
    all."""

    to: Annotated[Path, Policy.PATH]
    """Directory for published models. The directory is created if it does not exist."""
    name: Name | None = None
    """Name of the directory of this model in `to`; null: the name of the run."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the published weights."""
    rules: dict[str, Bounds | None] = Field(default_factory=dict)
    """Allowed ranges of evaluation results by their names, such as `{bits_per_byte: {max: 1.9}}`. A model with a result
    outside its range is not published. null removes a rule, such as a rule from a file that `extends` names."""
    no_worse_than: Annotated[Path | None, Policy.PATH] = None
    """Directory of another run. The evaluation must be at least as good as the newest evaluation of the other run. The
    evaluations are compared by bits per byte if the data is text, otherwise by loss."""
    license: str | None = None
    """License of the model as an identifier of the Hugging Face Hub, such as `apache-2.0`. null: the model card says
    that no license is given."""
    data_license: str | None = None
    """License of the data, or where to find it."""
    description: str | None = None
    """First paragraph of the model card."""
    mlflow: RegistryConfig | None = None
    """Model registry that receives an entry for each published version; null: none."""
    run: str | None = None
    """Shell command to run in the published directory, such as an upload. If the command fails, the stage fails. If the
    stage is retried, the command runs again."""


# -- recovery ------------------------------------------------------------------------------------------------


WatchdogLimit = Annotated[float, Field(gt=0.0, le=6000.0)]
"""A time in seconds. It must be less than the timeout of collectives (pipeline/comm/groups.py)."""


class RetryBudgets(Section):
    """How often a stage is retried after each cause of a stop. 0: never. `resume` resets the counts."""

    preempted: NonNegativeInt = 1000
    """Preemptions, requeues by Slurm or an administrator, and signals of unknown origin. The run does not
    cause these stops, so the limit is high."""
    node_failure: NonNegativeInt = 100
    """Failures of a node while the job runs on it."""
    time_limit: NonNegativeInt = 1000
    """Stops at the time limit of the job. An attempt that saved no new checkpoint is not retried."""
    bad_node: NonNegativeInt = 10
    """Stops because of a bad node: the check before the stage (`recovery.preflight`), a GPU or a file system failed.
    The job continues without the bad node."""
    out_of_memory: NonNegativeInt = 2
    """Failures because the host or a device ran out of memory."""
    crash: NonNegativeInt = 2
    """Unexpected errors: exceptions, and killed or lost ranks."""
    hang: NonNegativeInt = 3
    """Hangs: no progress for longer than `recovery.hang_s`, `recovery.start_s` or `recovery.save_s`."""
    non_finite: NonNegativeInt = 2
    """Returns to an earlier checkpoint after too many bad steps in a row (`recovery.skip_bad_steps`)."""
    user_error: NonNegativeInt = 0
    """Errors that the user must correct, such as a wrong config, a full disk or damaged inputs."""


class RecoveryConfig(Section):
    """What happens after a stop, and when a stage counts as hung."""

    budgets: RetryBudgets = RetryBudgets()
    """How often a stage is retried after each cause of a stop, such as `{crash: 2}`."""
    max_restarts_without_progress: PositiveInt = 3
    """How many attempts in a row may make no progress (in the train stage: save no new checkpoint) and are still
    retried. This applies after preemptions, requeues, signals of unknown origin, node failures and bad nodes. After any
    other cause, an attempt without progress is not retried."""
    hang_s: WatchdogLimit | None = None
    """Longest time in seconds that one phase of a step may take, such as the forward pass. null: 20 times the longest
    of the recent steps, but at least 300 and at most 6000 seconds."""
    start_s: WatchdogLimit = 1800.0
    """Longest time from the start of the ranks to their first step, in seconds."""
    save_s: WatchdogLimit = 1800.0
    """Longest time to save a checkpoint, in seconds."""
    grace_s: PositiveFloat | None = None
    """Seconds between the signal of a preemption and the end of the job. This is Slurm's GraceTime, which
    `submit.py doctor` shows. If a save cannot finish in that time, the save is skipped, and the run resumes from the
    previous checkpoint. null: the time is unknown."""
    in_place: bool = True
    """Restart the ranks within the same job after a crash, a hang, a lost connection or a loss that is not finite; also
    after a node failure or a bad node, if the job has enough other nodes (`stages.STAGE.nodes`). false: request that
    Slurm requeues the job. Without a batch job, the ranks are always restarted in place."""
    preflight: bool = True
    """Check the devices, the file system and the communication of each node before training starts."""
    exclude_hours: PositiveFloat = 24.0
    """How many hours new and requeued jobs exclude a bad node."""
    exclude_at_most: NonNegativeInt = 4
    """Largest number of bad nodes that are excluded at the same time. If more nodes are bad, the nodes that were
    recorded first are used again."""
    skip_bad_steps: NonNegativeInt = 3
    """Largest number of bad steps in a row that are skipped. A step is bad if the loss or the gradient is not finite,
    or if the loss is a spike. After one more bad step, training returns to the last checkpoint and excludes the samples
    of the bad steps."""
    spike_deviations: PositiveFloat | None = Field(default=None, ge=3.0)
    """A loss counts as a spike if it exceeds the mean of the last 100 losses by more than this number of standard
    deviations. null: no loss is a spike."""


RENAMED_KEYS: Mapping[str, str] = {
    **{f"recovery.{cause}": f"recovery.budgets.{cause}" for cause in RetryBudgets.model_fields},
    "recovery.fruitless": "recovery.max_restarts_without_progress",
    "data.long_dialogues": "data.long_documents",
}
"""Former name of a renamed key → its present name. Configs may still use the former names. Both names of a key are in
the same section."""
RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {"data.long_dialogues": {"split": "cut"}}
"""Former name of a renamed key → former value → its present value. Other values have not changed."""


# -- track ---------------------------------------------------------------------------------------------------

URL = re.compile(r"https?://\S+")
_Url = Annotated[str, must_match(URL, "write a URL such as https://host/path")]


@dataclass(frozen=True)
class TrackerEntry:
    """The class and the dependency of a tracker, as an annotation of its field in :class:`TrackConfig`."""

    module: str
    """The module that contains the class of the tracker."""
    class_name: str
    """The name of the class."""
    package: str | None = None
    """The package that the tracker imports; None if it imports none. The extra in setup.cfg that installs the package
    has the name of the tracker."""


class WandbConfig(Section):
    """A run in Weights & Biases, one for all attempts."""

    project: str
    """Name of the project."""
    entity: str | None = None
    """Name of the team; null: your own account."""
    mode: Literal["offline", "online"] = "offline"
    """`offline`: for compute nodes without internet access. Upload the run later with `wandb sync`; the log contains
    the command to run. `online`: upload while the run is active."""


class MlflowConfig(Section):
    """A run on an MLflow server, one for all attempts."""

    uri: str
    """URI of the tracking server, such as http://host:5000."""
    experiment: str = "sluice"
    """Name of the experiment."""


class PrometheusConfig(Section):
    """The metrics of the newest step as gauges, in a text file, on a port, or both."""

    textfile: Annotated[Path | None, Policy.PATH] = None
    """Directory that the textfile collector of node_exporter reads. Sluice writes the file sluice-RUN.prom into this
    directory."""
    textfile_sharing: Literal["private", "group", "all"] | None = None
    """Who may read the file sluice-RUN.prom: `private` (mode 0600: only you), `group` (0640) or `all` (0644). null: the
    value of `run.sharing`. If node_exporter runs as another user than you, set `group` or `all`."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on 127.0.0.1 at which Prometheus can scrape the metrics while a job runs. Two runs on the same node need
    different ports."""

    @model_validator(mode="after")
    def _check_has_output(self) -> PrometheusConfig:
        """Raise ValueError if neither output is set."""
        if self.textfile is None and self.port is None:
            raise ValueError("set textfile, port or both")
        return self


class WebhookConfig(Section):
    """Messages to a chat if a stage fails or stalls, and when the run ends. They have Slack's format: {"text": …}."""

    url: Annotated[_Url | None, Policy.SECRET_VALUE] = None
    """URL of the webhook. Anybody who knows this URL can post to the chat. Set either `url` or `variable`."""
    variable: str | None = None
    """Name of an environment variable of the job that contains the URL (see `site.pass` and `site.secrets`)."""

    @model_validator(mode="after")
    def _check_has_one_source(self) -> WebhookConfig:
        """Raise ValueError unless exactly one of `url` and `variable` is set."""
        if (self.url is None) == (self.variable is None):
            raise ValueError("set either url or variable")
        return self


# The ranks do not call trackers. For each enabled tracker, a follower process (tracking/follower.py) reads the files of
# the run and sends new lines to the tracker. To add a tracker, write its class and add a field with a `TrackerEntry`.
class TrackConfig(Section):
    """Trackers that receive the metrics and events of the run."""

    tensorboard: Annotated[bool, TrackerEntry("tracking.tensorboard", "TensorBoard", "tensorboard")] = False
    """Write event files of TensorBoard into the directory `tensorboard` of the run. `tensorboard --logdir runs` shows
    these files."""
    wandb: Annotated[WandbConfig | None, TrackerEntry("tracking.wandb", "Wandb", "wandb")] = None
    """Send metrics to Weights & Biases; null: do not send any."""
    mlflow: Annotated[MlflowConfig | None, TrackerEntry("tracking.mlflow", "Mlflow", "mlflow")] = None
    """Send metrics to an MLflow server; null: do not send any."""
    prometheus: Annotated[
        PrometheusConfig | None, TrackerEntry("tracking.prometheus", "Prometheus", "prometheus_client")
    ] = None
    """Provide the newest metrics to Prometheus; null: do not provide any."""
    jsonl: Annotated[Annotated[Path | None, TrackerEntry("tracking.jsonl_file", "JsonlFile")], Policy.PATH] = None
    """A file for log collectors. Sluice appends each line of metrics.jsonl and events.jsonl to this file, together with
    the run, the job and the attempt. Several runs may write to the same file."""
    webhook: Annotated[WebhookConfig | None, TrackerEntry("tracking.webhook", "Webhook")] = None
    """Send messages to a chat service with webhooks, such as Slack; null: do not send any."""
    mail: Annotated[str | None, TrackerEntry("tracking.webhook", "Mail")] = None
    """Mail address. Slurm sends a mail if a job fails or can never start, and when the last stage ends. If the train
    stage stalls, the first node of the job sends a mail with `sendmail`."""
    telemetry_s: PositiveFloat | None = None
    """Number of seconds between two measurements of the GPUs, CPUs, memory and disks of each node. Sluice appends each
    measurement to telemetry-HOST.jsonl in the run directory. One measurement takes a few milliseconds of one core. 10
    is a good value. null: no measurements."""

    @property
    def enabled(self) -> list[str]:
        """Names of the trackers that this config enables."""
        return [name for name in TRACKERS if getattr(self, name)]


TRACKERS: Mapping[str, TrackerEntry] = {
    name: annotation
    for name, field in TrackConfig.model_fields.items()
    for annotation in field.metadata
    if isinstance(annotation, TrackerEntry)
}
"""Key in `track` → the tracker."""


# -- sweep ---------------------------------------------------------------------------------------------------

MAX_POINTS = 5000
"""Largest number of points of a sweep. Each point is a directory with a config, and all configs are checked before
anything is submitted."""


class Range(Section):
    """A range of numbers to sample from."""

    low: PositiveFloat
    """Smallest value."""
    high: PositiveFloat
    """Largest value."""
    scale: Literal["linear", "log"] = "log"
    """Scale on which values are sampled uniformly."""

    @model_validator(mode="after")
    def _check_order(self) -> Range:
        """Raise ValueError unless `low` is less than `high`."""
        if self.low >= self.high:
            raise ValueError(f"low ({self.low}) is not less than high ({self.high})")
        return self

    def sample(self, generator: random.Random) -> float:
        """Return one random value, rounded to four significant digits, so that tables can show the exact value."""
        if self.scale == "linear":
            value = generator.uniform(self.low, self.high)
        else:
            value = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        return float(f"{value:.4g}")


Values = Annotated[list[Any], Field(min_length=1)]


def _check_sweepable(keys: Iterable[str]) -> None:
    """Raise ValueError if a sweep cannot vary one of the keys."""
    for key in keys:
        if not has_policy(key, Policy.SWEEPABLE) or has_policy(key, Policy.NOT_SWEEPABLE):
            raise ValueError(
                f"{key} cannot be swept, because all points share the shards and the resources: a sweep may vary "
                f"{', '.join(format_key_patterns(Policy.SWEEPABLE))}"
            )


class SweepConfig(Section):
    """The points of a sweep: each combination of the values in `grid`, with each sample of `random`."""

    grid: dict[str, Values] = Field(default_factory=dict)
    """The values of each varied key, such as `optimizer.lr: [1.0e-3, 3.0e-3]`."""
    random: dict[str, Values | Range] = Field(default_factory=dict)
    """The values to sample from for each varied key: a list, or a range `{low, high, scale}`."""
    samples: PositiveInt = 8
    """Number of samples of `random`. Each sample has a value for every key of `random`."""
    seed: NonNegativeInt = 0
    """Seed of the random samples."""
    at_most: PositiveInt | None = None
    """Largest number of points that run at the same time; null: no limit. With `search`, the number of trials that run
    at the same time, which affects the values of later trials; null: 8."""
    search: SearchConfig | None = None
    """A study of trials whose values depend on the results of earlier trials (docs/search.md); null: the points of
    `grid` and `random`. With `search`, `seed` is the seed of the study."""

    @model_validator(mode="after")
    def _check_keys(self) -> SweepConfig:
        """Raise ValueError if a key cannot be swept or is swept twice, or if there are no or too many points."""
        if self.search is not None:
            self._check_search(self.search)
            return self
        if not self.grid and not self.random:
            raise ValueError("set `grid`, `random`, both, or `search`: otherwise nothing varies")
        if common_keys := self.grid.keys() & self.random.keys():
            raise ValueError(f"{min(common_keys)} is in grid and in random: remove one of them")
        count = math.prod(map(len, self.grid.values())) * (self.samples if self.random else 1)
        if count > MAX_POINTS:
            raise ValueError(f"this sweep has {count:,} points, but the limit is {MAX_POINTS:,}: split it")
        _check_sweepable((*self.grid, *self.random))
        return self

    def _check_search(self, search: SearchConfig) -> None:
        """Raise ValueError if a search cannot vary a key, has too many trials, or also has points."""
        if self.grid or self.random:
            raise ValueError("search cannot be combined with grid or random: move their keys to search.space")
        if search.optuna.trials > MAX_POINTS:
            raise ValueError(f"search.optuna.trials is {search.optuna.trials:,}, but the limit is {MAX_POINTS:,}")
        _check_sweepable(search.space)
        for key in search.space:
            if key in UNSEARCHABLE_KEYS or has_policy(key, Policy.PATH):
                raise ValueError(f"{key} cannot be searched: remove it from search.space; a `grid` may vary it")

    @property
    def point_count(self) -> int:
        """The number of points, or the number of trials of a search."""
        return len(self.points()) if self.search is None else self.search.optuna.trials

    @property
    def trials_at_once(self) -> int:
        """The number of trials of a search that run at the same time."""
        return self.at_most or DEFAULT_TRIALS_AT_ONCE

    def points(self) -> list[dict[str, Any]]:
        """Return the values of each point, by dotted key. The result depends only on this section.

        The result is [] for a search, whose trials are known only later (`list_point_values` of
        pipeline/run/directory.py).
        """
        if self.search is not None:
            return []
        generator = random.Random(self.seed)
        samples: list[dict[str, Any]] = [{}]
        if self.random:
            samples = [
                {
                    key: values.sample(generator) if isinstance(values, Range) else generator.choice(values)
                    for key, values in self.random.items()
                }
                for _ in range(self.samples)
            ]
        combinations = [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        return [{**combination, **sample} for combination in combinations for sample in samples]


# -- run.json ------------------------------------------------------------------------------------------------


class ModelMetadata(Section):
    """Facts about the model that do not affect training."""

    init_sha256: str | None = None
    """SHA-256 of the config.json that set the section `model`."""
    init_files: Annotated[str | None, Policy.CHANGEABLE, Policy.NOT_IN_IDENTITY] = None
    """Hash of the names, sizes and modification times of the files with the initial weights. If a file has changed,
    training does not start."""
    max_position_embeddings: PositiveInt | None = None
    """Longest sequence in tokens, from config.json. An export copies this value."""


class SweepMetadata(Section):
    """Facts about a sweep."""

    sources: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """If the sweep varies `model.init_from`: the keys that each model directory sets in the section `model`, by
    directory."""


class RunMetadata(Section):
    """The content of `run.json`: values that Sluice computed about a run.

    Configs of older versions contain these values under the same keys.
    """

    model: ModelMetadata = ModelMetadata()
    sweep: SweepMetadata = SweepMetadata()


# -- the whole config ----------------------------------------------------------------------------------------


class Config(Section):
    """One run of the pipeline."""

    run: RunConfig
    """The name of the run and where its files are."""
    data: DataConfig = DataConfig()
    """The sources, and how documents become shards of tokens."""
    model: Annotated[ModelConfig, Policy.SWEEPABLE, Policy.FIXED_IN_FORK] = ModelConfig()
    """The sizes and the initial weights of the model, or a custom model."""
    adapter: Annotated[AdapterConfig | None, Policy.SWEEPABLE, Policy.FIXED_IN_FORK] = None
    """Train an adapter instead of all weights; null: train all weights."""
    parallel: Annotated[ParallelConfig, Policy.CHANGEABLE] = ParallelConfig()
    """How the ranks split the work. The product of the parallel sizes is the number of ranks."""
    train: Annotated[TrainConfig, Policy.SWEEPABLE] = TrainConfig(steps=1)
    """Length, batch sizes, precision and evaluations of training. A config without this section has only the stages
    with a command."""
    optimizer: Annotated[OptimizerConfig, Policy.SWEEPABLE] = OptimizerConfig()
    """The optimizer and its learning rate."""
    checkpoint: Annotated[CheckpointConfig, Policy.CHANGEABLE, Policy.SWEEPABLE] = CheckpointConfig()
    """When checkpoints are saved and how many are kept."""
    evaluate: Annotated[EvaluateConfig, Policy.SWEEPABLE] = EvaluateConfig()
    """When the model is evaluated, and on which data."""
    recovery: Annotated[RecoveryConfig, Policy.CHANGEABLE] = RecoveryConfig()
    """What happens after a stop, and when a stage counts as hung."""
    site: Annotated[SiteConfig, Policy.CHANGEABLE] = SiteConfig()
    """Settings of the cluster, for all stages."""
    stages: Annotated[StagesConfig, Policy.CHANGEABLE] = StagesConfig()
    """Resources of each stage."""
    parameters: Annotated[dict[str, str | int | float | bool], Policy.CHANGEABLE, Policy.SWEEPABLE] = Field(
        default_factory=dict
    )
    """Values for the placeholders `{NAME}` in the commands of stages."""
    sweep: Annotated[SweepConfig | None, Policy.FIXED_IN_FORK] = None
    """Several training runs that differ in a few values; null: one run."""
    publish: Annotated[PublishConfig | None, Policy.CHANGEABLE] = None
    """Where the model is published after its evaluation; null: nowhere."""
    track: Annotated[TrackConfig, Policy.CHANGEABLE] = TrackConfig()
    """Trackers that receive the metrics and events of the run."""

    _metadata: RunMetadata = PrivateAttr(default_factory=RunMetadata)

    @property
    def metadata(self) -> RunMetadata:
        """The values that Sluice computed about the run. `run.json` stores them."""
        return self._metadata

    def with_metadata(self, metadata: RunMetadata) -> Config:
        """Return a copy of this config with `metadata` as its metadata."""
        config = self.model_copy()
        config._metadata = metadata
        return config

    @property
    def allows_sequence_schedule(self) -> bool:
        """Whether the length of sequences may change during the run: not if documents are packed for one length."""
        data = self.data
        sources = [data.for_source(name) for name in data.mixture.sources] if data.mixture else []
        return self.model.target is None and not any(each.has_training_mask for each in (data, *sources))

    @property
    def length_phases(self) -> list[LengthConfig]:
        """The lengths of training sequences and their first steps, ascending. Without a schedule, there is one."""
        return self.train.sequence_schedule or [LengthConfig(from_step=1, length=self.data.sequence_length)]

    def length_phases_until(self, step: int) -> list[LengthConfig]:
        """Return the entries of `length_phases` that apply to the first `step` steps, and at least the first entry."""
        return [phase for phase in self.length_phases if phase.from_step <= max(1, step)]

    def count_tokens(self, steps: int) -> int:
        """Return the number of tokens in the sequences of the first `steps` steps."""
        phases = self.length_phases_until(steps)
        ends = [phase.from_step - 1 for phase in phases[1:]] + [steps]
        tokens_per_row = sum(
            phase.length * (end - phase.from_step + 1) for phase, end in zip(phases, ends, strict=True)
        )
        return self.train.global_batch * tokens_per_row

    @model_validator(mode="after")
    def _check_sections(self) -> Config:
        """Raise ValueError if keys of different sections contradict each other."""
        if conflicts := list(_find_conflicts(self)):
            raise ValueError("; ".join(conflicts))
        return self

    @property
    def active_stages(self) -> dict[str, Stage]:
        """The stages of this config, in the order of the chain: name → stage."""
        return self.stages.list_stages(
            {
                name: stage
                for name, stage in STAGES.items()
                if self.has_pipeline and getattr(self, stage.section) and name not in self.stages.commands
            }
        )

    @property
    def has_pipeline(self) -> bool:
        """Whether the config has the stages of the pipeline, and not only stages with a command."""
        return "train" in self.model_fields_set

    def require_pipeline(self, command: str) -> None:
        """Raise UserError if the config has only stages with a command, for which a command of Sluice does not work."""
        if not self.has_pipeline:
            raise UserError(
                "cli.no_pipeline",
                f"{command} is for the stages of Sluice (section train), but {self.run.name} only runs commands",
            )

    @model_serializer(mode="wrap")
    def _omit_unused_sections(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the values without the sections that only the stages of the pipeline use, if it has none of them."""
        values = serialize(self)
        if self.has_pipeline:
            return dict(values)
        values = {key: value for key, value in values.items() if key not in (*_PIPELINE_SECTIONS, "train")}
        if "stages" in values:
            values["stages"] = {name: values["stages"][name] for name in self.stages.commands}
        return values

    @property
    def user_targets(self) -> list[str]:
        """The dotted names of the user's modules: the custom model, if there is one, and those of `train.callbacks`."""
        return [*filter(None, [self.model.target]), *self.train.callbacks]

    @property
    def metrics_stage(self) -> str:
        """The stage whose steps metrics.jsonl contains."""
        return next(name for name, stage in self.active_stages.items() if stage.records_metrics)

    def get_stage(self, name: str) -> Stage:
        """Return the properties of a stage of this config.

        Raises:
            UserError: if there is no such stage.
        """
        active_stages = self.active_stages
        if name not in active_stages:
            raise UserError(
                "cli.unknown_stage", f"{name}: no such stage; choose one of {', '.join(self.active_stages)}"
            )
        return active_stages[name]

    def uses_mpi(self, stage: str) -> bool:
        """Whether `mpirun` or `srun --mpi` starts the processes of a stage."""
        definition = self.get_stage(stage)
        if definition.command is not None:
            return definition.command.mpi
        return definition.is_distributed and self.parallel.backend == "mpi"

    def resolve_site(self, stage: str) -> SiteConfig:
        """Return the site for the jobs of a stage: `site`, overridden by `site.data_jobs` and the keys of the stage.

        By default, a distributed stage requests one GPU for each rank on a node, but at most `site.gpus_per_node`.
        Other stages request no GPUs by default, and only they use `site.data_jobs`.
        """
        resources = self.stages.get_resources(stage)
        values: dict[str, Any] = {"sbatch": self.site.sbatch, "gpus_per_node": 0}
        if self.get_stage(stage).is_distributed:
            values["gpus_per_node"] = min(self.site.gpus_per_node, resources.processes_per_node)
        else:
            values = self.site.data_jobs.override(values)
        return self.site.model_copy(update=resources.override(values))


_PIPELINE_SECTIONS = ("data", "model", "adapter", "parallel", "optimizer", "checkpoint", "evaluate", "publish")
"""The sections that only the stages of the pipeline use, in addition to `train`."""


def _find_stage_conflicts(config: Config) -> Iterator[str]:
    """Yield a message for each conflict that concerns the stages."""
    commands = config.stages.commands
    if not config.has_pipeline:
        if not commands:
            yield "the section train is missing: set train.steps; or, to run commands, set stages.NAME.command"
        for section in sorted(config.model_fields_set.intersection(_PIPELINE_SECTIONS)):
            yield f"{section} has no effect without the section train: remove it, or set train.steps"
        for name in sorted(config.stages.model_fields_set.difference(commands)):
            if commands:
                yield f"stages.{name} has no effect: set stages.{name}.command, or train.steps"
    elif replaced := sorted(commands.keys() & STAGES.keys()):
        yield (
            f"stages.{replaced[0]}.command: with the section train, {replaced[0]} is a stage of Sluice: give the "
            "command another name, or remove train"
        )
    known = {*commands, *(STAGES if config.has_pipeline else ())}
    for name in sorted(known):
        if unknown := sorted({*config.stages.get_resources(name).needs} - known):
            yield f"stages.{name}.needs: there is no stage {unknown[0]}; the stages are {', '.join(sorted(known))}"
            return
    if stages_in_cycle := sorted({*commands} - config.active_stages.keys()):
        yield f"stages.needs: {', '.join(stages_in_cycle)} wait for each other: remove one of their needs"
        return
    for name, command_stage in commands.items():
        if unknown := [key for key in find_placeholders(command_stage.command) if key not in config.parameters]:
            yield (
                f"stages.{name}.command: there is no parameter {unknown[0]}: set parameters.{unknown[0]}, or write "
                f"{{{{{unknown[0]}}} for braces of the shell"
            )
    for name in config.active_stages:
        has_agents = config.recovery.in_place and not config.uses_mpi(name)
        if config.stages.get_resources(name).spare_nodes and not has_agents:
            yield (
                f"stages.{name}.nodes.spares needs node agents: remove it, or set recovery.in_place true and use a "
                "parallel.backend other than mpi"
            )


def _find_schedule_conflicts(config: Config) -> Iterator[str]:
    """Yield a message for each conflict between `train.sequence_schedule` and other keys."""
    if config.train.sequence_schedule is None:
        return
    last_length = config.train.sequence_schedule[-1].length
    if config.model.target is not None:
        yield "train.sequence_schedule is for the decoder: remove it, because model.target is set"
        return
    if config.data.sequence_length != last_length:
        yield (
            f"data.sequence_length ({config.data.sequence_length}) is not the last length of train.sequence_schedule "
            f"({last_length}): change one of them, or remove data.sequence_length"
        )
    if not config.allows_sequence_schedule:
        yield (
            "train.sequence_schedule cannot be used with data.records prompts or messages, or with data.packing "
            "best_fit, because documents are packed into samples of data.sequence_length tokens: remove one of them"
        )


def _find_conflicts(config: Config) -> Iterator[str]:
    """Yield a message for each conflict between keys of different sections.

    Raises ValueError if a key of `data` is set that has no effect with a custom model. pipeline/parallel/mesh.py
    checks conflicts that concern the layout.
    """
    yield from _find_stage_conflicts(config)
    data = config.data
    model = config.model
    optimizer = config.optimizer
    train = config.train
    if data.mixture is not None and train.epochs is not None:
        yield "train.epochs cannot be used with data.mixture, because each source has its own epochs: set train.steps"
    yield from _find_schedule_conflicts(config)
    if model.target is not None:
        used_keys = {"source", "held_out", "workers", "verify"}
        check_unused_keys(data, used_keys, "it cannot be used with model.target")
    elif data.workers != DataConfig.model_fields["workers"].default:
        yield "data.workers is for a custom model with a function `dataset`: remove it, or set model.target"
    elif train.gather:
        yield 'train.gather is for a custom model with LOSS = "batch": remove it, or set model.target'
    if model.target is None and "own" in (optimizer.name, optimizer.schedule):
        yield "optimizer.name and optimizer.schedule: `own` is for a custom model: set model.target also"
    if config.adapter is not None:
        yield from _find_adapter_conflicts(config)
    if optimizer.name == "own" and train.precision == "fp16":
        yield "optimizer.name own cannot be combined with train.precision fp16, which skips the first steps: use bf16"
    if train.loss_chunk is not None and model.other_model_key is not None:
        yield f"train.loss_chunk needs the decoder: remove it, because of {model.other_model_key}"
    if train.precision == "fp8" and model.backend == "transformers":
        yield "train.precision fp8 cannot be combined with model.backend transformers: use bf16"
    if train.loss_chunk is not None and train.precision == "fp16":
        yield "train.loss_chunk cannot be combined with train.precision fp16, which scales gradients: use bf16"
    if optimizer.state.master == "none" and train.precision not in ("bf16", "fp8"):
        yield f"optimizer.state.master none is for train.precision bf16 and fp8, not {train.precision}"
    if config.evaluate.task_files and (data.held_out == 0 or model.target is not None):
        yield "evaluate.tasks needs held-out text: it cannot be used with data.held_out 0 or with model.target"
    if config.publish is not None and config.sweep is not None:
        yield "publish is for one run, not for a sweep: remove it, and `export` the best sweep point"
    if config.sweep is not None and config.sweep.search is not None:
        if config.has_pipeline:
            yield from find_search_conflicts(config.sweep.search, train.steps, train.evaluate_every, data.held_out)
        else:
            yield "sweep.search needs the train stage, because it compares losses: set the section train"
    yield from _find_callback_conflicts(config)
    if train.evaluate_every is not None and data.held_out == 0:
        yield "train.evaluate_every needs held-out data, but data.held_out is 0: set one, or remove the other"
    if config.checkpoint.keep_rules.best is not None and train.evaluate_every is None:
        yield "checkpoint.keep.best needs held-out losses of the train stage: set train.evaluate_every, or remove best"


def _find_callback_conflicts(config: Config) -> Iterator[str]:
    """Yield a message for each conflict that concerns `train.callbacks` and `train.early_stopping`.

    The metrics of a custom model and of callbacks are not known here. If one is missing, training ends with an error at
    the first evaluation (pipeline/train/early_stopping.py).
    """
    train = config.train
    if config.model.target is not None and config.model.target in train.callbacks:
        yield f"train.callbacks: {config.model.target} is model.target, whose callbacks are used anyway: remove it"
    if train.early_stopping is None:
        return
    if train.evaluate_every is None:
        yield "train.early_stopping needs evaluations in the train stage: set train.evaluate_every also, or remove it"
    metrics = ["loss", *(f"{source}.loss" for source in (config.data.mixture.sources if config.data.mixture else ()))]
    if train.ema is not None:
        metrics += [f"ema_{metric}" for metric in metrics]
    is_known = config.model.target is None and not train.callbacks
    if is_known and train.early_stopping.metric not in metrics:
        yield (
            f"train.early_stopping.metric: evaluations do not report {train.early_stopping.metric}, but only "
            f"{', '.join(metrics)}: choose one of them"
        )


def _find_adapter_conflicts(config: Config) -> Iterator[str]:
    """Yield a message for each key that cannot be combined with `adapter`."""
    if config.model.init_from is None and config.model.target is None:
        yield "adapter needs trained weights: set model.init_from to the directory of a model"
    if config.optimizer.freeze:
        yield "optimizer.freeze cannot be combined with adapter, which freezes all weights: choose adapter.targets"
    if config.train.precision == "fp8":
        yield "adapter cannot be combined with train.precision fp8: use bf16"
    if (base := config.adapter.base if config.adapter else None) is not None:
        parallel = config.parallel
        sizes = {"pipeline": parallel.pipeline, "context": parallel.context, "tensor": parallel.tensor}
        splits = [f"parallel.{key} {size}" for key, size in sizes.items() if size > 1]
        splits += [f"parallel.zero {parallel.zero}"] if parallel.zero else []
        splits += ["parallel.offload"] if parallel.offload else []
        if splits:
            yield f"adapter.base {base} needs data parallelism without ZeRO: remove {', '.join(splits)}"
        if config.model.target is not None:
            yield f"adapter.base {base} is for language models: remove it, because model.target is set"


# -- policies ------------------------------------------------------------------------------------------------


def walk_fields(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted key and the field of each key below `section`.

    In a dotted key, `*` represents any name in a mapping of sections, or any index in a list of sections.
    """
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        yield key, field
        for inner_section, suffix in list_inner_sections(field.annotation):
            yield from walk_fields(inner_section, f"{key}{suffix}.")
    if section.other_keys is not None:
        yield from walk_fields(section.other_keys, f"{prefix}*.")


def list_inner_sections(annotation: Any) -> Iterator[tuple[type[Section], str]]:
    """Yield each section that a value with this type annotation may contain, and the suffix of its dotted key.

    The suffix is `.*` for a section in a mapping or a list, otherwise "".
    """
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation, ""
        return
    inner_types = get_args(annotation)
    if get_origin(annotation) is Annotated:
        inner_types = inner_types[:1]
        if Tag(COMMAND_TAG) in get_args(annotation)[1:]:
            return  # `walk_fields` yields the keys of a command only once, as `stages.*`.
    suffix = ".*" if get_origin(annotation) in (dict, list) else ""
    for inner_type in inner_types:
        for section, inner_suffix in list_inner_sections(inner_type):
            yield section, suffix + inner_suffix


@cache
def list_keys_with(policy: Policy) -> tuple[str, ...]:
    """Return the dotted keys with the policy: first the keys of the config, in its order, then the keys of run.json."""
    fields = itertools.chain(walk_fields(), walk_fields(RunMetadata))
    return tuple(key for key, field in fields if policy in field.metadata)


def remove_key(values: dict[str, Any], path: Sequence[str]) -> None:
    """Remove the key at the key path `path` from nested mappings if it exists. In `path`, `*` matches every name."""
    name, *rest = path
    if not rest:
        values.pop(name, None)
        return
    for inner in values.values() if name == "*" else [values.get(name)]:
        if isinstance(inner, dict):
            remove_key(inner, rest)


def has_policy(key: str, policy: Policy) -> bool:
    """Return True if the dotted key, or a section around it, has the policy."""
    return any(
        key == key_with_policy or key.startswith(f"{key_with_policy}.") for key_with_policy in list_keys_with(policy)
    )


def format_key_patterns(policy: Policy) -> list[str]:
    """Return the keys of the config with the policy, for a message. A section becomes a pattern such as `site.*`."""
    keys = dict(walk_fields())
    sections = {key.rpartition(".")[0] for key in keys}
    return [f"{key}.*" if key in sections else key for key in list_keys_with(policy) if key in keys]

"""The config of a run: every key that `config.yaml` may hold, its type, its default and what it means.

One pydantic model per section. Unknown keys are errors. The docstring under a field is its documentation:
`python submit.py schema` writes them all as a JSON Schema, which editors show while one types. Reading
files, `extends:` and command-line overrides is `pipeline/config/read.py`; this file is only the meaning.

Nothing here imports torch, numpy or h5py: the login node reads configs too.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Field, PositiveInt, model_validator
from pydantic.fields import FieldInfo

from pipeline.config.checkpoints import CheckpointConfig, EvaluateConfig, PublishConfig
from pipeline.config.datasets import DataConfig
from pipeline.config.parallel import ParallelConfig
from pipeline.config.recovery import RecoveryConfig
from pipeline.config.site import SiteConfig
from pipeline.config.stages import STAGES, Stage, StagesConfig
from pipeline.config.track import TrackConfig
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
)


class RunConfig(Section):
    """Which run this is and where it lives."""

    name: Annotated[Name, Policy.CHANGEABLE]
    """Name of the run: the folder `root/name` and the prefix of its Slurm jobs."""
    root: Annotated[FilePath, Policy.CHANGEABLE, Policy.PATH] = Path("runs")
    """Folder that holds the runs; on a cluster a path that all nodes share. Relative paths, here and in `data`, start
    from the file that says them; this default, and what the command line says, from the working directory."""
    seed: Annotated[NonNegativeInt, Policy.SWEEPABLE] = 1
    """Seed of everything random: weights, order of the samples, dropout."""
    sharing: Literal["private", "group", "all"] = "private"
    """Who may read the run's files: `private` (0700/0600), `group` (0750/0640) or `all` (0755/0644)."""


class ModelConfig(Section):
    """A Llama-style decoder; keys beyond the sizes are those of Hugging Face's `LlamaConfig`. Or your own."""

    init_from: Annotated[FilePath | None, Policy.PATH, Policy.NOT_IN_IDENTITY] = None
    """A folder of an open model in Hugging Face's format (config.json, safetensors, tokenizer): training starts from
    its weights, this section is filled from its config.json, `data.tokenizer` from its tokenizer. null: drawn ones."""
    init_sha256: str | None = None
    """SHA-256 of the config.json that filled this section. Sluice writes it; leave it out."""
    init_files: Annotated[str | None, Policy.CHANGEABLE, Policy.NOT_IN_IDENTITY] = None
    """A hash of names, sizes and times of the files with the weights, by which another's are noticed when training
    begins. Sluice writes it; leave it out."""

    target: Annotated[str | None, Policy.NOT_SWEEPABLE] = None
    """A Python module, such as `my_package.my_model`, that gives a model of your own (pipeline/config/user_model.py
    says how); null: the decoder. Beside it only `options`, `layers` and `initializer_range` mean something."""
    options: dict[str, Any] = Field(default_factory=dict)
    """What your own model is built from: any keys and values, handed to it as they are."""
    dim: PositiveInt = 256
    """Width of the residual stream (`hidden_size`)."""
    layers: PositiveInt = 4
    """Number of decoder blocks (`num_hidden_layers`)."""
    heads: PositiveInt = 8
    """Query heads (`num_attention_heads`)."""
    kv_heads: PositiveInt | None = None
    """Key and value heads (`num_key_value_heads`); null: as many as query heads."""
    head_dim: PositiveInt | None = None
    """Width of one head; null: dim / heads."""
    intermediate_size: PositiveInt | None = None
    """Width of the SwiGLU layer; null: 8/3 of dim, rounded up to a multiple of 64."""
    vocab_size: PositiveInt | None = None
    """Rows of embedding and output layer, at least the tokenizer's ids; null: as many."""
    max_position_embeddings: PositiveInt | None = None
    """Longest sequence that config.json claims; it changes nothing here."""
    sliding_window: PositiveInt | None = None
    """How far back attention looked in the model that this one starts from: `data.sequence_length` is at most that,
    for here it sees all."""
    max_window_layers: NonNegativeInt | None = None
    """How many blocks saw all before those that `sliding_window` is about, as Qwen's format says it; an export asks."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Which projections of attention have biases: `qkv` all but the output's (Qwen2), `all` that one, too."""
    qk_norm: bool = False
    """Whether each head's queries and keys are normalised before their positions are turned in (Qwen3)."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary position frequencies."""
    rope_scaling: RopeScaling | None = None
    """How they are stretched; null: not at all."""
    rms_norm_eps: PositiveFloat = 1e-5
    """Epsilon of the RMS norms."""
    tie_word_embeddings: bool = False
    """Whether the output layer shares the embedding's weights."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout on the output of attention and MLP."""

    @property
    def all_options(self) -> dict[str, Any]:
        """What the functions of your own model get: `options`, and `layers`."""
        return {**self.options, "layers": self.layers}

    @model_validator(mode="after")
    def _heads_fit(self) -> ModelConfig:
        try:
            json.dumps(self.options, allow_nan=False)
        except ValueError:
            raise ValueError("options: .nan and .inf would be lost in config.yaml: give a number, or text") from None
        if self.target is not None:
            if not all(part.isidentifier() for part in self.target.split(".")):
                raise ValueError(f"target ({self.target}) is no name of a Python module such as my_package.my_model")
            if "layers" in self.options:
                raise ValueError("options.layers is model.layers: set that")
            check_unused_keys(
                self, {"target", "options", "layers", "initializer_range"}, "with model.target use options"
            )
            return self
        if self.options:
            raise ValueError("options are for a model of your own: name its module as target")
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"dim ({self.dim}) is no multiple of heads ({self.heads}); set head_dim or change one")
        if self.heads % self.num_kv_heads:
            raise ValueError(f"heads ({self.heads}) is no multiple of kv_heads ({self.num_kv_heads})")
        if self.head_size % 2:
            raise ValueError(f"the head size ({self.head_size}) is odd; rotary positions need an even one")
        return self

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads, resolved."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """Width of one head, resolved."""
        return self.head_dim or self.dim // self.heads

    @property
    def ffn_size(self) -> int:
        """Width of the SwiGLU layer, resolved."""
        return self.intermediate_size or 64 * math.ceil(self.dim * 8 / 3 / 64)


class TrainConfig(Section):
    """The training loop."""

    steps: Annotated[PositiveInt | None, Policy.NOT_IN_IDENTITY] = None
    """Optimizer steps of the whole training; null: as many as `epochs` say. Exactly one of the two is given."""
    epochs: Annotated[PositiveInt | None, Policy.NOT_IN_IDENTITY] = None
    """How often the training sees each sample. The number of steps follows from the data, once it is sharded: whole
    ones, the last filled up with the first samples of the next epoch."""
    global_batch: Annotated[PositiveInt, Field(le=2**24)] = 16
    """Sequences of one optimizer step, over all ranks."""
    micro_batch: PositiveInt = 4
    """Sequences of one forward and backward pass on one rank."""
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    """Arithmetic of forward and backward; `optimizer.state` has the types of weights and optimizer. `fp8`: bf16, with
    the blocks' matrix products in float8 (pipeline/parallel/float8.py: needs torchao, and a GPU such as an H100)."""
    fp8_scales: Literal["rowwise", "tensorwise"] = "rowwise"
    """What shares a scale in float8: a row, or a whole tensor, which is faster and less exact."""
    threads: Annotated[PositiveInt, Policy.NOT_SWEEPABLE] = 1
    """CPU threads per rank; part of what makes a result bit-identical."""
    deterministic: bool = True
    """Refuse kernels whose results vary from run to run."""
    compile: bool = False
    """Compile each decoder block with torch.compile."""
    loss_chunk: PositiveInt | None = None
    """Tokens whose logits are computed at a time, together with their loss and its gradient, so that the logits of a
    whole micro-batch never exist (pipeline/model/decoder.py). It changes last digits; 1024 to 4096 are good sizes for
    large vocabularies. null: whole logits."""
    log_every: Annotated[PositiveInt, Policy.CHANGEABLE, Policy.NOT_IN_IDENTITY] = 10
    """Steps between two lines of progress in the log (metrics.jsonl has every step)."""
    evaluate_every: Annotated[PositiveInt | None, Policy.NOT_IN_IDENTITY] = None
    """Steps between two looks at held-out data by the ranks that train: `held_out_loss` in metrics.jsonl, a second
    curve in report.html. null: none; what `evaluate` says of checkpoints is done in any case."""
    evaluate_sequences: Annotated[PositiveInt, Policy.NOT_IN_IDENTITY] = 64
    """How many held-out sequences (samples) such a look takes, always the same ones."""
    profile_every: Annotated[PositiveInt | None, Policy.CHANGEABLE, Policy.NOT_IN_IDENTITY] = None
    """Steps between two that all ranks record with torch.profiler: where they went, in metrics.jsonl, and traces in
    `profiles/` for `submit.py profile` (docs/profiling.md). null: none; that command can ask for some at any time."""

    @model_validator(mode="after")
    def _values_fit(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            given = "are both given: set one of them to null" if self.steps else "are both missing: give one of them"
            raise ValueError(f"steps and epochs {given}")
        if self.global_batch % self.micro_batch:
            raise ValueError(f"global_batch ({self.global_batch}) is no multiple of micro_batch ({self.micro_batch})")
        return self


USED_BY = {
    "adamw": {"betas", "eps", "state"},
    "sgd": {"momentum"},
    "muon": {"momentum", "betas", "eps"},
    "own": {"momentum", "betas", "eps"},
}
"""Which of the optimizer's keys only some optimizers use."""


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "sgd", "muon", "own"] = "adamw"
    """`adamw` (Loshchilov and Hutter, arXiv 1711.05101); `sgd`; `muon` for the matrices of the blocks, its updates as
    large as AdamW's (Liu et al., arXiv 2502.16982), and AdamW for the rest; `own`: what `optimizer` of `model.target`
    makes."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate."""
    min_lr_ratio: Fraction = 0.1
    """Last learning rate, as a fraction of the peak."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate grows linearly from 0 to the peak."""
    schedule: Literal["constant", "cosine", "linear", "wsd", "own"] = "cosine"
    """Course after the warm-up: `constant`, `cosine`, `linear`, or `wsd` (warm-up, stable, decay); `own`: the whole
    course is what `learning_rate` of `model.target` says."""
    schedule_counts_from: Literal[0, 1] = 1
    """Number that the schedule gives the first step. `1`: the last of the steps has the last rate. `0`: each step has
    the rate that the scheduler of transformers gives it: the first step of a warm-up has rate 0, and the last step is
    one step before the end of the decay."""
    decay_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """Last part of the training in which `wsd` decays linearly."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Decay of the momentum of `sgd` and `muon`; null: 0.9 and 0.95."""
    weight_decay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.1
    """Weight decay of matrices, decoupled but for `sgd`, which adds it to the gradient; vectors (norms) have none."""
    state: StateConfig = StateConfig()
    """Types of what it keeps; only for `adamw`."""
    freeze: list[str] = Field(default_factory=list)
    """Patterns (`*`, `?`, `[…]`) of parameters' names in the whole model that stay as they are, such as
    `model.embed_tokens.*` or `model.layers.[0-3].*`."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest norm of the whole gradient; null: no clipping."""

    @model_validator(mode="after")
    def _keys_are_used(self) -> OptimizerConfig:
        unused = set().union(*USED_BY.values()) - USED_BY[self.name]
        check_unused_keys(self, type(self).model_fields.keys() - unused, f"optimizer.name is {self.name}")
        if self.schedule == "own" and self.schedule_counts_from != 1:
            raise ValueError(
                f"schedule_counts_from ({self.schedule_counts_from}) has no effect: schedule is own, and your "
                "`learning_rate` gets the steps from 1; remove the key"
            )
        return self


MOST_POINTS = 5000
"""Each is a folder with a config, and all of them are checked before anything is submitted."""


class Range(Section):
    """Numbers to draw from."""

    low: PositiveFloat
    """Least value."""
    high: PositiveFloat
    """Greatest value."""
    scale: Literal["linear", "log"] = "log"
    """Drawn uniformly on this scale."""

    @model_validator(mode="after")
    def _in_order(self) -> Range:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low}) is not less than high ({self.high})")
        return self

    def draw(self, source: random.Random) -> float:
        """One value, to four digits: it is a name in tables, too."""
        if self.scale == "linear":
            value = source.uniform(self.low, self.high)
        else:
            value = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        return float(f"{value:.4g}")


Values = Annotated[list[Any], Field(min_length=1)]


class SweepConfig(Section):
    """Which points there are: every combination of `grid`, each with every draw of `random`."""

    grid: dict[str, Values] = Field(default_factory=dict)
    """Dot keys and the values that each takes, such as `optimizer.lr: [1.0e-3, 3.0e-3]`."""
    random: dict[str, Values | Range] = Field(default_factory=dict)
    """Dot keys, each with a list to choose from or a range `{low, high, scale}`."""
    samples: PositiveInt = 8
    """How often the keys of `random` are drawn."""
    seed: NonNegativeInt = 0
    """Seed of the draws."""
    at_most: PositiveInt | None = None
    """How many points may run at the same time; null: no limit."""
    sources: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """What the folders of a swept `model.init_from` say of `model`, by folder. Sluice writes it; leave it out."""

    @model_validator(mode="after")
    def _keys_are_free(self) -> SweepConfig:
        if not self.grid and not self.random:
            raise ValueError("give `grid`, `random` or both: there is nothing to vary")
        if both := self.grid.keys() & self.random.keys():
            raise ValueError(f"{min(both)} stands in grid and in random")
        count = math.prod(map(len, self.grid.values())) * (self.samples if self.random else 1)
        if count > MOST_POINTS:
            raise ValueError(f"these are {count:,} points; a sweep may have {MOST_POINTS:,}: make several sweeps of it")
        for key in (*self.grid, *self.random):
            if not has_policy(key, Policy.SWEEPABLE) or has_policy(key, Policy.NOT_SWEEPABLE):
                raise ValueError(
                    f"{key} cannot be swept, because all points share the shards and the resources: a sweep may vary "
                    f"{', '.join(format_key_patterns(Policy.SWEEPABLE))}"
                )
        return self

    def points(self) -> list[dict[str, Any]]:
        """The values of each point, by dot key; always the same points in the same order."""
        source = random.Random(self.seed)
        draws: list[dict[str, Any]] = [{}]
        if self.random:
            draws = [
                {k: v.draw(source) if isinstance(v, Range) else source.choice(v) for k, v in self.random.items()}
                for _ in range(self.samples)
            ]
        combinations = [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        return [{**combination, **draw} for combination in combinations for draw in draws]


class Config(Section):
    """One run of the pipeline."""

    run: RunConfig
    """Which run this is and where it lives."""
    data: DataConfig = DataConfig()
    """From documents to shards of tokens."""
    model: Annotated[ModelConfig, Policy.SWEEPABLE] = ModelConfig()
    """The model."""
    parallel: Annotated[ParallelConfig, Policy.CHANGEABLE] = ParallelConfig()
    """How the ranks split the work."""
    train: Annotated[TrainConfig, Policy.SWEEPABLE]
    """The training loop."""
    optimizer: Annotated[OptimizerConfig, Policy.SWEEPABLE] = OptimizerConfig()
    """The optimizer and its learning rate."""
    checkpoint: Annotated[CheckpointConfig, Policy.CHANGEABLE, Policy.SWEEPABLE] = CheckpointConfig()
    """When the training saves and what it keeps."""
    evaluate: Annotated[EvaluateConfig, Policy.SWEEPABLE] = EvaluateConfig()
    """What is evaluated."""
    recovery: Annotated[RecoveryConfig, Policy.CHANGEABLE] = RecoveryConfig()
    """What happens after a stop."""
    site: Annotated[SiteConfig, Policy.CHANGEABLE] = SiteConfig()
    """The cluster."""
    stages: Annotated[StagesConfig, Policy.CHANGEABLE] = StagesConfig()
    """Resources by stage."""
    sweep: SweepConfig | None = None
    """Many trainings that differ in a few values; null: one training."""
    publish: Annotated[PublishConfig | None, Policy.CHANGEABLE] = None
    """Where the model goes when it is evaluated; null: nowhere."""
    track: Annotated[TrackConfig, Policy.CHANGEABLE] = TrackConfig()
    """Who else is told how the run goes."""

    @model_validator(mode="after")
    def _epochs_are_of_one_source(self) -> Config:
        if self.data.mixture is not None and self.train.epochs is not None:
            raise ValueError(
                "train.epochs is for one source, and those of data.mixture have their own: set train.steps"
            )
        return self

    @property
    def active_stages(self) -> dict[str, Stage]:
        """The stages that this config has, by name, in order."""
        return {name: row for name, row in STAGES.items() if row.section is None or getattr(self, row.section)}

    def resolve_site(self, stage: str) -> SiteConfig:
        """The site as the jobs of a stage see it: over `site` stand `site.data_jobs`, where that is for it, and the
        stage's own keys. No more GPUs than ranks, of which each has one, unless the stage says so."""
        wanted, joined = self.stages.get_resources(stage), STAGES[stage].is_distributed
        asked: dict[str, Any] = {"sbatch": self.site.sbatch, "gpus_per_node": 0}
        if joined:
            asked["gpus_per_node"] = min(self.site.gpus_per_node, wanted.processes_per_node)
        else:
            asked = self.site.data_jobs.override(asked)
        return self.site.model_copy(update=wanted.override(asked))


# -- policies ------------------------------------------------------------------------------------------------


def walk_fields(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield each key below `section`, dotted, with its field. `*` stands for the names in a mapping of sections."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        yield key, field
        for inner, suffix in _inner_sections(field.annotation):
            yield from walk_fields(inner, f"{key}{suffix}.")


def _inner_sections(annotation: Any) -> Iterator[tuple[type[Section], str]]:
    """Yield the sections that a value of this type may contain, with `.*` for those in a mapping or a list."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation, ""
        return
    inner = get_args(annotation)
    if get_origin(annotation) is Annotated:
        inner = inner[:1]
    suffix = ".*" if get_origin(annotation) in (dict, list) else ""
    for kind in inner:
        for found, rest in _inner_sections(kind):
            yield found, suffix + rest


@cache
def list_keys_with(policy: Policy) -> tuple[str, ...]:
    """Return the keys whose fields have the policy, dotted, in the order of the config."""
    return tuple(key for key, field in walk_fields() if policy in field.metadata)


def remove_key(values: dict[str, Any], path: Sequence[str]) -> None:
    """Remove the key at `path` from nested mappings, if it is there; `*` stands for every name."""
    name, *rest = path
    if not rest:
        values.pop(name, None)
        return
    for inner in values.values() if name == "*" else [values.get(name)]:
        if isinstance(inner, dict):
            remove_key(inner, rest)


def has_policy(key: str, policy: Policy) -> bool:
    """Return True if the dotted key, or a section around it, has the policy."""
    return any(key == one or key.startswith(f"{one}.") for one in list_keys_with(policy))


def format_key_patterns(policy: Policy) -> list[str]:
    """Return the keys with the policy as messages write them: `site.*` for a section, `train.log_every` for a key."""
    sections = {key.rpartition(".")[0] for key, _ in walk_fields()}
    return [f"{key}.*" if key in sections else key for key in list_keys_with(policy)]

"""The `data` section: the documents or tokens to train on, how they become samples, and how sources are mixed."""

from __future__ import annotations

import re
from itertools import pairwise
from math import inf
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from pipeline.config.types import FilePath, Fraction, Name, Policy, Section, check_unused_keys, must_match

FilterTarget = Annotated[
    str, must_match(re.compile(r"(?s).+:[A-Za-z_]\w*"), "write MODULE:FUNCTION, such as quality:keep")
]
DocumentFormat = Literal["text", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "tar"]
Weight = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]

Sources = str | Annotated[list[str], Field(min_length=1)]


class TokenizerConfig(Section):
    """The tokenizer: a file, or one that `prepare` trains."""

    kind: Literal["byte_bpe", "file"] = "byte_bpe"
    """`byte_bpe`: train a byte-level BPE on the source. `file`: use an existing `tokenizer.json`."""
    vocab_size: Annotated[int, Field(ge=257, le=2**32 - 1)] = 4096
    """Number of token ids of a trained tokenizer (256 bytes, one end-of-text token, merges)."""
    path: Annotated[FilePath | None, Policy.PATH] = None
    """The `tokenizer.json` to use with `kind: file`."""
    eos_token: str = "<|endoftext|>"
    """The token that ends each document. With `kind: file`, it must exist in the `tokenizer.json`."""
    train_bytes: PositiveInt = 20_000_000
    """Number of bytes of documents, spread evenly over the source, on which the BPE is trained."""

    @model_validator(mode="after")
    def _check_path(self) -> TokenizerConfig:
        if self.kind == "file" and self.path is None:
            raise ValueError("kind: file needs a path: set path to a tokenizer.json")
        if self.kind != "file" and self.path is not None:
            raise ValueError("path is only for kind: file: set kind to file, or remove path")
        return self


class SourceConfig(Section):
    """One source of a mixture. It has the keys of `data` that may differ between sources."""

    source: Annotated[Sources, Policy.PATH, Policy.NOT_IN_IDENTITY]
    """As `data.source`."""
    records: Literal["text", "tokens"] = "text"
    """As `data.records`."""
    format: DocumentFormat | None = None
    """As `data.format`."""
    text_field: str = "text"
    """As `data.text_field`."""
    text_documents: Literal["file", "line"] = "file"
    """As `data.text_documents`."""
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """As `data.held_out`; null: the value of `data.held_out`."""


class WeightsConfig(Section):
    """The proportions of the sources from a step on."""

    from_step: PositiveInt = 1
    """The first step with these weights."""
    weights: dict[Name, Weight]
    """Weight of each source, in any unit. {web: 7, code: 3} takes seven samples of web for every three of code. 0: no
    samples of this source."""

    @model_validator(mode="after")
    def _check_sum(self) -> WeightsConfig:
        if not 0 < sum(self.weights.values()) < inf:
            raise ValueError("at least one weight must be more than 0, and their sum below 1.8e308")
        return self


class MixtureConfig(Section):
    """Several sources, each with its own shards, epochs and held-out part."""

    sources: Annotated[dict[Name, SourceConfig], Field(min_length=1)]
    """The sources by name."""
    weights: Annotated[Annotated[list[WeightsConfig], Field(min_length=1)], Policy.CHANGEABLE]
    """The weights from step 1 on, and an entry for each step at which they change. `resume` may change the weights of
    future steps."""

    @model_validator(mode="after")
    def _check_weights(self) -> MixtureConfig:
        steps = [entry.from_step for entry in self.weights]
        if steps[0] != 1 or any(after <= before for before, after in pairwise(steps)):
            raise ValueError(f"weights: from_step must be 1 in the first entry and increase in the list, not {steps}")
        for entry in self.weights:
            if entry.weights.keys() != self.sources.keys():
                weighted = ", ".join(entry.weights)
                raise ValueError(
                    f"weights: the entry from step {entry.from_step} has weights for {weighted}, but the sources are "
                    f"{', '.join(self.sources)}: give each source one weight"
                )
        return self

    def __str__(self) -> str:
        """Return the weights in the form `web 7, code 3; from step 500 web 1, code 1`."""
        parts = []
        for entry in self.weights:
            start = f"from step {entry.from_step} " if entry.from_step > 1 else ""
            parts.append(start + ", ".join(f"{name} {weight:g}" for name, weight in entry.weights.items()))
        return "; ".join(parts)

    def weights_until(self, step: int) -> list[WeightsConfig]:
        """Return the entries that set the weights of the first `step` steps."""
        return [entry for entry in self.weights if entry.from_step <= step]


CHAT_TEMPLATES = (
    "chatml",
    "llama2",
    "llama3",
    "llama3.1",
    "mistral-v0.1",
    "mistral-v0.3",
    "qwen2",
    "qwen2.5",
    "qwen3",
    "smollm2",
)
"""The names of the chat templates for training that Sluice includes (pipeline/data/chat_templates)."""


class DataConfig(Section):
    """The sources, and how documents become shards of tokens."""

    mixture: MixtureConfig | None = None
    """Several sources with weights, instead of `source`; null: a single source."""
    source: Annotated[Sources, Policy.PATH, Policy.NOT_IN_IDENTITY] = "python-stdlib"
    """`python-stdlib` (the library sources of the running interpreter), or one or more globs or folders. The files are
    .txt, .jsonl, .json, .csv, .tsv, .parquet, .arrow or .tar. All except .parquet and .arrow may be compressed (.gz,
    .zst, .bz2, .xz)."""
    format: DocumentFormat | None = None
    """Format of the files, regardless of their names; null: determined from the name, or from the content if the name
    does not show it. In a folder, the files with the usual suffixes of this format are used, or all files if there are
    none."""
    text_field: str = "text"
    """Field (JSON) or column (CSV, Parquet, Arrow) with the text of a document. `message.content` is the field
    `content` of the object or struct `message`."""
    text_documents: Literal["file", "line"] = "file"
    """What is one document in a .txt file: the whole `file`, or each non-empty `line`."""
    records: Literal["text", "prompts", "messages", "tokens"] = "text"
    """What the files contain. `text`: documents; all their tokens are trained on. `prompts`: .jsonl files (.gz, .zst)
    with a `prompt` and a `response` per line. `messages`: .jsonl files with a dialogue per line, which the chat
    template of the tokenizer formats. Of `prompts` and `messages`, only the responses are trained on, and documents are
    packed into samples without splitting them. `tokens`: files of tokens that `tokenizer.path` has produced elsewhere.
    They are used without a copy: .bin with .idx (Megatron), .ds (datatrove), .bin (llm.c, nanoGPT) and HDF5. The end of
    each file is held out. `data import` converts other formats."""
    chat_template: Annotated[FilePath | None, Policy.PATH] = None
    """Chat template for `records: messages`; null: that of the tokenizer. It is a Jinja file, or the name of a template
    of Sluice: chatml, llama2, llama3, llama3.1, mistral-v0.1, mistral-v0.3, qwen2, qwen2.5, qwen3, smollm2."""
    long_dialogues: Literal["split", "truncate", "drop"] = "split"
    """What happens to `prompts` and `messages` of more than `sequence_length` tokens. `split`: the rest goes into the
    next samples, without its context. `truncate`: the rest is left out. `drop`: the whole dialogue is left out."""
    document_mask: Annotated[bool, Policy.KEEPS_SHARDS] = False
    """Mask attention across document boundaries, and restart positions at each document."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer."""
    add_special_tokens: Literal["auto"] | bool = "auto"
    """Whether documents and prompts get the tokens that the post-processor of the tokenizer adds, such as the
    beginning-of-sequence token of Llama. `auto`: if the post-processor adds some; with `records: tokens`, if the
    documents of the files begin with them. true: fail if the post-processor adds none. false: never. A chat template
    writes its own special tokens."""
    sequence_length: Annotated[PositiveInt, Policy.KEEPS_SHARDS] = 1024
    """Number of tokens of a training sample."""
    shard_tokens: Annotated[int, Field(ge=1024)] = 500_000_000
    """Largest number of tokens of an HDF5 shard. 500 million tokens of two bytes take 1 GB."""
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.02
    """Fraction of the documents that is kept for evaluation. A hash of the text selects them."""
    deduplicate: bool = False
    """Use only the first of the documents of a source that have the same text. The inputs are then read twice or more
    often."""
    filter: Annotated[FilterTarget | None, Policy.PATH] = None
    """Your own Python function as `MODULE:FUNCTION`. It receives each document as a dict: the object of the line, or
    `text_field` with the text. If it returns True, the document is used. The module is a single file next to the config
    file or on the Python path."""
    max_rejected: Annotated[Fraction, Policy.CHANGEABLE, Policy.NOT_IN_IDENTITY, Policy.KEEPS_SHARDS] = 0.001
    """Largest fraction of unreadable documents (invalid UTF-8, invalid JSON, no text field) that is accepted. In small
    inputs, 5 are always accepted, if at least half of all documents can be read. 0: accept none."""
    verify: Annotated[
        Literal["hashes", "cached", "sizes"], Policy.CHANGEABLE, Policy.NOT_IN_IDENTITY, Policy.KEEPS_SHARDS
    ] = "hashes"
    """What is checked of every shard before training starts. `hashes`: the hash of each file. `cached`: the same, but
    a file is not read again if its size, time and inode are those of an earlier successful check. `sizes`: only the
    sizes, if reading all data even once is too expensive."""

    @model_validator(mode="after")
    def _check_keys_fit(self) -> DataConfig:
        if self.mixture is not None:
            usable = {key for key in type(self).model_fields if key not in SourceConfig.model_fields} | {"held_out"}
            check_unused_keys(self, usable, "set it for each source of data.mixture instead")
            if self.tokenizer.path is None:
                raise ValueError(
                    "mixture: the sources need a common tokenizer: set tokenizer {kind: file, path: …}, such as "
                    "data/tokenizer.json of a run on one of the sources"
                )
            for name in self.mixture.sources:
                type(self).model_validate(self.for_source(name).model_dump())
        record_kinds = {source.records for source in self.mixture.sources.values()} if self.mixture else {self.records}
        if record_kinds == {"tokens"} and (self.deduplicate or self.filter):
            raise ValueError(
                "records: tokens cannot be combined with deduplicate or filter, which need documents: remove them"
            )
        if self.chat_template is not None and self.records != "messages":
            raise ValueError(f"chat_template is for records: messages, not for {self.records}: remove it")
        if self.long_dialogues != "split" and not self.has_loss_mask:
            raise ValueError(
                f"long_dialogues ({self.long_dialogues}) is for records: prompts or messages, not for {self.records}: "
                "remove it"
            )
        if self.format is not None and self.records != "text":
            if self.records == "tokens":
                raise ValueError(
                    "format: it is for documents, but the format of files of tokens is read from the files: remove it"
                )
            if self.format not in ("jsonl", "json"):
                raise ValueError(
                    f"format: {self.format} contains no JSON objects, but records: {self.records} needs them: use "
                    "jsonl or json"
                )
        if self.records == "text":
            return self
        if "python-stdlib" in self.sources:
            kind = "files of tokens" if self.records == "tokens" else ".jsonl files"
            raise ValueError(f"records: {self.records} needs {kind}: set source to their path")
        if self.records == "tokens" and self.tokenizer.path is None:
            raise ValueError(
                "records: tokens needs the tokenizer that produced the tokens: set tokenizer {kind: file, path: "
                "tokenizer.json}"
            )
        if self.has_loss_mask and self.shard_tokens <= self.sequence_length:
            raise ValueError(
                f"shard_tokens ({self.shard_tokens}) must be more than sequence_length ({self.sequence_length})"
            )
        if self.records == "messages" and self.tokenizer.path is None:
            raise ValueError(
                "records: messages needs a tokenizer with a chat template: set model.init_from, or data.tokenizer "
                "{kind: file, path: …/tokenizer.json}"
            )
        return self

    @property
    def has_loss_mask(self) -> bool:
        """Whether samples have a mask of the tokens on which the loss is computed."""
        return self.records in ("prompts", "messages")

    def for_source(self, name: str) -> DataConfig:
        """Return this section with the keys of one source of the mixture."""
        assert self.mixture is not None
        source_values = self.mixture.sources[name].model_dump(exclude_none=True)
        if source_values["records"] == "tokens":  # deduplicate and filter are for the sources with documents
            source_values |= {"deduplicate": False, "filter": None}
        return self.model_copy(update={**source_values, "mixture": None})

    @property
    def sources(self) -> list[str]:
        """The source as a list; for a mixture, all sources."""
        if self.mixture is not None:
            return [source for name in self.mixture.sources for source in self.for_source(name).sources]
        return [self.source] if isinstance(self.source, str) else list(self.source)

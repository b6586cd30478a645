"""The `data` section: the documents or tokens to train on, how they become samples, and how sources are mixed."""

from __future__ import annotations

import re
from itertools import pairwise
from math import inf
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from pipeline.config.types import FilePath, Fraction, Name, Policy, Section, check_unused_keys, must_match

FilterTarget = Annotated[
    str, must_match(re.compile(r"(?s).+:[A-Za-z_]\w*"), "write MODULE:FUNCTION, such as quality:keep")
]
DocumentFormat = Literal["text", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "tar"]
Weight = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]

Sources = str | Annotated[list[str], Field(min_length=1)]


class TokenizerConfig(Section):
    """The tokenizer: an existing file, or one that the stage `prepare` trains."""

    kind: Literal["byte_bpe", "file"] = "byte_bpe"
    """`byte_bpe`: train a byte-level BPE on the source. `file`: use an existing `tokenizer.json`."""
    vocab_size: Annotated[int, Field(ge=257, le=2**32 - 1)] = 4096
    """Number of token ids of a trained tokenizer (256 bytes, one end-of-text token, merges)."""
    path: Annotated[FilePath | None, Policy.PATH] = None
    """The `tokenizer.json` to use with `kind: file`."""
    eos_token: str = "<|endoftext|>"
    """The token that ends each document. With `kind: file`, it must exist in the `tokenizer.json`."""
    train_bytes: PositiveInt = 20_000_000
    """Number of bytes of text on which the BPE is trained. The text is taken from places that are spread evenly over
    the source."""

    @model_validator(mode="after")
    def _check_path(self) -> TokenizerConfig:
        """Raise ValueError unless `path` is set exactly for `kind: file`."""
        if self.kind == "file" and self.path is None:
            raise ValueError("kind: file needs a path: set path to a tokenizer.json")
        if self.kind != "file" and self.path is not None:
            raise ValueError("path is only for kind: file: set kind to file, or remove path")
        return self


class SourceConfig(Section):
    """One source of a mixture. Its keys have the same meaning as in `data`."""

    source: Annotated[Sources, Policy.PATH, Policy.NOT_IN_IDENTITY]
    """Same as `data.source`, for this source."""
    records: Literal["text", "tokens"] = "text"
    """Same as `data.records`, for this source."""
    format: DocumentFormat | None = None
    """Same as `data.format`, for this source."""
    text_field: str = "text"
    """Same as `data.text_field`, for this source."""
    text_documents: Literal["file", "line"] = "file"
    """Same as `data.text_documents`, for this source."""
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Same as `data.held_out`, for this source; null: use the value of `data.held_out`."""


class WeightsConfig(Section):
    """The proportions of the sources, beginning at a step."""

    from_step: PositiveInt = 1
    """The first optimizer step with these weights."""
    weights: dict[Name, Weight]
    """Relative weight of each source. With `{web: 7, code: 3}`, seven of ten samples are from the source `web`, and
    three are from `code`. 0: no samples of this source."""

    @model_validator(mode="after")
    def _check_sum(self) -> WeightsConfig:
        """Raise ValueError unless the sum of the weights is positive and finite."""
        if not 0 < sum(self.weights.values()) < inf:
            raise ValueError("at least one weight must be more than 0, and their sum below 1.8e308")
        return self


class MixtureConfig(Section):
    """Several sources. Each has its own shards, epochs and held-out part."""

    sources: Annotated[dict[Name, SourceConfig], Field(min_length=1)]
    """The sources by name."""
    weights: Annotated[Annotated[list[WeightsConfig], Field(min_length=1)], Policy.CHANGEABLE]
    """List of weights. The first item has the weights from step 1 on. Each further item has new weights, and the step
    from which they apply. `resume` may change the weights of future steps."""

    @model_validator(mode="after")
    def _check_weights(self) -> MixtureConfig:
        """Raise ValueError unless `from_step` starts at 1 and increases, and each entry has weights for all sources."""
        steps = [entry.from_step for entry in self.weights]
        if steps[0] != 1 or any(after <= before for before, after in pairwise(steps)):
            raise ValueError(f"weights: from_step must be 1 in the first entry and increase in the list, not {steps}")
        for entry in self.weights:
            if entry.weights.keys() != self.sources.keys():
                names = ", ".join(entry.weights)
                raise ValueError(
                    f"weights: the entry from step {entry.from_step} has weights for {names}, but the sources are "
                    f"{', '.join(self.sources)}: give each source one weight"
                )
        return self

    def __str__(self) -> str:
        """Return the weights in the form `web 7, code 3; from step 500 web 1, code 1`."""
        descriptions = []
        for entry in self.weights:
            start = f"from step {entry.from_step} " if entry.from_step > 1 else ""
            descriptions.append(start + ", ".join(f"{name} {weight:g}" for name, weight in entry.weights.items()))
        return "; ".join(descriptions)

    def weights_until(self, step: int) -> list[WeightsConfig]:
        """Return the entries of `weights` that apply to the first `step` steps."""
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


def restore_hashed_names(values: dict[str, Any]) -> None:
    """Give renamed keys of the section `data` their former names, in place. Hashes of older versions contain these."""
    if "long_documents" in values:
        values["long_dialogues"] = values.pop("long_documents")


class DataConfig(Section):
    """The sources, and how documents become shards of tokens."""

    mixture: MixtureConfig | None = None
    """Several sources with weights, to use instead of `source`; null: use `source`."""
    source: Annotated[Sources, Policy.PATH, Policy.NOT_IN_IDENTITY] = "python-stdlib"
    """Files to train on: one or more paths of files or directories, or patterns with `*`, or `python-stdlib` (the
    source code of the Python standard library). Supported are .txt, .jsonl, .json, .csv, .tsv, .parquet, .arrow and
    .tar. All except .parquet and .arrow may be compressed (.gz, .zst, .bz2, .xz)."""
    format: DocumentFormat | None = None
    """Format of the files, regardless of their names. If `source` is a directory, the files with the usual endings of
    this format are used. If no file has such an ending, all files of the directory are used. null: determine the format
    of each file from its name, or from its content if the name does not show the format."""
    text_field: str = "text"
    """Field (JSON) or column (CSV, Parquet, Arrow) that contains the text of a document. `message.content` is the field
    `content` of the object or struct `message`."""
    text_documents: Literal["file", "line"] = "file"
    """How .txt files are split into documents. `file`: each file is one document. `line`: each non-empty line is one
    document."""
    records: Literal["text", "prompts", "messages", "tokens"] = "text"
    """What the files contain. `text`: documents; the loss is computed on all tokens. `prompts`: .jsonl or .json files
    of objects with the fields `prompt` and `response`. `messages`: .jsonl or .json files of dialogues, which the chat
    template of the tokenizer formats. With `prompts` and `messages`, the loss is computed only on the responses, and
    documents are packed into samples; only documents that are longer than a sample are cut. `tokens`: token files
    that were written with the tokenizer in `tokenizer.path`. Training reads these formats without a copy: .bin with
    .idx (Megatron), .ds (datatrove), .bin (llm.c, nanoGPT) and contiguous HDF5. The end of each token file is held out.
    `data import` converts other formats."""
    chat_template: Annotated[FilePath | None, Policy.PATH] = None
    """Chat template for `records: messages`: a Jinja file, or the name of a template that Sluice includes. These names
    are chatml, llama2, llama3, llama3.1, mistral-v0.1, mistral-v0.3, qwen2, qwen2.5, qwen3 and smollm2. null: use the
    template of the tokenizer."""
    packing: Literal["cut", "best_fit"] = "cut"
    """How documents become training samples. `cut`: text is one stream of tokens, which is cut after every
    `sequence_length` tokens; `prompts` and `messages` are kept whole and in order, and the rest of a sample is padded.
    `best_fit`: documents are kept whole, and each is put into the sample where it leaves the least free space; the rest
    of a sample is padded, and the order of the documents changes. Held-out text is always cut. `records: tokens` cannot
    be combined with `best_fit`."""
    long_documents: Literal["cut", "truncate", "drop"] = "cut"
    """What happens to a document with more than `sequence_length` tokens. For `prompts`, `messages` and
    `packing: best_fit`. `cut`: the remaining tokens go into other samples, without the beginning of the document.
    `truncate`: omit the remaining tokens. `drop`: omit the whole document."""
    document_mask: Annotated[bool, Policy.KEEPS_SHARDS] = False
    """Mask attention across document boundaries, and restart positions at each document."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer: one that the stage `prepare` trains, or an existing file."""
    add_special_tokens: Literal["auto"] | bool = "auto"
    """Add the special tokens of the tokenizer's post-processor, such as Llama's beginning-of-sequence token, to
    documents and prompts. `auto`: add them if the post-processor has any; with `records: tokens`, if the documents in
    the files begin with them. true: add them, and fail if the post-processor has none. false: never add them. A chat
    template writes its own special tokens."""
    sequence_length: Annotated[PositiveInt, Policy.KEEPS_SHARDS] = 1024
    """Number of tokens in a training sample."""
    shard_tokens: Annotated[int, Field(ge=1024)] = 500_000_000
    """Largest number of tokens in an HDF5 shard. 500 million tokens of two bytes take up 1 GB."""
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.02
    """Fraction of the documents that are held out for evaluation. A hash of the text of a document decides whether the
    document is held out. With `records: tokens`: the fraction at the end of each file."""
    deduplicate: bool = False
    """If several documents of a source have the same text, use only the first. The input files are then read at least
    twice."""
    filter: Annotated[FilterTarget | None, Policy.PATH] = None
    """Python function, as `MODULE:FUNCTION`, that selects documents. The function receives each document as a dict, and
    returns True if the document should be used. The dict is the JSON object or the CSV row; for other formats, it is
    `{text_field: text}`. The module is a single file next to the config file or on the Python path."""
    max_rejected: Annotated[Fraction, Policy.CHANGEABLE, Policy.NOT_IN_IDENTITY, Policy.KEEPS_SHARDS] = 0.001
    """Largest accepted fraction of unreadable documents (invalid UTF-8, invalid JSON, no text field). Up to 5
    unreadable documents are accepted in any case if at least half of all documents can be read. 0: accept none."""
    workers: Annotated[PositiveInt, Policy.CHANGEABLE, Policy.NOT_IN_IDENTITY, Policy.KEEPS_SHARDS] = 1
    """Number of processes of each rank that read the samples of a `dataset` function in the module of `model.target`
    (docs/models.md). The number does not change the samples."""
    verify: Annotated[
        Literal["hashes", "cached", "sizes"], Policy.CHANGEABLE, Policy.NOT_IN_IDENTITY, Policy.KEEPS_SHARDS
    ] = "hashes"
    """How every shard is checked before training starts. `hashes`: by the hash of each file. `cached`: also by the
    hash, but a file is not read again if its size, modification time and inode are the same as at an earlier successful
    check. `sizes`: only by size, if it is too expensive to read all data even once."""

    @model_validator(mode="after")
    def _check_keys_fit(self) -> DataConfig:
        """Raise ValueError if keys of this section contradict each other."""
        if self.mixture is not None:
            # each source sets the keys of SourceConfig; only held_out also has a value for all sources
            used_keys = {key for key in type(self).model_fields if key not in SourceConfig.model_fields} | {"held_out"}
            check_unused_keys(self, used_keys, "set it for each source of data.mixture instead")
            if self.tokenizer.path is None:
                raise ValueError(
                    "mixture: the sources need a common tokenizer: set tokenizer {kind: file, path: …}, such as "
                    "data/tokenizer.json of a run on one of the sources"
                )
            for name in self.mixture.sources:  # raise ValueError if the keys of a source contradict each other
                type(self).model_validate(self.for_source(name).model_dump())
        record_kinds = {source.records for source in self.mixture.sources.values()} if self.mixture else {self.records}
        if record_kinds == {"tokens"} and (self.deduplicate or self.filter):
            raise ValueError(
                "records: tokens cannot be combined with deduplicate or filter, which need documents: remove them"
            )
        if self.chat_template is not None and self.records != "messages":
            raise ValueError(f"chat_template is for records: messages, not for {self.records}: remove it")
        if self.packing == "best_fit" and self.records == "tokens":
            raise ValueError(
                "packing: best_fit copies documents into samples, but files of tokens are read without a copy: remove "
                "it, or set records: text for a source with documents"
            )
        if self.long_documents != "cut" and not self.has_training_mask:
            raise ValueError(
                f"long_documents ({self.long_documents}) is for records: prompts or messages, or for packing: "
                f"best_fit, not for {self.records} with packing: {self.packing}: remove it"
            )
        if self.has_training_mask and self.shard_tokens <= self.sequence_length:
            raise ValueError(
                f"shard_tokens ({self.shard_tokens}) must be more than sequence_length ({self.sequence_length})"
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
        if self.records == "messages" and self.tokenizer.path is None:
            raise ValueError(
                "records: messages needs a tokenizer with a chat template: set model.init_from, or data.tokenizer "
                "{kind: file, path: …/tokenizer.json}"
            )
        return self

    @property
    def has_loss_mask(self) -> bool:
        """True if the loss is computed only on parts of the documents. All samples, also held-out ones, have a mask."""
        return self.records in ("prompts", "messages")

    @property
    def has_training_mask(self) -> bool:
        """True if training shards have a mask, and consist of windows of `sequence_length` tokens."""
        return self.has_loss_mask or self.packing == "best_fit"

    def for_source(self, name: str) -> DataConfig:
        """Return the section `data` for one source of the mixture: this section with the keys of the source."""
        assert self.mixture is not None
        source_values = self.mixture.sources[name].model_dump(exclude_none=True)
        if source_values["records"] == "tokens":  # deduplicate and filter are for the sources with documents
            source_values |= {"deduplicate": False, "filter": None}
        return self.model_copy(update={**source_values, "mixture": None})

    @property
    def sources(self) -> list[str]:
        """The paths in `source` as a list; for a mixture, the paths of all its sources."""
        if self.mixture is not None:
            return [source for name in self.mixture.sources for source in self.for_source(name).sources]
        return [self.source] if isinstance(self.source, str) else list(self.source)

"""`data`: which documents, or tokens, a run is trained on, how they become samples, and how sources are mixed."""

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
    """Where the tokenizer comes from."""

    kind: Literal["byte_bpe", "file"] = "byte_bpe"
    """`byte_bpe` trains a byte-level BPE on the source; `file` takes a `tokenizer.json`."""
    vocab_size: Annotated[int, Field(ge=257, le=2**32 - 1)] = 4096
    """Number of token ids of a trained tokenizer (256 bytes, one end-of-text token, merges)."""
    path: Annotated[FilePath | None, Policy.PATH] = None
    """The `tokenizer.json` of kind `file`."""
    eos_token: str = "<|endoftext|>"
    """The token that ends each document; it must exist in a given `tokenizer.json`."""
    train_bytes: PositiveInt = 20_000_000
    """How many bytes of documents, spread evenly over the source, the BPE is trained on."""

    @model_validator(mode="after")
    def _path_goes_with_kind(self) -> TokenizerConfig:
        if (self.kind == "file") != (self.path is not None):
            raise ValueError("`path` goes with `kind: file`, and `kind: file` needs a `path`")
        return self


class SourceConfig(Section):
    """One source of a mixture: the keys of `data` that may differ between them."""

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
    """As `data.held_out`; null: what stands there."""


class WeightsConfig(Section):
    """From which step on samples are taken in which proportions."""

    from_step: PositiveInt = 1
    """The first step with these weights."""
    weights: dict[Name, Weight]
    """By source, in any unit: {web: 7, code: 3} takes seven samples of web to three of code. 0: none of it."""

    @model_validator(mode="after")
    def _something(self) -> WeightsConfig:
        if not 0 < sum(self.weights.values()) < inf:
            raise ValueError("at least one weight must be more than 0, and their sum below 1.8e308")
        return self


class MixtureConfig(Section):
    """Several sources, each with its own shards, epochs and held-out part."""

    sources: Annotated[dict[Name, SourceConfig], Field(min_length=1)]
    """What is mixed, by name."""
    weights: Annotated[Annotated[list[WeightsConfig], Field(min_length=1)], Policy.CHANGEABLE]
    """Weights from step 1 on, and where they change. `resume` may change those of steps to come."""

    @model_validator(mode="after")
    def _weights_fit(self) -> MixtureConfig:
        steps = [one.from_step for one in self.weights]
        if steps[0] != 1 or any(after <= before for before, after in pairwise(steps)):
            raise ValueError(f"weights: from_step goes up from 1 in the list, not {steps}")
        for one in self.weights:
            if one.weights.keys() != self.sources.keys():
                told, names = ", ".join(one.weights), ", ".join(self.sources)
                raise ValueError(f"weights from step {one.from_step} are of {told}; the sources are {names}")
        return self

    def __str__(self) -> str:
        """`web 7, code 3; from step 500 web 1, code 1`."""
        parts = []
        for one in self.weights:
            begin = f"from step {one.from_step} " if one.from_step > 1 else ""
            parts.append(begin + ", ".join(f"{name} {weight:g}" for name, weight in one.weights.items()))
        return "; ".join(parts)

    def weights_until(self, step: int) -> list[WeightsConfig]:
        """What the first `step` steps were taken by."""
        return [one for one in self.weights if one.from_step <= step]


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
"""The names of the chat templates for training that come with Sluice (pipeline/data/chat_templates)."""


class DataConfig(Section):
    """From documents to shards of tokens."""

    mixture: MixtureConfig | None = None
    """Several sources with weights, instead of `source`; null: one."""
    source: Annotated[Sources, Policy.PATH, Policy.NOT_IN_IDENTITY] = "python-stdlib"
    """`python-stdlib` (the running interpreter's own library sources), or one or more globs, or folders, of .txt,
    .jsonl, .json, .csv, .tsv, .parquet, .arrow or .tar files; all but .parquet and .arrow may be compressed (.gz, .zst,
    .bz2, .xz)."""
    format: DocumentFormat | None = None
    """What the files are, whatever their names; null: names tell, and content where they do not. Of a folder, the files
    with the usual endings of this format are taken, or all files if there are none."""
    text_field: str = "text"
    """Field (JSON) or column (CSV, Parquet, Arrow) that holds a document's text; `message.content` is field `content`
    of the object, or struct, in `message`."""
    text_documents: Literal["file", "line"] = "file"
    """What a document is in a .txt file: the whole `file`, or each non-empty `line`."""
    records: Literal["text", "prompts", "messages", "tokens"] = "text"
    """What a line of a .jsonl file (.gz, .zst) holds: `text` in `text_field`, of which all is learned; `prompts`: a
    `prompt` and a `response`; `messages`: a dialogue, put into words by the chat template beside `tokenizer.path`. Of
    these only what is answered is learned, and documents are laid into samples whole. `tokens`: files of tokens that
    `tokenizer.path` made elsewhere, taken where they lie: Megatron's .bin with .idx, datatrove's .ds, llm.c's and
    nanoGPT's .bin, HDF5; the end of each file is held out. `data import` copies what else there is."""
    chat_template: Annotated[FilePath | None, Policy.PATH] = None
    """The chat template of `records: messages`, instead of the tokenizer's own: a Jinja file, or the name of one that
    comes with Sluice: chatml, llama2, llama3, llama3.1, mistral-v0.1, mistral-v0.3, qwen2, qwen2.5, qwen3, smollm2."""
    long_dialogues: Literal["split", "truncate", "drop"] = "split"
    """What happens to `prompts` and `messages` of more than `sequence_length` tokens: `split` puts the rest into the
    next samples, without what stands before; `truncate` leaves the rest out; `drop` leaves all of it out."""
    document_mask: Annotated[bool, Policy.KEEPS_SHARDS] = False
    """Whether the documents of a sample are apart: none sees another, and in each positions start again."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer."""
    add_special_tokens: Literal["auto"] | bool = "auto"
    """Whether documents and prompts get the tokens that the tokenizer's post-processor adds to a text, such as Llama's
    beginning-of-sequence token: `auto` as the post-processor says (of `tokens`: if the files' documents begin so);
    true: it must add some; false: none. A chat template writes its own."""
    sequence_length: Annotated[PositiveInt, Policy.KEEPS_SHARDS] = 1024
    """Tokens of one training sample."""
    shard_tokens: Annotated[int, Field(ge=1024)] = 500_000_000
    """Most tokens of one HDF5 shard (500 M tokens of two bytes make 1 GB)."""
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.02
    """Fraction of the documents, chosen by a hash of their text, that is kept for evaluation."""
    deduplicate: bool = False
    """Whether of documents with the same text (of one source) only the first is taken. Inputs are read twice then, or
    more often."""
    filter: Annotated[FilterTarget | None, Policy.PATH] = None
    """A Python function of your own, `MODULE:FUNCTION`, that is called with each document as a dict (the object of a
    line, or `text_field` and text); True keeps it. The module is one file, beside the config file or on the path."""
    max_rejected: Annotated[Fraction, Policy.CHANGEABLE, Policy.NOT_IN_IDENTITY, Policy.KEEPS_SHARDS] = 0.001
    """Largest fraction of unreadable documents (invalid UTF-8, broken JSON, no text field) to accept. On small inputs 5
    are accepted, if at least half of all documents can be read; 0 accepts none."""
    verify: Annotated[
        Literal["hashes", "cached", "sizes"], Policy.CHANGEABLE, Policy.NOT_IN_IDENTITY, Policy.KEEPS_SHARDS
    ] = "hashes"
    """What is checked of every shard when a training starts: its hash; `cached`: not again of a file that still has the
    size, time and inode that it had when it was right; `sizes`, where reading all data even once costs too much."""

    @model_validator(mode="after")
    def _records_fit(self) -> DataConfig:
        if self.mixture is not None:
            meant = {key for key in type(self).model_fields if key not in SourceConfig.model_fields} | {"held_out"}
            check_unused_keys(self, meant, "each source of data.mixture has its own")
            if self.tokenizer.path is None:
                raise ValueError(
                    "mixture: its sources share a tokenizer that exists: set tokenizer {kind: file, path: …}, such as "
                    "data/tokenizer.json of a run on one of them"
                )
            for name in self.mixture.sources:
                type(self).model_validate(self.for_source(name).model_dump())
        kinds = {one.records for one in self.mixture.sources.values()} if self.mixture else {self.records}
        if kinds == {"tokens"} and (self.deduplicate or self.filter):
            raise ValueError("records: tokens are taken as they are: deduplicate and filter are for documents")
        if self.chat_template is not None and self.records != "messages":
            raise ValueError(f"chat_template is for records: messages, not for {self.records}: remove it")
        if self.long_dialogues != "split" and not self.has_loss_mask:
            raise ValueError(
                f"long_dialogues ({self.long_dialogues}) is for records: prompts or messages, not for {self.records}: "
                "remove it"
            )
        if self.format is not None and self.records != "text":
            if self.records == "tokens":
                raise ValueError("format: it is for documents; files of tokens are known by their content")
            if self.format not in ("jsonl", "json"):
                raise ValueError(
                    f"format: {self.format} holds no objects, which records: {self.records} needs: jsonl, json"
                )
        if self.records == "text":
            return self
        if "python-stdlib" in self.sources:
            kind = "of tokens" if self.records == "tokens" else ".jsonl"
            raise ValueError(f"records: {self.records} stand in files {kind}: name them as source")
        if self.records == "tokens" and self.tokenizer.path is None:
            raise ValueError("records: tokens needs the tokenizer that made them: {kind: file, path: tokenizer.json}")
        if self.has_loss_mask and self.shard_tokens <= self.sequence_length:
            raise ValueError(f"shard_tokens ({self.shard_tokens}) has no room for a sample of {self.sequence_length}")
        if self.records == "messages" and self.tokenizer.path is None:
            raise ValueError(
                "records: messages needs a tokenizer with a chat template: set model.init_from, or data.tokenizer "
                "{kind: file, path: …/tokenizer.json}"
            )
        return self

    @property
    def has_loss_mask(self) -> bool:
        """Whether a mask says what is learned."""
        return self.records in ("prompts", "messages")

    def for_source(self, name: str) -> DataConfig:
        """The section as it is for one source of the mixture."""
        assert self.mixture is not None
        own = self.mixture.sources[name].model_dump(exclude_none=True)
        if own["records"] == "tokens":  # taken as they are
            own |= {"deduplicate": False, "filter": None}
        return self.model_copy(update={**own, "mixture": None})

    @property
    def sources(self) -> list[str]:
        """The source as a list; of a mixture, all of them."""
        if self.mixture is not None:
            return [one for name in self.mixture.sources for one in self.for_source(name).sources]
        return [self.source] if isinstance(self.source, str) else list(self.source)

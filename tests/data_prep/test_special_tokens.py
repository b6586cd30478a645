"""Tests of `data.add_special_tokens`: documents and prompts have the tokens that transformers returns for them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from data_prep.text_folder import TextFolder
from data_prep.tokenizer import load_encoder
from pipeline.base.files import write_json
from pipeline.config.datasets import DataConfig, TokenizerConfig
from pipeline.data.special_tokens import encode_prompt, get_added_tokens, load_tokenizer
from tests.data_prep.test_records import read_shard_documents, sample_words
from tests.data_prep.test_shards import build_shards
from tests.support.errors import raises_error
from tests.support.tokenizers import (
    add_post_processor,
    get_token_id,
    make_byte_tokenizer,
    save_tokenizer,
    write_records,
)

POST_PROCESSORS = ("qwen", "llama 3", "mistral", "begin and end", "end only", "two at the beginning", "bert", "roberta")
END_TOKEN = "<|end|>"
BOS_ID = get_token_id(make_byte_tokenizer("the model of"), "<s>")
TEXTS = ["the model of the", " a <s> in a text", "", "漢字 é"]
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer_of_kind(folder: Path, kind: str, **settings: Any) -> Path:
    """Write a tokenizer with a post-processor of this kind to `folder`, and return the path of its file."""
    return save_tokenizer(folder, add_post_processor(make_byte_tokenizer("the model of"), kind), **settings)


def make_data_config(source: Path, tokenizer: Path, **fields: Any) -> DataConfig:
    """Return a data config with small shards and a tokenizer file. `fields` replace or add values."""
    values = {"shard_tokens": 2048, "held_out": 0.2, "sequence_length": 64, **fields}
    return DataConfig(
        source=str(source), tokenizer=TokenizerConfig(kind="file", path=tokenizer, eos_token=END_TOKEN), **values
    )


@pytest.mark.parametrize("kind", POST_PROCESSORS)
def test_a_text_has_the_same_tokens_as_in_transformers(tmp_path: Path, kind: str) -> None:
    file = save_tokenizer_of_kind(tmp_path, kind)
    hf_tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), split_special_tokens=True)
    encoder = load_encoder(file, END_TOKEN, "auto")
    for text, tokens in zip(TEXTS, encoder.encode(TEXTS), strict=True):
        expected = hf_tokenizer(text).input_ids
        expected += [] if expected[-1:] == [encoder.eos_id] else [encoder.eos_id]
        assert tokens.tolist() == expected
    plain_encoder = load_encoder(file, END_TOKEN, add_special_tokens=False)
    expected = [*hf_tokenizer(TEXTS[0], add_special_tokens=False).input_ids, plain_encoder.eos_id]
    assert plain_encoder.encode(TEXTS)[0].tolist() == expected


def test_add_special_tokens_requires_a_tokenizer_that_adds_valid_tokens(tmp_path: Path) -> None:
    file_with_bos = save_tokenizer_of_kind(tmp_path / "llama", "llama 3")
    assert load_encoder(file_with_bos, END_TOKEN, add_special_tokens=True).bos_ids == (BOS_ID,)
    file = save_tokenizer_of_kind(tmp_path / "qwen", "qwen")
    with raises_error("data.no_special_tokens", "data.add_special_tokens", file):
        load_encoder(file, END_TOKEN, add_special_tokens=True)
    data = make_data_config(write_records(tmp_path / "a.jsonl", [{"text": "a"}]), file, add_special_tokens=True)
    with raises_error("data.no_special_tokens", "data.add_special_tokens", file):
        TextFolder(data, tmp_path).check_inputs()
    content = json.loads(save_tokenizer_of_kind(tmp_path / "beyond", "mistral").read_text())
    content["post_processor"]["special_tokens"]["<s>"]["ids"] = [999]
    write_json(tmp_path / "beyond/tokenizer.json", content)
    with raises_error("data.invalid_tokenizer", "beyond/tokenizer.json", "999", "data.add_special_tokens: false"):
        load_encoder(tmp_path / "beyond/tokenizer.json", END_TOKEN, "auto")


@pytest.mark.parametrize("kind", ["llama 3", "bert", "same token for begin and end"])
def test_special_tokens_are_added_once_before_a_prompt_and_once_after_an_answer(tmp_path: Path, kind: str) -> None:
    generator = random.Random(1)
    lines = [{"prompt": sample_words(generator, 9) + "\n", "response": sample_words(generator, 20)} for _ in range(40)]
    lines.append({"prompt": "", "response": "an answer without a prompt"})
    file = save_tokenizer_of_kind(tmp_path / "tokenizer", kind)
    data = make_data_config(write_records(tmp_path / "a.jsonl", lines), file, records="prompts")
    manifest = build_shards(data, tmp_path / "data")
    hf_tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), split_special_tokens=True)
    tokens_before, tokens_after = get_added_tokens(load_tokenizer(file))
    assert manifest.bos_ids == tokens_before != ()
    expected = []
    for line in lines:
        prompt_length = len(line["prompt"])
        encoding = hf_tokenizer(line["prompt"] + line["response"], return_offsets_mapping=True)
        added_eos = [] if encoding.input_ids[-1] == manifest.eos_id else [manifest.eos_id]
        in_loss = [last > prompt_length for _, last in encoding.offset_mapping]
        in_loss[len(in_loss) - len(tokens_after) :] = [True] * len(tokens_after)
        expected.append(([*encoding.input_ids, *added_eos], [*in_loss, *[True] * len(added_eos)]))
    assert sorted(read_shard_documents(tmp_path / "data", manifest)) == sorted(expected)


def test_a_dialogue_has_only_the_special_tokens_of_its_chat_template(tmp_path: Path) -> None:
    generator = random.Random(2)
    lines = [
        [{"role": "user", "content": sample_words(generator, 9)}, {"role": "assistant", "content": "four"}]
        for _ in range(40)
    ]
    source = write_records(tmp_path / "a.jsonl", [{"messages": messages} for messages in lines])
    file = save_tokenizer_of_kind(
        tmp_path / "tokenizer", "llama 3", template=CHAT, bos_token="<s>", eos_token=END_TOKEN
    )
    manifest = build_shards(make_data_config(source, file, records="messages"), tmp_path / "data")
    hf_tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent)
    expected = [
        hf_tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True).input_ids for messages in lines
    ]
    documents = [ids for ids, _ in read_shard_documents(tmp_path / "data", manifest)]
    assert sorted(documents) == sorted(expected)
    assert all(ids.count(BOS_ID) == 1 for ids in documents)
    assert manifest.bos_ids == (BOS_ID,)


def test_a_token_that_is_both_first_and_last_is_written_once_between_documents(tmp_path: Path) -> None:
    file = save_tokenizer_of_kind(tmp_path / "tokenizer", "same token for begin and end")
    manifest = build_shards(
        make_data_config(write_records(tmp_path / "a.jsonl", [{"text": "a model"}] * 9), file, held_out=0), tmp_path
    )
    entry = manifest.train[0]
    tokens = np.fromfile(tmp_path / entry.file, entry.dtype, entry.tokens, offset=entry.offset).tolist()
    end_id = 0  # of <|end|>, which is both tokens
    assert tokens.count(end_id) == 9 and tokens[-1] == end_id and manifest.bos_ids == (end_id,)


def test_the_tokens_before_a_prompt_are_added_once() -> None:
    tokenizer = add_post_processor(make_byte_tokenizer("the model of"), "bert")
    plain = tokenizer.encode("a b", add_special_tokens=False).ids
    assert (
        encode_prompt(tokenizer, "a b", (BOS_ID,)) == [BOS_ID, *plain] == encode_prompt(tokenizer, "<s>a b", (BOS_ID,))
    )
    assert encode_prompt(tokenizer, "a b", ()) == plain and encode_prompt(tokenizer, "", (BOS_ID,)) == [BOS_ID]

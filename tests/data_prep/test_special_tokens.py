"""`data.add_special_tokens`: documents and prompts are encoded as transformers does with the same tokenizer."""

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
from pipeline.base.errors import UserError
from pipeline.base.files import write_json
from pipeline.config.datasets import DataConfig, TokenizerConfig
from pipeline.data.special_tokens import encode_prompt, get_added_tokens, load_tokenizer
from tests.data_prep.test_records import read_shard_documents, sample_words
from tests.data_prep.test_shards import run_tasks
from tests.support.tokenizers import (
    add_post_processor,
    get_token_id,
    make_byte_tokenizer,
    save_tokenizer,
    write_records,
)

KINDS = ("qwen", "llama 3", "mistral", "with end", "end alone", "two before", "bert", "roberta")
END = "<|end|>"
BOS = get_token_id(make_byte_tokenizer("the model of"), "<s>")
TEXTS = ["the model of the", " a <s> in a text", "", "漢字 é"]
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def saved(folder: Path, kind: str, **settings: Any) -> Path:
    return save_tokenizer(folder, add_post_processor(make_byte_tokenizer("the model of"), kind), **settings)


def config(source: Path, tokenizer: Path, **more: Any) -> DataConfig:
    given = TokenizerConfig(kind="file", path=tokenizer, eos_token=END)
    values = {"shard_tokens": 2048, "held_out": 0.2, "sequence_length": 64, **more}
    return DataConfig(source=str(source), tokenizer=given, **values)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_the_tokens_that_transformers_gives_it(tmp_path: Path, kind: str) -> None:
    file = saved(tmp_path, kind)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(file), split_special_tokens=True)
    encoder = load_encoder(file, END, "auto")
    for text, tokens in zip(TEXTS, encoder.encode(TEXTS), strict=True):
        expected = theirs(text).input_ids
        expected += [] if expected[-1:] == [encoder.eos_id] else [encoder.eos_id]
        assert tokens.tolist() == expected
    plain = load_encoder(file, END, False)
    assert plain.encode(TEXTS)[0].tolist() == [*theirs(TEXTS[0], add_special_tokens=False).input_ids, plain.eos_id]


def test_true_needs_a_tokenizer_that_adds_some(tmp_path: Path) -> None:
    assert load_encoder(saved(tmp_path / "llama", "llama 3"), END, True).bos_ids == (BOS,)
    file = saved(tmp_path / "qwen", "qwen")
    with pytest.raises(UserError, match=rf"data\.add_special_tokens: .*{file}"):
        load_encoder(file, END, True)
    data = config(write_records(tmp_path / "a.jsonl", [{"text": "a"}]), file, add_special_tokens=True)
    with pytest.raises(UserError, match=r"data\.add_special_tokens: .*qwen/tokenizer\.json"):
        TextFolder(data, tmp_path).check_inputs()
    content = json.loads(saved(tmp_path / "beyond", "mistral").read_text())
    content["post_processor"]["special_tokens"]["<s>"]["ids"] = [999]
    write_json(tmp_path / "beyond/tokenizer.json", content)
    with pytest.raises(UserError, match=r"beyond/tokenizer\.json: .*999.*data\.add_special_tokens: false"):
        load_encoder(tmp_path / "beyond/tokenizer.json", END, "auto")


@pytest.mark.parametrize("kind", ["llama 3", "bert", "one for both"])
def test_a_prompt_begins_once_and_an_answer_ends_once(tmp_path: Path, kind: str) -> None:
    draw = random.Random(1)
    lines = [{"prompt": sample_words(draw, 9) + "\n", "response": sample_words(draw, 20)} for _ in range(40)]
    lines.append({"prompt": "", "response": "nothing was asked"})
    file = saved(tmp_path / "tokenizer", kind)
    data = config(write_records(tmp_path / "a.jsonl", lines), file, records="prompts")
    manifest = run_tasks(data, tmp_path / "data")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(file), split_special_tokens=True)
    before, behind = get_added_tokens(load_tokenizer(file))
    assert manifest.bos_ids == before != ()
    expected = []
    for line in lines:
        prompt = len(line["prompt"])
        made = theirs(line["prompt"] + line["response"], return_offsets_mapping=True)
        end = [] if made.input_ids[-1] == manifest.eos_id else [manifest.eos_id]
        learned = [last > prompt for _, last in made.offset_mapping]
        learned[len(learned) - len(behind) :] = [True] * len(behind)
        expected.append(([*made.input_ids, *end], [*learned, *[True] * len(end)]))
    assert sorted(read_shard_documents(tmp_path / "data", manifest)) == sorted(expected)


def test_a_chat_template_writes_its_own(tmp_path: Path) -> None:
    draw = random.Random(2)
    lines = [
        [{"role": "user", "content": sample_words(draw, 9)}, {"role": "assistant", "content": "four"}]
        for _ in range(40)
    ]
    source = write_records(tmp_path / "a.jsonl", [{"messages": messages} for messages in lines])
    file = saved(tmp_path / "tokenizer", "llama 3", template=CHAT, bos_token="<s>", eos_token=END)
    manifest = run_tasks(config(source, file, records="messages"), tmp_path / "data")
    theirs = PreTrainedTokenizerFast.from_pretrained(file.parent)
    expected = [theirs.apply_chat_template(messages, tokenize=True, return_dict=True).input_ids for messages in lines]
    found = [ids for ids, _ in read_shard_documents(tmp_path / "data", manifest)]
    assert sorted(found) == sorted(expected) and all(ids.count(BOS) == 1 for ids in found)
    assert manifest.bos_ids == (BOS,)


def test_one_token_that_ends_a_document_and_begins_the_next_stands_once(tmp_path: Path) -> None:
    file = saved(tmp_path / "tokenizer", "one for both")
    manifest = run_tasks(
        config(write_records(tmp_path / "a.jsonl", [{"text": "a model"}] * 9), file, held_out=0), tmp_path
    )
    entry = manifest.train[0]
    tokens = np.fromfile(tmp_path / entry.file, entry.dtype, entry.tokens, offset=entry.offset).tolist()
    assert tokens.count(0) == 9 and tokens[-1] == 0 and manifest.bos_ids == (0,)


def test_a_prompt_gets_the_tokens_before_it_once() -> None:
    tokenizer = add_post_processor(make_byte_tokenizer("the model of"), "bert")
    plain = tokenizer.encode("a b", add_special_tokens=False).ids
    assert encode_prompt(tokenizer, "a b", (BOS,)) == [BOS, *plain] == encode_prompt(tokenizer, "<s>a b", (BOS,))
    assert encode_prompt(tokenizer, "a b", ()) == plain and encode_prompt(tokenizer, "", (BOS,)) == [BOS]

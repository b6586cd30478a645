"""Tests of `data.chat_template`: the built-in templates, custom templates, and dialogues longer than a sample.

The marked parts of a rendered template count in the loss, and MASK_LEARNED is set for their tokens.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from data_prep.documents import Document, RejectedError
from data_prep.records import DialogueReader, build_chat_json
from data_prep.tokenizer import load_encoder
from pipeline.base.errors import UserError
from pipeline.base.files import write_json
from pipeline.config.datasets import CHAT_TEMPLATES, DataConfig
from pipeline.config.read import load_config
from pipeline.data import chat_template
from pipeline.data.chat_template import ChatTemplate, load_template, split_marks
from pipeline.data.manifest import MASK_LEARNED
from tests.data_prep.test_records import (
    CHATML,
    LENGTH,
    make_data_config,
    make_dialogue,
    read_shard_documents,
    sample_words,
    save_tokenizer_with_template,
    write_lines,
)
from tests.data_prep.test_shards import build_shards
from tests.support.errors import raises_error
from tests.support.tokenizers import add_post_processor, make_byte_tokenizer, save_tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL_TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
ROLE_HEADERS = {role: f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("system", "user", "assistant")}
DATE_LINES = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
CHATML_TURNS = "<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\n«A1<|im_end|>»\n<|im_start|>user\nQ2<|im_end|>\n"
CHATML_TURNS += "<|im_start|>assistant\n«A2<|im_end|>»\n"
LLAMA_TURNS = (
    f"{ROLE_HEADERS['user']}Q1<|eot_id|>{ROLE_HEADERS['assistant']}«A1<|eot_id|>»{ROLE_HEADERS['user']}Q2<|eot_id|>"
)
LLAMA_TURNS += f"{ROLE_HEADERS['assistant']}«A2<|eot_id|>»"
CHATML_SYSTEM = "<|im_start|>system\n{}<|im_end|>\n"
EMPTY_THINKING = "<think>\n\n</think>\n\n"
EXPECTED_TEXTS: dict[str, tuple[str, str]] = {
    "chatml": (CHATML_TURNS, CHATML_SYSTEM.format("S") + CHATML_TURNS),
    "qwen2": (
        CHATML_SYSTEM.format("You are a helpful assistant.") + CHATML_TURNS,
        CHATML_SYSTEM.format("S") + CHATML_TURNS,
    ),
    "qwen2.5": (
        CHATML_SYSTEM.format("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.") + CHATML_TURNS,
        CHATML_SYSTEM.format("S") + CHATML_TURNS,
    ),
    "smollm2": (
        CHATML_SYSTEM.format("You are a helpful AI assistant named SmolLM, trained by Hugging Face") + CHATML_TURNS,
        CHATML_SYSTEM.format("S") + CHATML_TURNS,
    ),
    "qwen3": (
        CHATML_TURNS.replace("«", f"«{EMPTY_THINKING}"),
        CHATML_SYSTEM.format("S") + CHATML_TURNS.replace("«", f"«{EMPTY_THINKING}"),
    ),
    "llama3": (f"<s>{LLAMA_TURNS}", f"<s>{ROLE_HEADERS['system']}S<|eot_id|>{LLAMA_TURNS}"),
    "llama3.1": (
        f"<s>{ROLE_HEADERS['system']}{DATE_LINES}<|eot_id|>{LLAMA_TURNS}",
        f"<s>{ROLE_HEADERS['system']}{DATE_LINES}S<|eot_id|>{LLAMA_TURNS}",
    ),
    "llama2": (
        "<s>[INST] Q1 [/INST]« A1 </s>»<s>[INST] Q2 [/INST]« A2 </s>»",
        "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nQ1 [/INST]« A1 </s>»<s>[INST] Q2 [/INST]« A2 </s>»",
    ),
    "mistral-v0.1": (
        "<s> [INST] Q1 [/INST]« A1</s>» [INST] Q2 [/INST]« A2</s>»",
        "<s> [INST] S\n\nQ1 [/INST]« A1</s>» [INST] Q2 [/INST]« A2</s>»",
    ),
    "mistral-v0.3": (
        "<s>[INST] Q1[/INST]« A1</s>»[INST] Q2[/INST]« A2</s>»",
        "<s>[INST] S\n\nQ1[/INST]« A1</s>»[INST] Q2[/INST]« A2</s>»",
    ),
}
"""For each template, the text of `make_two_questions` without and with a system message.

« and » enclose the parts that count in the loss.
"""
QWEN3_ORIGINAL = (
    "{%- set ns = namespace(last_query=0) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' and loop.index0 > ns.last_query %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{{- message.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""Qwen3's original template for answers without thinking. Only the last answer gets an empty thinking block."""


def make_two_questions(has_system: bool) -> list[dict[str, str]]:
    """Return a dialogue of two questions and answers, with or without a system message."""
    messages = [("system", "S")] if has_system else []
    messages += [("user", "Q1"), ("assistant", "A1"), ("user", "Q2"), ("assistant", "A2")]
    return [{"role": role, "content": text} for role, text in messages]


def load_builtin(name: str) -> ChatTemplate:
    """Return a built-in chat template."""
    return ChatTemplate(load_template(Path(name)), TOKENS)


def test_every_named_template_is_included() -> None:
    folder = Path(chat_template.__file__).parent / "chat_templates"
    assert {path.name for path in folder.iterdir()} == {f"{name}.jinja" for name in CHAT_TEMPLATES} and CHAT_TEMPLATES
    assert set(EXPECTED_TEXTS) == set(CHAT_TEMPLATES)


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_a_builtin_template_writes_and_marks_the_expected_text(name: str) -> None:
    template = load_builtin(name)
    for has_system, expected in zip((False, True), EXPECTED_TEXTS[name], strict=True):
        messages = make_two_questions(has_system)
        text, spans = split_marks(template.render(messages))
        assert text == expected.replace("«", "").replace("»", "")
        assert [text[start:end] for start, end in spans] == [part.split("»")[0] for part in expected.split("«")[1:]]
        answer_numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        for (start, _), number in zip(spans, answer_numbers, strict=True):
            prompt = split_marks(template.render(messages[:number], add_generation_prompt=True))[0]
            assert prompt == text[:start], "a marked part does not begin at the end of the prompt for generation"


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_tokens_and_masks_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    tokenizer = save_tokenizer_with_template(tmp_path / "tokenizer")
    hf_tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), **TOKENS)
    hf_tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS})
    hf_tokenizer.save_pretrained(tokenizer.parent)
    hf_tokenizer.chat_template = load_template(Path(name))
    reader = DialogueReader(json.loads(build_chat_json(tokenizer, "<|im_end|>", name)))
    encoder = load_encoder(tokenizer, "<|im_end|>")
    generator = random.Random(7)
    for _ in range(40):
        messages = make_dialogue(generator)
        text, spans = reader.read_dialogue({"messages": messages})
        (record,) = encoder.encode_records([Document(1, text, None, spans)], chat=True)
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        encoded = hf_tokenizer.apply_chat_template(messages, **options)
        assert record.tokens.tolist() == encoded["input_ids"]
        assert [bool(value & MASK_LEARNED) for value in record.mask] == list(map(bool, encoded["assistant_masks"]))


def test_qwen3_template_keeps_the_thinking_of_each_answer() -> None:
    messages = make_two_questions(has_system=False)
    messages[1]["content"] = "<think>\nfirst\n\n</think>\n\nA1"
    text, spans = split_marks(load_builtin("qwen3").render(messages))
    assert [text[start:end] for start, end in spans] == [
        "<think>\nfirst\n</think>\n\nA1<|im_end|>",
        f"{EMPTY_THINKING}A2<|im_end|>",
    ]
    # with a single answer, the text is that of the original template
    original_template = ChatTemplate(QWEN3_ORIGINAL, TOKENS)
    last_turn = messages[2:]
    assert original_template.render(last_turn) == split_marks(load_builtin("qwen3").render(last_turn))[0]


def test_data_chat_template_replaces_an_unusable_template_of_the_tokenizer(tmp_path: Path) -> None:
    generator = random.Random(3)
    lines = [{"messages": [*make_dialogue(generator), *make_two_questions(has_system=False)]} for _ in range(40)]
    source = write_lines(tmp_path / "a.jsonl", lines)
    tokenizer = save_tokenizer_with_template(tmp_path / "tokenizer", QWEN3_ORIGINAL)
    with raises_error("data.no_documents", "a.jsonl line 1", "data.chat_template", "qwen3"):
        build_shards(make_data_config(source, "messages", tokenizer), tmp_path / "custom")
    with pytest.raises(RejectedError, match=r"data\.chat_template"):
        reader = DialogueReader(json.loads(build_chat_json(tokenizer, "<|im_end|>")))
        reader.read_dialogue({"messages": make_two_questions(has_system=False)})
    manifests = {}
    for name in ("qwen3", "chatml", str(tmp_path / "custom.jinja")):
        (tmp_path / "custom.jinja").write_text(CHATML)
        data = make_data_config(source, "messages", tokenizer, chat_template=Path(name), held_out=0.0, max_rejected=0.0)
        manifests[name] = build_shards(data, tmp_path / Path(name).stem)
        assert manifests[name].documents == 40
        assert manifests[name].rejected_documents == 0
    assert len({manifest.key for manifest in manifests.values()}) == 3
    data_dir = tmp_path / "custom"  # the loop ended with this template, so `data` is its config
    (data_dir / "manifest.json").unlink()
    (tmp_path / "custom.jinja").write_text(CHATML.replace("'user'", "'user', 'tool'"))
    new_key = build_shards(data, data_dir).key
    assert new_key != manifests[str(tmp_path / "custom.jinja")].key, "the text of the template does not affect the key"


def test_data_chat_template_is_a_built_in_name_or_a_path_relative_to_the_config(tmp_path: Path) -> None:
    (tmp_path / "custom.jinja").write_text(CHATML)
    tokenizer = save_tokenizer_with_template(tmp_path / "tokenizer")
    values: dict[str, Any] = {"run": {"name": "x"}, "train": {"steps": 1}}

    def load_with(**data: Any) -> DataConfig:
        tokenizer_config = {"kind": "file", "path": str(tokenizer), "eos_token": "<|im_end|>"}
        values["data"] = {"source": "a.jsonl", "records": "messages", "tokenizer": tokenizer_config, **data}
        (tmp_path / "x.yaml").write_text(yaml.safe_dump(values))
        return load_config(tmp_path / "x.yaml").data

    assert load_with(chat_template="custom.jinja").chat_template == tmp_path / "custom.jinja"
    assert load_with(chat_template="qwen3").chat_template == Path("qwen3")
    assert load_with(chat_template="./qwen3").chat_template == tmp_path / "qwen3"
    with raises_error("data.no_chat_template", "data.chat_template", "/qwen9", "chatml, llama2"):
        build_chat_json(tokenizer, "<|im_end|>", str(load_with(chat_template="qwen9").chat_template))
    (tmp_path / "custom.jinja").write_text("{% for %}")
    with raises_error("data.invalid_chat_template", "data.chat_template", tmp_path / "custom.jinja"):
        build_chat_json(tokenizer, "<|im_end|>", str(tmp_path / "custom.jinja"))
    with pytest.raises(UserError, match="chat_template"):
        load_with(records="prompts", chat_template="qwen3")
    with pytest.raises(UserError, match="long_documents"):
        load_with(records="text", long_documents="drop")


@pytest.mark.parametrize("name", ["llama2", "llama3", "mistral-v0.1", "mistral-v0.3"])
def test_special_tokens_of_a_template_come_from_the_post_processor_or_from_special_tokens_map(
    tmp_path: Path, name: str
) -> None:
    tokenizer = save_tokenizer(tmp_path, add_post_processor(make_byte_tokenizer(), "llama 3"))
    tokenizer_without_processor = save_tokenizer(tmp_path / "plain", make_byte_tokenizer())
    expected = ChatTemplate(load_template(Path(name)), {"bos_token": "<s>", "eos_token": "</s>"}).render(
        make_two_questions(has_system=False)
    )

    def render_questions(file: Path) -> str:
        reader = DialogueReader(json.loads(build_chat_json(file, "</s>", name)))
        text, _ = reader.read_dialogue({"messages": make_two_questions(has_system=False)})
        return text

    assert render_questions(tokenizer) == split_marks(expected)[0], "the tokens of the post-processor are not used"
    mapping = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": "<|pad|>"}
    write_json(tokenizer_without_processor.with_name("special_tokens_map.json"), mapping)
    assert render_questions(tokenizer_without_processor) == split_marks(expected)[0], "the mapping is not used"
    chat = json.loads(build_chat_json(tokenizer_without_processor, "</s>", name))
    assert "pad_token" not in chat["tokens"]
    assert json.loads(build_chat_json(tokenizer_without_processor, "</s>", "chatml"))["tokens"] == {}
    tokenizer_without_processor.with_name("special_tokens_map.json").unlink()
    with raises_error("data.no_bos_token", "tokenizer_config.json", "bos_token"):
        build_chat_json(tokenizer_without_processor, "</s>", name)


def test_a_special_token_that_a_template_does_not_need_may_be_undefined(tmp_path: Path) -> None:
    for number, template in enumerate(("{% if bos_token %}{{ bos_token }}{% endif %}x", "{# bos_token #}x")):
        tokenizer = save_tokenizer(tmp_path / str(number), make_byte_tokenizer(), template)
        assert json.loads(build_chat_json(tokenizer, "</s>"))["tokens"] == {}
    tokenizer_without_bos = save_tokenizer(tmp_path / "none", make_byte_tokenizer(), "{{ bos_token }}x", bos_token=None)
    # As in transformers, `bos_token: null` means that the tokenizer has no such token.
    assert json.loads(build_chat_json(tokenizer_without_bos, "</s>"))["tokens"] == {}


# -- dialogues longer than a sample --------------------------------------------------------------------------


@pytest.mark.parametrize("records", ["messages", "prompts"])
def test_long_dialogues_are_cut_truncated_or_dropped_and_counted(tmp_path: Path, records: str) -> None:
    generator = random.Random(4)
    descriptions = []
    if records == "messages":
        lines: list[Any] = [{"messages": make_dialogue(generator)} for _ in range(60)]
        lines.append({"messages": [{"role": "user", "content": "x" * 200}, {"role": "assistant", "content": "never"}]})
    else:
        lines = [
            {"prompt": sample_words(generator, 9) + "\n", "response": sample_words(generator, 60)} for _ in range(60)
        ]
        lines.append({"prompt": "x" * 200, "response": "never"})
    source = write_lines(tmp_path / "a.jsonl", lines)
    tokenizer = save_tokenizer_with_template(tmp_path / "tokenizer")
    documents = {}
    for mode in ("cut", "truncate", "drop"):
        data = make_data_config(source, records, tokenizer, long_documents=mode, held_out=0.0)
        manifest = build_shards(data, tmp_path / mode)
        documents[mode] = read_shard_documents(tmp_path / mode, manifest)
        descriptions.append(str(manifest))
        assert len(documents[mode]) == manifest.documents
    all_documents = documents["cut"]
    long_count = sum(len(ids) > LENGTH for ids, _ in all_documents)
    assert 5 < long_count < 55 and len(all_documents) == 61
    assert documents["drop"] == [(ids, in_loss) for ids, in_loss in all_documents if len(ids) <= LENGTH]
    truncated_documents = [(ids[:LENGTH], in_loss[:LENGTH]) for ids, in_loss in all_documents]
    for ids, in_loss in truncated_documents:
        while len(ids) == LENGTH and ids[-1] == manifest.eos_id and not in_loss[-1]:
            ids.pop()  # `read_shard_documents` takes an end-of-text token outside of the loss for padding
            in_loss.pop()
    assert documents["truncate"] == [(ids, in_loss) for ids, in_loss in truncated_documents if any(in_loss)]
    assert len(documents["truncate"]) < 61, "the last document, of which only the prompt remains, was not removed"
    for mode, description in zip(documents, descriptions, strict=True):
        assert f"{long_count} longer" in description
        assert f"data.long_documents: {mode}" in description
    with raises_error("data.all_too_long", "data.long_documents: drop", "sequence_length (4)"):
        data = make_data_config(source, records, tokenizer, long_documents="drop", sequence_length=4)
        build_shards(data, tmp_path / "none")


@pytest.mark.parametrize("mode", ["truncate", "drop"])
def test_long_dialogues_that_are_left_out_do_not_count_as_rejected(tmp_path: Path, mode: str) -> None:
    long_line = {"prompt": "x" * 200, "response": "never"}
    lines = [{"prompt": "is\n", "response": "four"}] * 4 + [long_line] * 40 + [{"prompt": "no response"}] * 5
    source = write_lines(tmp_path / "a.jsonl", lines)
    tokenizer = save_tokenizer_with_template(tmp_path / "tokenizer")
    data = make_data_config(source, "prompts", tokenizer, long_documents=mode, held_out=0.0)
    assert build_shards(data, tmp_path / mode).documents == 4  # 5 rejected lines of 49 are allowed


def test_train_bytes_exclude_the_text_that_truncation_removes(tmp_path: Path) -> None:
    """Bits per byte need the number of bytes that count in the loss."""
    line = {"prompt": "is", "response": "é" * 200}
    source = write_lines(tmp_path / "a.jsonl", [line] * 3)
    tokenizer = save_tokenizer_with_template(tmp_path / "tokenizer")
    data = make_data_config(source, "prompts", tokenizer, long_documents="truncate", held_out=0.0)
    manifest = build_shards(data, tmp_path / "data")
    hf_tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
    offsets = hf_tokenizer("is" + "é" * 200, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert len(offsets) > LENGTH and manifest.long_documents == 3
    answer_characters = offsets[LENGTH - 1][1] - len("is")
    assert manifest.train_bytes == 3 * 2 * answer_characters  # three documents; "é" has two bytes

"""Tests that prompts and dialogues have the tokens and masks of transformers, and that malformed lines are rejected.

A token with MASK_LEARNED counts in the loss.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from data_prep.documents import RejectedError
from data_prep.records import DialogueReader, build_chat_json
from data_prep.shard_writer import ShardWriter
from data_prep.tokenizer import train_bpe
from pipeline.base.errors import UserError
from pipeline.base.files import write_json
from pipeline.config.datasets import DataConfig, TokenizerConfig
from pipeline.data.manifest import MASK_DOCUMENT_START, MASK_LEARNED, Manifest
from tests.data_prep.test_shards import build_shards, read_all_files, small_units
from tests.support.errors import raises_error

__all__ = ["small_units"]
WORDS = ["what", "is", "two and two", "éü", "漢字", "four", "\n", "😀", "why?", "because", "{}", "  ", "user"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% elif message.role in ('user', 'system') %}{{ message.content + '<|im_end|>' }}\n"
    "{% else %}{{ raise_exception('no role ' + message.role) }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_WITHOUT_MARKS = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
LENGTH = 64
"""Tokens of a sample."""


def save_tokenizer_with_template(path: Path, template: Any = CHATML, in_file: bool = False) -> Path:
    """Write a tokenizer and a chat template to a new folder, and return the path of `tokenizer.json`.

    The template is in `chat_template.jinja` if `in_file` is True, and otherwise in `tokenizer_config.json`.
    """
    path.mkdir()
    content = json.loads(train_bpe([" ".join(WORDS) * 3], 300, "<|im_end|>"))
    start_token = {**content["added_tokens"][0], "id": len(content["model"]["vocab"]), "content": "<|im_start|>"}
    content["added_tokens"].append(start_token)
    write_json(path / "tokenizer.json", content)
    settings: dict[str, Any] = {"eos_token": {"content": "<|im_end|>"}, "bos_token": None}
    if in_file:
        (path / "chat_template.jinja").write_text(template)
        settings["chat_template"] = "a template that the file chat_template.jinja replaces"
    else:
        settings["chat_template"] = template
    write_json(path / "tokenizer_config.json", settings)
    return path / "tokenizer.json"


def make_data_config(source: Path, records: Any, tokenizer: Path | None = None, **fields: Any) -> DataConfig:
    """Return a data config for records, with a small BPE or a given tokenizer."""
    tokenizer_config = TokenizerConfig(vocab_size=300)
    if tokenizer is not None:
        tokenizer_config = TokenizerConfig(kind="file", path=tokenizer, eos_token="<|im_end|>")
    values = {"shard_tokens": 2048, "held_out": 0.2, "sequence_length": LENGTH, **fields}
    return DataConfig(source=str(source), records=records, tokenizer=tokenizer_config, **values)


def sample_words(generator: random.Random, max_words: int) -> str:
    """Return 1 to `max_words` random words."""
    return " ".join(generator.choice(WORDS) for _ in range(generator.randint(1, max_words)))


def make_dialogue(generator: random.Random) -> list[dict[str, str]]:
    """Return a random dialogue of one to three questions and answers, in some cases with a system message."""
    messages = [{"role": "system", "content": sample_words(generator, 3)}] if generator.random() < 0.3 else []
    for _ in range(generator.randint(1, 3)):
        messages.append({"role": "user", "content": sample_words(generator, 6)})
        messages.append({"role": "assistant", "content": sample_words(generator, 6)})
    return messages


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    """Write JSON Lines, and return the path."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_shard_documents(data_dir: Path, manifest: Manifest) -> list[tuple[list[int], list[bool]]]:
    """Return the tokens and the loss mask of each document of a data folder, without padding.

    Also check the layout of the shards: each has whole samples and one more token, the last target.
    """
    documents: list[tuple[list[int], list[bool]]] = []
    for entry in (*manifest.train, *manifest.held_out):
        assert entry.mask_offset is not None and entry.tokens % LENGTH == 1
        tokens, mask = (
            np.fromfile(data_dir / entry.file, array.dtype, entry.tokens, offset=array.offset)
            for array in (entry.arrays["tokens"], entry.arrays["mask"])
        )
        starts = np.flatnonzero(mask & MASK_DOCUMENT_START).tolist()
        assert len(starts) == entry.documents and not (mask[starts] & MASK_LEARNED).any()
        for start, next_start in zip(starts, [*starts[1:], entry.tokens], strict=True):
            end = next_start
            while not mask[end - 1] & (MASK_LEARNED | MASK_DOCUMENT_START) and tokens[end - 1] == manifest.eos_id:
                end -= 1  # padding
            documents.append((tokens[start:end].tolist(), (mask[start:end] & MASK_LEARNED).astype(bool).tolist()))
    return documents


@pytest.mark.parametrize("in_file", [False, True], ids=["template in config", "template in file"])
def test_tokens_and_masks_of_dialogues_equal_those_of_transformers(tmp_path: Path, in_file: bool) -> None:
    generator = random.Random(1)
    dialogues = [make_dialogue(generator) for _ in range(60)]
    source = write_lines(tmp_path / "a.jsonl", [{"messages": messages} for messages in dialogues])
    tokenizer = save_tokenizer_with_template(tmp_path / "marked", CHATML, in_file)
    unmarked_tokenizer = save_tokenizer_with_template(tmp_path / "unmarked", CHATML_WITHOUT_MARKS, in_file)
    hf_tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), chat_template=CHATML)
    expected = []
    for messages in dialogues:
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        encoded = hf_tokenizer.apply_chat_template(messages, **options)
        expected.append((encoded["input_ids"], [bool(value) for value in encoded["assistant_masks"]]))
    manifest = build_shards(make_data_config(source, "messages", tokenizer), tmp_path / "with marks")
    assert sorted(read_shard_documents(tmp_path / "with marks", manifest)) == sorted(expected)
    manifest = build_shards(make_data_config(source, "messages", unmarked_tokenizer), tmp_path / "without marks")
    # Without {% generation %} marks, the newline after an answer also counts in the loss.
    expected_without_marks = [
        (ids, [current or previous for current, previous in zip(mask, [False, *mask], strict=False)])
        for ids, mask in expected
    ]
    assert sorted(read_shard_documents(tmp_path / "without marks", manifest)) == sorted(expected_without_marks)


def test_any_number_of_tasks_writes_the_prompts_and_responses_to_the_same_bytes(
    tmp_path: Path, small_units: None
) -> None:
    generator = random.Random(2)
    lines = [{"prompt": sample_words(generator, 9) + "\n", "response": sample_words(generator, 30)} for _ in range(120)]
    data = make_data_config(write_lines(tmp_path / "a.jsonl", lines), "prompts")
    manifests = {tasks: build_shards(data, tmp_path / f"{tasks}", tasks) for tasks in (1, 3)}
    assert read_all_files(tmp_path / "1") == read_all_files(tmp_path / "3")
    manifest = manifests[1]
    assert len(list((tmp_path / "1" / "shards").glob("unit-*.json"))) > 2
    hf_tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "1" / "tokenizer.json"))
    expected = []
    for line in lines:
        encoded = hf_tokenizer(line["prompt"] + line["response"], return_offsets_mapping=True, add_special_tokens=False)
        prompt_end = len(line["prompt"])
        # The first token of a document is never predicted, so it does not count in the loss.
        in_loss = [index > 0 and end > prompt_end for index, (_, end) in enumerate(encoded["offset_mapping"])]
        expected.append(([*encoded["input_ids"], manifest.eos_id], [*in_loss, True]))
    assert sorted(read_shard_documents(tmp_path / "1", manifest)) == sorted(expected)
    assert manifest.train_bytes + manifest.held_out_bytes == sum(len(line["response"].encode()) for line in lines)


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    window=st.integers(1, 16),
    more_tokens=st.integers(1, 60),
)
def test_documents_that_fit_into_a_window_are_not_split(
    lengths: list[int], window: int, more_tokens: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Write documents of these lengths to shards of at most `window + more_tokens` tokens.

    A window is the part of a shard that becomes one sample. Token 7 is padding, and token 100 + i is document i.
    """
    folder = tmp_path_factory.mktemp("windows")
    (folder / "shards").mkdir()
    writer = ShardWriter(folder, "unit", window + more_tokens, "uint16", {}, window, 7)
    for number, length in enumerate(lengths):
        mask = np.full(length, MASK_LEARNED, np.uint8)
        mask[0] = MASK_DOCUMENT_START
        writer.add(np.full(length, 100 + number, np.uint16), length, mask)
    written_tokens: list[int] = []
    for entry in writer.close():
        tokens = np.fromfile(folder / entry.file, "<u2", entry.tokens, offset=entry.offset)
        mask = np.fromfile(folder / entry.file, np.uint8, entry.tokens, offset=entry.mask_offset or 0)
        assert entry.tokens <= window + more_tokens and entry.tokens % window == 1 % window
        assert tokens[-1] == 7 and mask[-1] == 0
        assert not mask[tokens == 7].any() and (mask[tokens != 7] > 0).all()
        for number in set(tokens[tokens != 7].tolist()):
            positions = np.flatnonzero(tokens == number)
            if lengths[number - 100] <= window:
                assert positions[0] // window == positions[-1] // window
            elif mask[positions[0]] & MASK_DOCUMENT_START:
                assert positions[0] % window == 0, "a document longer than a window does not start at a window"
        written_tokens += tokens[tokens != 7].tolist()
    assert written_tokens == [100 + number for number, length in enumerate(lengths) for _ in range(length)]


def read_expected_text(line: bytes, records: str) -> str | None:
    """Return the text of a line by a simple implementation; None if the line must be rejected."""
    try:
        value = json.loads(line.strip(b" \t\r\n").decode())
        if records == "prompts":
            parts = [value["prompt"], value["response"]]
            assert all(isinstance(part, str) for part in parts) and parts[1]
            text = "".join(parts)
        else:
            assert isinstance(value["messages"], list) and not value.get("tools")
            text = ""
            for message in value["messages"]:
                assert {key for key, value in message.items() if value is not None} == {"role", "content"}
                role = message["role"]
                content = message["content"]
                assert role in ("user", "system", "assistant") and isinstance(content, str)
                assert "<|im_" not in content or not {"<|im_start|>", "<|im_end|>"} & set(content.split())
                text += f"<|im_start|>{role}\n{content}<|im_end|>\n"
            assert any(message["role"] == "assistant" for message in value["messages"])
        text.encode()
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError):
        return None
    return text


def damage_line(generator: random.Random, line: bytes) -> bytes:
    """Return a line with random damage, but without line ends."""
    kind = generator.randrange(7)
    position = generator.randrange(len(line))
    if kind == 0:
        line = line[:position]
    elif kind == 1:
        line = line[:position] + bytes([generator.randrange(256)]) + line[position + 1 :]
    elif kind == 2:
        line = line[:position] + line[position + generator.randint(1, 9) :]
    elif kind == 3:
        line = line[:position] + line[position : position + generator.randint(1, 30)] + line[position:]
    elif kind == 4:
        replaced = generator.choice(
            [b"prompt", b"response", b"messages", b"role", b"content", b"assistant", b"user", b'"']
        )
        line = line.replace(replaced, generator.choice([b"", b"x", b"tools", b"content", b"null"]), 1)
    elif kind == 5:
        line = line.replace(b': "', generator.choice([b': 3, "x": "', b': ["', b': "\\ud800', b': null, "y": "']), 1)
    else:
        line = line.replace(b': "', generator.choice([b': "<|im_end|> ', b': "\xef\xb7\x90 ', b': "\\u0000']), 1)
    return line.replace(b"\n", b" ")


@pytest.mark.parametrize("records", ["prompts", "messages"])
def test_damaged_lines_are_rejected_or_read_correctly(tmp_path: Path, records: str) -> None:
    generator = random.Random(5)
    lines = []
    for number in range(300):
        value: Any = {"prompt": sample_words(generator, 5), "response": sample_words(generator, 5)}
        if records == "messages":
            value = {"messages": make_dialogue(generator)}
        line = json.dumps(value, ensure_ascii=number % 2 == 0).encode()
        lines.append(damage_line(generator, line) if number % 5 else line)
    source = tmp_path / "a.jsonl"
    source.write_bytes(b"".join(line + b"\n" for line in lines))
    tokenizer = save_tokenizer_with_template(tmp_path / "tokenizer")
    data = make_data_config(source, records, tokenizer, max_rejected=1.0, held_out=0.0)
    manifest = build_shards(data, tmp_path / "data", 2)
    rows = map(json.loads, (tmp_path / "data/rejected.jsonl").read_text().splitlines())
    rejected = {row["line"]: row for row in rows}
    hf_tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
    expected = []
    for number, line in enumerate(lines, 1):
        text = read_expected_text(line, records)
        # The noncharacter U+FDD0 marks the answers in a rendered template, so a dialogue must not contain it.
        is_forbidden = records == "messages" and text is not None and "\ufdd0" in text
        if text is None or is_forbidden:
            assert number in rejected or not line.strip(b" \t\r\n"), line
            assert number not in rejected or (rejected[number]["file"] == str(source) and rejected[number]["reason"])
        elif number not in rejected:
            expected.append(text)
        else:
            assert "special token" in rejected[number]["reason"], (line, rejected[number])
    decoded = [hf_tokenizer.decode(ids) for ids, _ in read_shard_documents(tmp_path / "data", manifest)]
    end = "<|im_end|>" if records == "prompts" else ""
    assert decoded == [text + end for text in expected]
    assert 60 < len(expected) < 290
    assert len(rejected) > 60


def test_a_dialogue_is_rejected_if_the_template_changes_earlier_text_or_is_unsafe() -> None:
    two_turns = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]
    last_turn_template = "{% for m in messages[-2:] %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    thinking_template = (
        "{% for m in messages %}{{ m.role }}: {% if loop.last and m.role == 'assistant' %}<think>{% endif %}"
        "{{ m.content }}\n{% endfor %}"
    )
    for template in (last_turn_template, thinking_template):
        dialogues = DialogueReader({"template": template, "tokens": {}, "special": []})
        assert dialogues.read_dialogue({"messages": two_turns[:2]})[1]
        with pytest.raises(RejectedError, match=r"data\.chat_template"):
            dialogues.read_dialogue({"messages": two_turns})
    template_without_answers = "{% generation %}{% endgeneration %}{{ messages[0].content }}"
    for template, expected_text in (
        (template_without_answers, "assistant"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ):
        dialogues = DialogueReader({"template": template, "tokens": {}, "special": []})
        with pytest.raises(RejectedError, match=expected_text):
            dialogues.read_dialogue({"messages": two_turns})


def test_a_missing_or_invalid_chat_template_is_an_error(tmp_path: Path) -> None:
    invalid = save_tokenizer_with_template(tmp_path / "invalid", "{% for %}")
    with raises_error("data.invalid_chat_template", tmp_path / "invalid/tokenizer_config.json"):
        build_chat_json(invalid, "<|im_end|>")
    for name, template in (("none", None), ("number", 3)):
        tokenizer = save_tokenizer_with_template(tmp_path / name, template)
        with raises_error("data.no_chat_template", tmp_path / name / "chat_template.jinja", "data.chat_template"):
            build_chat_json(tokenizer, "<|im_end|>")


def test_the_chat_template_named_default_is_used_if_there_are_several(tmp_path: Path) -> None:
    templates = [{"name": "tools", "template": "{% x"}, {"name": "default", "template": "a"}]
    tokenizer = save_tokenizer_with_template(tmp_path / "named", templates)
    assert json.loads(build_chat_json(tokenizer, "<|im_end|>"))["template"] == "a"


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_tokenizer_file_that_links_out_of_its_folder_is_an_error(tmp_path: Path, name: str) -> None:
    tokenizer = save_tokenizer_with_template(tmp_path / "open", in_file=True)
    (tmp_path / "open" / name).rename(tmp_path / "secret")
    (tmp_path / "open" / name).symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=name) as caught:
        build_chat_json(tokenizer, "<|im_end|>")
    assert f"{tmp_path}/open" in str(caught.value)


def test_sources_and_configs_that_do_not_fit_data_records_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with raises_error("data.no_files", ".jsonl", "a.txt: text\n", "data.records: prompts"):
        build_shards(make_data_config(tmp_path / "a.txt", "prompts"), tmp_path / "data")
    source = write_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    with raises_error("data.no_documents", "a.jsonl line 1", "'prompt'", "'text'", "data.records"):
        build_shards(make_data_config(source, "prompts"), tmp_path / "data")
    with pytest.raises(ValueError, match="chat template"):
        make_data_config(source, "messages")
    with pytest.raises(ValueError, match="4096"):
        make_data_config(source, "prompts", sequence_length=4096)


def test_a_changed_chat_template_prepares_the_data_again(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"messages": make_dialogue(random.Random(3))} for _ in range(30)])
    tokenizer = save_tokenizer_with_template(tmp_path / "tokenizer", in_file=True)
    data = make_data_config(source, "messages", tokenizer, held_out=0.0)
    before = build_shards(data, tmp_path / "data")
    (tmp_path / "data" / "manifest.json").unlink()
    tokenizer.with_name("chat_template.jinja").write_text(CHATML.replace("'user'", "'user', 'tool'"))
    after = build_shards(data, tmp_path / "data")
    assert after.key != before.key

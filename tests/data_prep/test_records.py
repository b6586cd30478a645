"""Prompts and dialogues to shards: what transformers makes of them, whole in their windows, odd lines refused."""

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
from data_prep.records import Dialogues, build_chat_json
from data_prep.shard_writer import ShardWriter
from data_prep.tokenizer import train_bpe
from pipeline.base.errors import UserError
from pipeline.base.files import write_json
from pipeline.config.datasets import DataConfig, TokenizerConfig
from pipeline.data.manifest import MASK_DOCUMENT_START, MASK_LEARNED, Manifest
from tests.data_prep.test_shards import all_bytes, run_tasks, small_units

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
PLAIN = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
LENGTH = 64


def folder_of(path: Path, template: Any = CHATML, in_file: bool = False) -> Path:
    """The `tokenizer.json` of a folder with a chat template."""
    path.mkdir()
    content = json.loads(train_bpe([" ".join(WORDS) * 3], 300, "<|im_end|>"))
    start = {**content["added_tokens"][0], "id": len(content["model"]["vocab"]), "content": "<|im_start|>"}
    content["added_tokens"].append(start)
    write_json(path / "tokenizer.json", content)
    settings: dict[str, Any] = {"eos_token": {"content": "<|im_end|>"}, "bos_token": None}
    if in_file:
        (path / "chat_template.jinja").write_text(template)
        settings["chat_template"] = "not this one"
    else:
        settings["chat_template"] = template
    write_json(path / "tokenizer_config.json", settings)
    return path / "tokenizer.json"


def config(source: Path, records: Any, tokenizer: Path | None = None, **more: Any) -> DataConfig:
    given = TokenizerConfig(vocab_size=300)
    if tokenizer is not None:
        given = TokenizerConfig(kind="file", path=tokenizer, eos_token="<|im_end|>")
    values = {"shard_tokens": 2048, "held_out": 0.2, "sequence_length": LENGTH, **more}
    return DataConfig(source=str(source), records=records, tokenizer=given, **values)


def words(draw: random.Random, most: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, most)))


def dialogue(draw: random.Random) -> list[dict[str, str]]:
    """A dialogue that may begin with a system's message and have several answers, or end with a question."""
    messages = [{"role": "system", "content": words(draw, 3)}] if draw.random() < 0.3 else []
    for _ in range(draw.randint(1, 3)):
        messages.append({"role": "user", "content": words(draw, 6)})
        messages.append({"role": "assistant", "content": words(draw, 6)})
    return messages


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def documents_in(data_dir: Path, manifest: Manifest) -> list[tuple[list[int], list[bool]]]:
    """All documents of a data folder with what is learned of each; checks on the way how they lie."""
    found: list[tuple[list[int], list[bool]]] = []
    for entry in (*manifest.train, *manifest.held_out):
        assert entry.mask_offset is not None and entry.tokens % LENGTH == 1
        tokens, mask = (
            np.fromfile(data_dir / entry.file, array.dtype, entry.tokens, offset=array.offset)
            for array in (entry.arrays["tokens"], entry.arrays["mask"])
        )
        starts = np.flatnonzero(mask & MASK_DOCUMENT_START).tolist()
        assert len(starts) == entry.documents and not mask[starts].__and__(MASK_LEARNED).any()
        for start, after in zip(starts, [*starts[1:], entry.tokens], strict=True):
            end = after
            while not mask[end - 1] & (MASK_LEARNED | MASK_DOCUMENT_START) and tokens[end - 1] == manifest.eos_id:
                end -= 1  # filled up
            found.append((tokens[start:end].tolist(), (mask[start:end] & MASK_LEARNED).astype(bool).tolist()))
    return found


@pytest.mark.parametrize("in_file", [False, True])
def test_dialogues_are_those_of_transformers(tmp_path: Path, in_file: bool) -> None:
    draw = random.Random(1)
    lines = [dialogue(draw) for _ in range(60)]
    source = write_lines(tmp_path / "a.jsonl", [{"messages": messages} for messages in lines])
    marked, plain = (folder_of(tmp_path / name, text, in_file) for name, text in (("marked", CHATML), ("plain", PLAIN)))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(marked), chat_template=CHATML)
    expected = []
    for messages in lines:
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        made = theirs.apply_chat_template(messages, **options)
        ids, learned = made["input_ids"], [bool(one) for one in made["assistant_masks"]]
        expected.append((ids, learned))
    for tokenizer, name in ((marked, "of marks"), (plain, "of prefixes")):
        manifest = run_tasks(config(source, "messages", tokenizer), tmp_path / name)
        found, wanted = documents_in(tmp_path / name, manifest), expected
        if tokenizer == plain:  # the line's end behind an answer is learned with it
            wanted = [(ids, [a or b for a, b in zip(one, [False, *one], strict=False)]) for ids, one in expected]
        assert sorted(found) == sorted(wanted)


def test_any_number_of_tasks_writes_the_same_bytes(tmp_path: Path, small_units: None) -> None:
    draw = random.Random(2)
    lines = [{"prompt": words(draw, 9) + "\n", "response": words(draw, 30)} for _ in range(120)]
    data = config(write_lines(tmp_path / "a.jsonl", lines), "prompts")
    manifests = {tasks: run_tasks(data, tmp_path / f"{tasks}", tasks) for tasks in (1, 3)}
    assert all_bytes(tmp_path / "1") == all_bytes(tmp_path / "3")
    manifest = manifests[1]
    assert len(list((tmp_path / "1" / "shards").glob("unit-*.json"))) > 2
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "1" / "tokenizer.json"))
    expected = []
    for line in lines:
        made = theirs(line["prompt"] + line["response"], return_offsets_mapping=True, add_special_tokens=False)
        border = len(line["prompt"])
        learned = [place > 0 and end > border for place, (_, end) in enumerate(made["offset_mapping"])]
        expected.append(([*made["input_ids"], manifest.eos_id], [*learned, True]))
    assert sorted(documents_in(tmp_path / "1", manifest)) == sorted(expected)
    assert manifest.train_bytes + manifest.held_out_bytes == sum(len(line["response"].encode()) for line in lines)


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    window=st.integers(1, 16),
    more=st.integers(1, 60),
)
def test_documents_lie_whole_in_windows(
    sizes: list[int], window: int, more: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("windows")
    (folder / "shards").mkdir()
    writer = ShardWriter(folder, "unit", window + more, "uint16", {}, window, 7)
    for number, size in enumerate(sizes):
        mask = np.full(size, MASK_LEARNED, np.uint8)
        mask[0] = MASK_DOCUMENT_START
        writer.add(np.full(size, 100 + number, np.uint16), size, mask)
    seen: list[int] = []
    for entry in writer.close():
        tokens = np.fromfile(folder / entry.file, "<u2", entry.tokens, offset=entry.offset)
        mask = np.fromfile(folder / entry.file, np.uint8, entry.tokens, offset=entry.mask_offset or 0)
        assert entry.tokens <= window + more and entry.tokens % window == 1 % window
        assert tokens[-1] == 7 and mask[-1] == 0
        assert not mask[tokens == 7].any() and (mask[tokens != 7] > 0).all()
        for number in set(tokens[tokens != 7].tolist()):
            places = np.flatnonzero(tokens == number)
            if sizes[number - 100] <= window:
                assert places[0] // window == places[-1] // window, "a document is cut that need not be"
            elif mask[places[0]] & MASK_DOCUMENT_START:
                assert places[0] % window == 0
        seen += tokens[tokens != 7].tolist()
    assert seen == [100 + number for number, size in enumerate(sizes) for _ in range(size)]


def expected_text(line: bytes, records: str) -> str | None:
    """What a line's text is, by the plainest reading; None where it is to be refused. Raises no error."""
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
                assert {key for key, one in message.items() if one is not None} == {"role", "content"}
                role, content = message["role"], message["content"]
                assert role in ("user", "system", "assistant") and isinstance(content, str)
                assert "<|im_" not in content or not {"<|im_start|>", "<|im_end|>"} & set(content.split())
                text += f"<|im_start|>{role}\n{content}<|im_end|>\n"
            assert any(message["role"] == "assistant" for message in value["messages"])
        text.encode()
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError):
        return None
    return text


def mutated(draw: random.Random, line: bytes) -> bytes:
    """A line with some damage; never with another line's end."""
    kind, place = draw.randrange(7), draw.randrange(len(line))
    if kind == 0:
        line = line[:place]
    elif kind == 1:
        line = line[:place] + bytes([draw.randrange(256)]) + line[place + 1 :]
    elif kind == 2:
        line = line[:place] + line[place + draw.randint(1, 9) :]
    elif kind == 3:
        line = line[:place] + line[place : place + draw.randint(1, 30)] + line[place:]
    elif kind == 4:
        old = draw.choice([b"prompt", b"response", b"messages", b"role", b"content", b"assistant", b"user", b'"'])
        line = line.replace(old, draw.choice([b"", b"x", b"tools", b"content", b"null"]), 1)
    elif kind == 5:
        line = line.replace(b': "', draw.choice([b': 3, "x": "', b': ["', b': "\\ud800', b': null, "y": "']), 1)
    else:
        line = line.replace(b': "', draw.choice([b': "<|im_end|> ', b': "\xef\xb7\x90 ', b': "\\u0000']), 1)
    return line.replace(b"\n", b" ")


@pytest.mark.parametrize("records", ["prompts", "messages"])
def test_mutated_lines_are_refused_or_read_right(tmp_path: Path, records: str) -> None:
    draw = random.Random(5)
    lines = []
    for number in range(300):
        value: Any = {"prompt": words(draw, 5), "response": words(draw, 5)}
        if records == "messages":
            value = {"messages": dialogue(draw)}
        line = json.dumps(value, ensure_ascii=number % 2 == 0).encode()
        lines.append(mutated(draw, line) if number % 5 else line)
    source = tmp_path / "a.jsonl"
    source.write_bytes(b"".join(line + b"\n" for line in lines))
    tokenizer = folder_of(tmp_path / "tokenizer")
    manifest = run_tasks(config(source, records, tokenizer, max_rejected=1.0, held_out=0.0), tmp_path / "data", 2)
    told = {row["line"]: row for row in map(json.loads, (tmp_path / "data/rejected.jsonl").read_text().splitlines())}
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
    expected = []
    for number, line in enumerate(lines, 1):
        text = expected_text(line, records)
        forbidden = records == "messages" and text is not None and "\ufdd0" in text
        if text is None or forbidden:
            assert number in told or not line.strip(b" \t\r\n"), line
            assert number not in told or (told[number]["file"] == str(source) and told[number]["reason"])
        elif number not in told:
            expected.append(text)
        else:
            assert "special token" in told[number]["reason"], (line, told[number])
    found = [theirs.decode(ids) for ids, _ in documents_in(tmp_path / "data", manifest)]
    end = "<|im_end|>" if records == "prompts" else ""
    assert found == [text + end for text in expected]
    assert 60 < len(expected) < 290 and len(told) > 60


def test_what_a_template_cannot_tell_is_refused_in_words(tmp_path: Path) -> None:
    two = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]
    forgetful = "{% for m in messages[-2:] %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    thinking = (
        "{% for m in messages %}{{ m.role }}: {% if loop.last and m.role == 'assistant' %}<think>{% endif %}"
        "{{ m.content }}\n{% endfor %}"
    )
    for template in (forgetful, thinking):
        dialogues = Dialogues({"template": template, "tokens": {}, "special": []})
        assert dialogues.read({"messages": two[:2]})[1]
        with pytest.raises(
            RejectedError, match=r"message \d, or what leads to it, otherwise where more follow.*generation"
        ):
            dialogues.read({"messages": two})
    silent = "{% generation %}{% endgeneration %}{{ messages[0].content }}"
    for template, match in (
        (silent, "nothing to learn"),
        ("{{ messages.append(1) }}", "does not take it.*"),
        ("{{ ''.__class__.__mro__ }}", "does not take it.*unsafe"),
    ):
        with pytest.raises(RejectedError, match=match):
            Dialogues({"template": template, "tokens": {}, "special": []}).read({"messages": two})
    cases: tuple[tuple[str, Any, str], ...] = (
        ("broken", "{% for %}", r"broken/tokenizer_config.json: no chat template that can be used"),
        ("none", None, r"needs a chat template: there is no .*none/chat_template.jinja, nor one in"),
        ("odd", 3, "needs a chat template"),
    )
    for name, given_one, match in cases:
        with pytest.raises(UserError, match=match):
            build_chat_json(folder_of(tmp_path / name, given_one), "<|im_end|>")
    named = folder_of(tmp_path / "named", [{"name": "tools", "template": "{% x"}, {"name": "default", "template": "a"}])
    assert json.loads(build_chat_json(named, "<|im_end|>"))["template"] == "a"


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_is_no_link_out_of_the_folder(tmp_path: Path, name: str) -> None:
    tokenizer = folder_of(tmp_path / "open", in_file=True)
    (tmp_path / "open" / name).rename(tmp_path / "secret")
    (tmp_path / "open" / name).symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=f"{name} is a link that leads out of {tmp_path}/open"):
        build_chat_json(tokenizer, "<|im_end|>")


def test_files_and_tokenizers_that_hold_no_records_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"(?s)name \.jsonl.*a\.txt: text\ndata\.records: prompts is read from objects"):
        run_tasks(config(tmp_path / "a.txt", "prompts"), tmp_path / "data")
    source = write_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    with pytest.raises(UserError, match=r"a.jsonl line 1: no field 'prompt'; there are 'text'. Mend .* data.records"):
        run_tasks(config(source, "prompts"), tmp_path / "data")
    with pytest.raises(ValueError, match="needs a tokenizer with a chat template"):
        config(source, "messages")
    with pytest.raises(ValueError, match="no room for a sample of 4096"):
        config(source, "prompts", sequence_length=4096)


def test_a_template_that_changed_is_prepared_again(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"messages": dialogue(random.Random(3))} for _ in range(30)])
    tokenizer = folder_of(tmp_path / "tokenizer", in_file=True)
    data = config(source, "messages", tokenizer, held_out=0.0)
    before = run_tasks(data, tmp_path / "data")
    (tmp_path / "data" / "manifest.json").unlink()
    tokenizer.with_name("chat_template.jinja").write_text(CHATML.replace("'user'", "'user', 'tool'"))
    after = run_tasks(data, tmp_path / "data")
    assert after.key != before.key

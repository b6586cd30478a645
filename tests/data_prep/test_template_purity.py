"""Tests that chat templates render a dialogue to the same text in every process.

A template whose text could differ between processes is an error. The time and memory of a template are limited.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from data_prep.documents import RejectedError
from data_prep.records import DialogueReader, build_chat_json
from pipeline.data import chat_template
from pipeline.data.chat_template import ChatTemplate, ChatTemplateError, UnusableTemplateError
from pipeline.data.chat_template_worker import MAX_CHARACTERS
from pipeline.run.worker import WorkerPool
from tests.data_prep.test_records import (
    CHATML,
    CHATML_WITHOUT_MARKS,
    make_data_config,
    save_tokenizer_with_template,
    write_lines,
)
from tests.data_prep.test_shards import build_shards
from tests.support.errors import raises_error

MESSAGES = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
UNSTABLE_TEMPLATES = [  # the text depends on the time, random numbers, memory addresses or the order of a set
    "{{ ['a', 'b'] | random }}",
    "{% if messages | length > 99 %}{{ ['a', 'b'] | random }}{% endif %}",
    "{{ lipsum() }}",
    "{{ strftime_now('%d %b %Y') }}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ strftime_now('%Y') }}{% endif %}{% endfor %}",
    "{{ messages | pprint }}",
    "{{ messages[0].content.upper }}",
    "{{ 'x' ~ messages[0].items }}",
    "{{ 'x'.format }}",
    "{{ '' | attr('upper') }}",
    "{{ dict.fromkeys }}",
    "{{ range }}",
    "{{ [range] | join }}",
    "{{ namespace(a=range) }}",
    "{{ raise_exception | string }}",
    "{{ '%s' | format(raise_exception) }}",
    "{{ '{0.upper}'.format('a') }}",
    "{{ '{:>20}'.format(range) }}",
    "{{ cycler('a', 'b') }}",
    "{{ joiner(', ') }}",
    "{{ messages | map(attribute='role') }}",
    "{{ [messages | map(attribute='role')] }}",
    "{{ messages | selectattr('role') }}",
    "{{ messages | reverse }}",
    "{{ messages[0] | items }}",
    "{{ messages | batch(1) }}",
    "{% for m in messages %}{{ loop.cycle }}{% endfor %}",
    "{% block b %}{% endblock %}{{ self.b }}",
    "{% set keys = messages[0].keys() - ['x'] %}{% for key in keys %}{{ key }}{% endfor %}",
    "{{ (messages[0].items() - messages[1].items()) | list }}",
]


@pytest.mark.parametrize("source", UNSTABLE_TEMPLATES)
def test_a_template_whose_text_may_differ_between_processes_is_an_error(tmp_path: Path, source: str) -> None:
    with pytest.raises(UnusableTemplateError):
        ChatTemplate(source, {}).render(MESSAGES)
    tokenizer = save_tokenizer_with_template(tmp_path / "tokenizer", source)
    with raises_error("data.invalid_chat_template", tokenizer.with_name("tokenizer_config.json")):
        build_chat_json(tokenizer, "<|im_end|>")
    # data that an older version prepared may have such a template
    with raises_error("data.invalid_chat_template", "data.records"):
        DialogueReader({"template": source, "tokens": {}, "special": []}).read_dialogue({"messages": MESSAGES})


def test_the_error_of_a_template_names_the_function_or_filter(tmp_path: Path) -> None:
    tokenizer_with_function = save_tokenizer_with_template(tmp_path / "a", "{{ strftime_now('%Y') }}")
    with raises_error("data.invalid_chat_template", "strftime_now", "data.chat_template"):
        build_chat_json(tokenizer_with_function, "<|im_end|>")
    tokenizer_with_filter = save_tokenizer_with_template(tmp_path / "b", "\n{{ [1] | random }}")
    with raises_error("data.invalid_chat_template", "line 2", "random", "data.chat_template"):
        build_chat_json(tokenizer_with_filter, "<|im_end|>")
    source = write_lines(tmp_path / "a.jsonl", [{"messages": MESSAGES}] * 50)
    tokenizer = save_tokenizer_with_template(tmp_path / "c", "{{ messages[0].content }}{{ ['a', 'b'] | random }}")
    with raises_error("data.invalid_chat_template", "random"):
        build_shards(make_data_config(source, "messages", tokenizer), tmp_path / "data")
    assert not (tmp_path / "data/manifest.json").exists()


STABLE_TEMPLATES = {  # templates, and the text to which they render MESSAGES
    "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}2024{% endif %}": "2024",
    "{{ messages | map(attribute='role') | map('upper') | join(' ') }}": "USER ASSISTANT",
    "{{ (messages | selectattr('role', 'equalto', 'assistant') | list)[0].content }}": "Because.",
    "{% for m in messages | reverse %}{{ loop.cycle('a', 'b') }}{{ m.role[0] }}{{ loop.length }}{% endfor %}": "aa2bu2",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.current }}": "aba",
    "{% set j = joiner('; ') %}{% for m in messages %}{{ j() }}{{ m.role }}{% endfor %}": "user; assistant",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 2 %}{% endfor %}{{ ns.n - 1 }}": "3",
    "{% for key, value in messages[0].items() %}{{ key }}={{ value }};{% endfor %}": "role=user;content=Why?;",
    "{% for key, value in messages[0] | items %}{{ key }}={{ value }};{% endfor %}": "role=user;content=Why?;",
    "{{ '%s and {}' % 'a' }}{{ '{} {x}'.format('b', x=1) }}": "a and {}b 1",
    "{{ messages[0].content.strip('?').split('h') }}": "['W', 'y']",
    "{{ messages[0] }}{{ messages[0].keys() | list }}": "{'role': 'user', 'content': 'Why?'}['role', 'content']",
    "{{ messages | groupby('role') | map(attribute='grouper') | list }}": "['assistant', 'user']",
    "{% macro m(x) %}<{{ x }}{{ caller() }}>{% endmacro %}{% call m(1) %}!{% endcall %}": "<1!>",
    "{% block b %}x{% endblock %}{{ self.b() }}": "xx",
    "{{ range is callable }}{{ 'a'.upper is callable }}{{ messages | map('list') is iterable }}": "TrueTrueTrue",
    "{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}": "02",
}


@pytest.mark.parametrize("source", STABLE_TEMPLATES)
def test_a_template_with_stable_text_renders_as_in_transformers(tmp_path: Path, source: str) -> None:
    assert ChatTemplate(source, {}).render(MESSAGES) == STABLE_TEMPLATES[source]
    if "strftime_now" not in source:
        file = save_tokenizer_with_template(tmp_path / "tokenizer")
        hf_tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
        text = hf_tokenizer.apply_chat_template(MESSAGES, chat_template=source, tokenize=False)
        assert text == STABLE_TEMPLATES[source]


def test_the_reason_to_reject_a_dialogue_is_the_same_in_every_process() -> None:
    program = (
        "from pipeline.data.chat_template import ChatTemplate, ChatTemplateError\n"
        "for source in ('{{ messages | map(1) | list }}', '{{ messages[0].x.y }}', '{{ range + 1 }}'):\n"
        "    try: ChatTemplate(source, {}).render([{'role': 'user', 'content': 'x'}])\n"
        "    except ChatTemplateError as error: print(type(error).__name__, error)\n"
    )
    outputs = set()
    for seed in ("1", "2"):
        process = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )  # fmt: skip
        assert process.returncode == 0, process.stderr
        assert process.stdout.count("ChatTemplateError") == 3, process.stderr
        outputs.add(process.stdout)
    assert len(outputs) == 1
    assert "0x" not in outputs.pop(), "a message contains a memory address"


@pytest.mark.parametrize(
    ("source", "exceeded_limit"),
    [
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}"
         "{% endfor %}", "1 s of processor time"),
        ("{% for a in range(9999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}", "processor time"),
        ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", "processor"),
        ("{{ (10 ** 9999) ** 9999 }}", "processor time"),
        ("{% if 0 %}{{ (10 ** 9999) ** 9999 }}{% endif %}", "processor time"),  # during compilation
        ("{{ 'x' * 10 ** 12 }}", "memory"),
        ("{{ 'x' | center(9999999999) | length }}", "memory"),
        ("{% set ns = namespace(x='xxxxxxxxxx') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
         "memory|processor time"),
        ("{{ ('x' * 999999).replace('', 'x' * 999999) | length }}", "memory"),
    ],
)  # fmt: skip
def test_time_and_memory_of_a_template_are_limited(
    monkeypatch: pytest.MonkeyPatch, source: str, exceeded_limit: str
) -> None:
    """A template that exceeds a limit is an error, and the dialogue is not merely rejected.

    Otherwise, the speed of the machine could decide which dialogues are used.
    """
    renderer = WorkerPool("pipeline.data.chat_template_worker", 1, chat_template._MAX_MEMORY)
    monkeypatch.setattr(chat_template, "_RENDERER", renderer)
    with pytest.raises(UnusableTemplateError, match=exceeded_limit):
        ChatTemplate(source, {}).render(MESSAGES)
    text = ChatTemplate("{{ messages[0].content }}", {}).render(MESSAGES)
    assert text == "Why?", "a new worker did not render the next dialogue"
    renderer.close()


def test_a_dialogue_whose_text_is_too_long_is_rejected() -> None:
    reader = DialogueReader({"template": CHATML, "tokens": {}, "special": []})
    length = MAX_CHARACTERS - len(reader.read_dialogue({"messages": MESSAGES})[0]) - 100
    text, _ = reader.read_dialogue({"messages": [*MESSAGES, {"role": "user", "content": "x" * length}]})
    assert len(text) > length
    with pytest.raises(RejectedError, match=f"{MAX_CHARACTERS:,}"):
        reader.read_dialogue({"messages": [*MESSAGES, {"role": "user", "content": "x" * (length + 200)}]})
    with pytest.raises(ChatTemplateError, match=f"{MAX_CHARACTERS:,}"):
        ChatTemplate("{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}", {}).render(
            [{"role": "user", "content": "x" * 9999}]
        )


@pytest.mark.parametrize("max_characters", [1, 1 << 20])
def test_dialogues_do_not_depend_on_the_size_of_requests_to_the_worker(
    monkeypatch: pytest.MonkeyPatch, max_characters: int
) -> None:
    monkeypatch.setattr(chat_template, "_MAX_CHARACTERS_PER_REQUEST", max_characters)
    messages = [
        {"role": message["role"], "content": f"{message['content']} {number}"}
        for number in range(20)
        for message in MESSAGES
    ]
    reader = DialogueReader({"template": CHATML, "tokens": {}, "special": []})
    unmarked_reader = DialogueReader({"template": CHATML_WITHOUT_MARKS, "tokens": {}, "special": []})
    text, spans = reader.read_dialogue({"messages": messages})
    unmarked_text, unmarked_spans = unmarked_reader.read_dialogue({"messages": messages})
    assert text == unmarked_text
    assert len(spans) == 20
    # Without {% generation %} marks, the newline after an answer also counts in the loss.
    assert [(start, end + 1) for start, end in spans] == list(unmarked_spans)


def test_a_dialogue_with_a_lone_surrogate_is_rejected() -> None:
    assert json.loads('"\\ud83d\\ude00"') == "😀"  # a pair of surrogates in JSON is one character
    with pytest.raises(ChatTemplateError, match="surrogate"):
        ChatTemplate("{{ '\ud83d' }}", {}).render(MESSAGES)

"""Tests of `generate`: greedy decoding equals that of transformers, and samples follow the requested distribution."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.tokenizer import train_bpe
from pipeline.base.errors import make_printable
from pipeline.base.files import write_json
from pipeline.data.chat_template import load_template
from pipeline.publish.generate import _load_folder, _load_run, choose_token, generate_text, generate_tokens
from pipeline.run.code import CODE_ROOT
from tests.publish.test_export import export_initial_weights
from tests.publish.test_open_weights import FAMILIES, save_random_model
from tests.support.errors import raises_error
from tests.support.tiny import WORDS, make_run
from tests.support.tokenizers import add_post_processor, get_token_id, make_byte_tokenizer, save_tokenizer

GREEDY_OPTIONS: dict[str, Any] = {"step": None, "temperature": 0.0, "top_p": 1.0, "seed": 1}
PROMPT = "the model of the"


def save_model(folder: Path, family: str, **config_values: Any) -> Any:
    """Save a transformers model with random weights and a trained tokenizer in `folder`, and return the model."""
    model = save_random_model(folder, family, vocab_size=300, **{**FAMILIES[family], **config_values})
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter *= 5  # otherwise the model repeats one token
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(train_bpe([" ".join(WORDS)], 280, "<|end|>"))
    return model.eval()


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 12}),
        ("mistral", {"sliding_window": 2}),  # shorter than the prompt
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
        ("qwen3", {}),
    ],
)
def test_greedy_decoding_equals_transformers_and_stops_at_an_end_token(
    tmp_path: Path, family: str, values: dict[str, Any]
) -> None:
    hf_model = save_model(tmp_path, family, **values)
    write_json(tmp_path / "generation_config.json", {})
    write_json(tmp_path / "config.json", hf_model.config.to_dict() | {"eos_token_id": None})
    model, tokenizer, end_ids, ids = _load_folder(tmp_path, PROMPT, None, 40)
    assert len(ids) > 3 and end_ids == [None]  # `eos_token_id` in config.json is null
    forward_lengths: list[int] = []
    model.model.register_forward_pre_hook(lambda _, inputs: forward_lengths.append(inputs[0].shape[1]))
    new_ids = generate_tokens(model, ids, 40, end_ids, lambda logits: int(logits.argmax()))
    expected = hf_model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert [*ids, *new_ids] == expected[0].tolist() and len(set(new_ids)) > 5
    assert forward_lengths == [len(ids)] + [1] * 39, "earlier tokens were computed again"
    # Generation stops after an end token.
    end_id = new_ids[7]
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [299, end_id]})
    text = generate_text(tmp_path, PROMPT, max_tokens=40, **GREEDY_OPTIONS)
    assert text == tokenizer.decode([*ids, *new_ids[: new_ids.index(end_id) + 1]])


def test_a_run_and_its_export_generate_the_same_text(tmp_path: Path) -> None:
    data = make_run(tmp_path, "data").data_dir
    folder, _ = export_initial_weights(tmp_path, data, "run", "model.initializer_range=0.2", "model.rope_theta=500.0")
    run = tmp_path / "runs/run"
    text = generate_text(run, PROMPT, max_tokens=12, **GREEDY_OPTIONS)
    assert text.startswith(PROMPT) and len(text) > len(PROMPT)
    assert generate_text(folder, PROMPT, max_tokens=12, **GREEDY_OPTIONS) == text
    samples = {
        seed: generate_text(run, PROMPT, max_tokens=12, **{**GREEDY_OPTIONS, "temperature": 1.0, "seed": seed})
        for seed in (1, 2)
    }
    assert samples[1] != samples[2] and text not in samples.values()
    assert generate_text(run, PROMPT, max_tokens=12, **{**GREEDY_OPTIONS, "temperature": 1.0}) == samples[1]
    command = [sys.executable, str(CODE_ROOT / "submit.py"), "generate", "runs/run", PROMPT]
    command += ["--max-tokens", "12", "--seed", "2", "--step", "1"]
    command += ["--greedy"]  # takes precedence over --seed
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, make_printable(text) + "\n"), result.stderr


@pytest.mark.parametrize("kind", ["llama 3", "mistral", "begin and end", "qwen"])
def test_generate_from_a_model_folder_adds_the_same_special_tokens_as_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    hf_model = save_model(tmp_path, "llama")
    tokenizer = add_post_processor(make_byte_tokenizer(" ".join(WORDS), 280), kind)
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(3)
    save_tokenizer(tmp_path, tokenizer, eos_token="<|end|>")
    ids = AutoTokenizer.from_pretrained(tmp_path)(PROMPT).input_ids
    assert tokenizer.id_to_token(ids[0]) == ("<s>" if kind != "qwen" else "the")
    # `generate` adds only the tokens before the prompt, because an end token after it would end the text.
    ids = ids[:-1] if kind == "begin and end" else ids
    expected = hf_model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    for prompt in (PROMPT, f"<s>{PROMPT}"):
        model, _, _, prompt_ids = _load_folder(tmp_path, prompt, None, 12)
        if kind != "qwen" or prompt == PROMPT:  # "qwen" adds no <s>, so an <s> in the prompt changes its tokens
            assert prompt_ids == ids
            new_ids = generate_tokens(model, prompt_ids, 12, [], lambda logits: int(logits.argmax()))
            assert [*prompt_ids, *new_ids] == expected[0].tolist()


def test_generate_from_a_run_adds_the_special_tokens_with_which_its_documents_begin(tmp_path: Path) -> None:
    tokenizer = add_post_processor(make_byte_tokenizer(" ".join(WORDS), 280), "llama 3")
    file = save_tokenizer(tmp_path / "tokenizer", tokenizer)
    bos_id = get_token_id(tokenizer, "<s>")
    overrides = (f"data.tokenizer={{kind: file, path: {file}, eos_token: <|end|>}}", "model.initializer_range=0.2")
    for number, (setting, expected_bos_ids) in enumerate((("auto", [bos_id]), ("true", [bos_id]), ("false", []))):
        all_overrides = (*overrides, f"data.add_special_tokens={setting}")
        data = make_run(tmp_path, f"data{number}", all_overrides).data_dir
        folder, _ = export_initial_weights(tmp_path, data, f"run{number}", *all_overrides)
        tokens = np.fromfile(next((data / "shards").glob("*-train-*.h5")), "<u2")
        assert (bos_id in tokens.tolist()) is bool(expected_bos_ids)
        ids = _load_run(tmp_path / f"runs/run{number}", PROMPT, None, 12)[3]
        assert ids == [*expected_bos_ids, *tokenizer.encode(PROMPT, add_special_tokens=False).ids]
        if expected_bos_ids:
            text = generate_text(tmp_path / f"runs/run{number}", PROMPT, max_tokens=12, **GREEDY_OPTIONS)
            assert generate_text(folder, PROMPT, max_tokens=12, **GREEDY_OPTIONS) == text


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral-v0.1", "qwen3"])
@pytest.mark.parametrize("system", [None, "of when"])
def test_generate_with_chat_answers_a_message_like_transformers(tmp_path: Path, name: str, system: str | None) -> None:
    """The prompt equals that of `apply_chat_template`, and the answer equals that of `generate` in transformers."""
    from transformers import AutoTokenizer

    hf_model = save_model(tmp_path, "llama")
    tokenizer = add_post_processor(make_byte_tokenizer(" ".join(WORDS), 280), "llama 3")
    tokenizer.add_special_tokens(["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    template = load_template(Path(name))
    save_tokenizer(tmp_path, tokenizer, template, eos_token="</s>", bos_token="<s>")
    messages = [{"role": role, "content": text} for role, text in (("system", system), ("user", PROMPT)) if text]
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    expected = hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    _, _, end_ids, ids = _load_folder(tmp_path, messages, None, 12)
    assert ids == expected
    end_of_turn = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "mistral-v0.1": "</s>", "qwen3": "<|im_end|>"}[name]
    assert end_ids[-1] == tokenizer.token_to_id(end_of_turn)
    answer_ids = hf_model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)[
        0, len(ids) :
    ]
    options: dict[str, Any] = {"max_tokens": 12, **GREEDY_OPTIONS, "chat": True, "system": system}
    assert generate_text(tmp_path, PROMPT, **options) == hf_tokenizer.decode(answer_ids, skip_special_tokens=True)


def test_an_answer_ends_with_the_end_of_turn_token_of_the_template(tmp_path: Path) -> None:
    """Only the chat template names the token. Neither the token nor the user's message is printed."""
    hf_model = save_model(tmp_path, "llama")
    tokenizer = make_byte_tokenizer(" ".join(WORDS), 280)
    template = load_template(Path("mistral-v0.1"))
    file = save_tokenizer(tmp_path, tokenizer, template, eos_token="</s>", bos_token="<s>")
    messages = [{"role": "user", "content": PROMPT}]
    ids = _load_folder(tmp_path, messages, None, 12)[3]
    generated = hf_model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    new_ids = generated[0, len(ids) :]
    # Let a generated token that did not occur before be the eos token, which the template writes after an answer.
    stop = next(index for index in range(3, 12) if new_ids[index] not in new_ids[:index])
    content = json.loads(file.read_text())
    eos_token = str(tokenizer.id_to_token(int(new_ids[stop])))
    content["added_tokens"].append({**content["added_tokens"][0], "id": int(new_ids[stop]), "content": eos_token})
    write_json(file, content)
    tokenizer_config = {"chat_template": template, "eos_token": eos_token, "bos_token": "<s>"}
    write_json(tmp_path / "tokenizer_config.json", tokenizer_config)
    assert _load_folder(tmp_path, messages, None, 12)[3] == ids
    answer = generate_text(tmp_path, PROMPT, max_tokens=12, chat=True, **GREEDY_OPTIONS)
    assert answer == tokenizer.decode(new_ids[:stop].tolist())
    command = [sys.executable, str(CODE_ROOT / "submit.py"), "generate", str(tmp_path), PROMPT]
    result = subprocess.run([*command, "--chat", "--greedy", "--max-tokens", "12"], capture_output=True, timeout=120)
    assert (result.returncode, result.stdout.decode()) == (0, make_printable(answer) + "\n"), result.stderr


def test_chat_without_a_usable_template_is_an_error(tmp_path: Path) -> None:
    save_model(tmp_path / "none", "llama")
    run = make_run(tmp_path, "text")
    for target, name in ((tmp_path / "none", "none"), (run.path, "text")):
        with raises_error("data.no_chat_template", "--chat", name):
            generate_text(target, PROMPT, max_tokens=3, chat=True, **GREEDY_OPTIONS)
    with raises_error("cli.conflict", "--system", "--chat"):
        generate_text(tmp_path / "none", PROMPT, max_tokens=3, system="x", **GREEDY_OPTIONS)
    (tmp_path / "none/chat_template.jinja").write_text("{{ raise_exception('no user') }}")
    with raises_error("data.unusable_dialogue", "--chat", "no user"):
        generate_text(tmp_path / "none", PROMPT, max_tokens=3, chat=True, **GREEDY_OPTIONS)
    (tmp_path / "none/chat_template.jinja").write_text("{% for %}")
    with raises_error("data.invalid_chat_template", "--chat", tmp_path / "none"):
        generate_text(tmp_path / "none", PROMPT, max_tokens=3, chat=True, **GREEDY_OPTIONS)


def test_samples_follow_temperature_and_top_p() -> None:
    logits = torch.tensor([0.3, 0.2, 0.5]).log()
    generator = torch.Generator().manual_seed(0)
    for temperature, top_p, expected in (
        (1.0, 1.0, [0.3, 0.2, 0.5]),
        (1.0, 0.7, [0.375, 0, 0.625]),
        (0.5, 1.0, None),  # probabilities proportional to the squares
        (1e-320, 1.0, [0, 0, 1]),
    ):
        counts = Counter(choose_token(logits, temperature, top_p, generator) for _ in range(3000))
        probabilities = expected or (torch.tensor([0.09, 0.04, 0.25]) / 0.38).tolist()
        for token, share in enumerate(probabilities):
            assert counts[token] / 3000 == pytest.approx(share, abs=0.04) and (counts[token] > 0) == (share > 0)


def test_invalid_arguments_and_files_are_errors_that_name_them(tmp_path: Path) -> None:
    folder = tmp_path / "mistral"
    save_model(folder, "mistral")
    for change, code, expected_text in (
        ({"max_tokens": 0}, "cli.out_of_range", "--max-tokens 0"),
        ({"temperature": float("nan")}, "cli.out_of_range", "--temperature nan"),
        ({"temperature": -1.0}, "cli.out_of_range", "--temperature -1.0"),
        ({"top_p": 0.0}, "cli.out_of_range", "--top-p 0.0"),
        ({"seed": -1}, "cli.out_of_range", "--seed -1"),
        ({"step": "3"}, "cli.conflict", "--step"),
        ({"prompt": ""}, "model.prompt_out_of_range", "0 tokens"),
    ):
        with raises_error(code, expected_text):
            generate_text(folder, **{"prompt": PROMPT, "max_tokens": 5, **GREEDY_OPTIONS, **change})
    assert generate_text(folder, "a \udcff b", max_tokens=1, **GREEDY_OPTIONS).startswith("a ? b")
    (folder / "tokenizer.json").write_text("{}")
    with raises_error("data.invalid_tokenizer", "tokenizer.json"):
        generate_text(folder, PROMPT, max_tokens=5, **GREEDY_OPTIONS)
    with raises_error("run.not_a_run", tmp_path / "nothing"):
        generate_text(tmp_path / "nothing", PROMPT, max_tokens=5, **GREEDY_OPTIONS)

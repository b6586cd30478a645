"""Tests of the end-of-turn token of a chat template, which is exported and ends generated answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import nn

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.base.files import read_json, write_json
from pipeline.config.read import load_config
from pipeline.data.chat_template import ChatTemplate
from pipeline.data.special_tokens import find_end_of_turn
from pipeline.evaluate.evaluator import TaskFile
from pipeline.publish.export import export_checkpoint
from pipeline.publish.generate import _load_folder, _load_run, generate_text
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from tests.publish.test_export import export_initial_weights, save_initial_checkpoint
from tests.publish.test_open_weights import save_random_model
from tests.support.ranks import make_rank_info, run_ranks
from tests.support.tiny import WORDS, PassiveStopFlag, make_run, run_stage_on_rank
from tests.support.tokenizers import (
    add_post_processor,
    get_token_id,
    make_byte_tokenizer,
    save_tokenizer,
    write_records,
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
WITHOUT_END_TOKEN = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
# `{% generation %}` marks the text that has a loss: an answer without or with its end-of-turn token.
UNMARKED_END = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
MARKED_END = UNMARKED_END.replace("{% endgeneration %}<|im_end|>", "<|im_end|>{% endgeneration %}")
TOKENIZER = make_byte_tokenizer(" ".join(WORDS))
END_ID = get_token_id(TOKENIZER, "<|end|>")
SENTENCE_END_ID = get_token_id(TOKENIZER, "</s>")
IM_END_ID = get_token_id(TOKENIZER, "<|im_end|>")
BOS_ID = get_token_id(TOKENIZER, "<s>")
PAD_ID = get_token_id(TOKENIZER, "<|pad|>")
CONFIG = """\
run: {{name: chat, root: {root}}}
data: {{source: {source}, records: {records}, sequence_length: 64, shard_tokens: 4096, held_out: 0.2}}
model: {{init_from: {model}}}
train: {{steps: 2, global_batch: 2, micro_batch: 1}}
stages: {{train: {{tasks_per_node: 1}}}}
"""


@pytest.mark.parametrize(
    ("template", "end_ids", "problem"),
    [
        (CHATML, (IM_END_ID,), ""),
        (MARKED_END, (IM_END_ID,), ""),
        (UNMARKED_END, (IM_END_ID,), "<|im_end|>"),
        (MISTRAL, (SENTENCE_END_ID,), ""),
        (WITHOUT_END_TOKEN, (), r"'\n\n'"),
        (CHATML.replace("<|im_end|>", "<|stop|>"), (), "<|stop|>"),
        (CHATML.replace("<|im_end|>", ""), (), r"'\n'"),
        (
            MARKED_END.replace("<|im_end|>", "{{ '</s>' if loop.last else '<|im_end|>' }}"),
            (SENTENCE_END_ID, IM_END_ID),
            "",
        ),
        ("{{ raise_exception('no dialogue') }}", (), "no dialogue"),
        ("{{ messages[1].content | upper }}<|im_end|>", (), "unchanged"),
    ],
)
def test_end_of_turn_token_is_found_in_a_chat_template(template: str, end_ids: tuple[int, ...], problem: str) -> None:
    end_of_turn = find_end_of_turn(ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}), TOKENIZER)
    assert end_of_turn.ids == end_ids
    assert bool(end_of_turn.problem) is bool(problem) and problem in end_of_turn.problem


@pytest.mark.parametrize(("template", "is_in_loss"), [(MARKED_END, True), (UNMARKED_END, False)])
def test_end_of_turn_token_that_strips_following_spaces_is_in_the_loss_only_if_marked(
    template: str, is_in_loss: bool
) -> None:
    content = json.loads(TOKENIZER.to_str())
    for token in content["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_end|>"
    template = template.replace("\n{% endfor %}", "{{ '\n' }}{% endfor %}")  # Jinja drops a newline after a block.
    end_of_turn = find_end_of_turn(ChatTemplate(template, {}), Tokenizer.from_str(json.dumps(content)))
    assert end_of_turn.ids == (IM_END_ID,)
    assert (end_of_turn.problem == "") is is_in_loss


def make_chat_run(
    folder: Path,
    template: str,
    *overrides: str,
    records: str = "messages",
    post_processor: str = "mistral",
    config_end_ids: list[int] | None = None,
) -> Run:
    """Create a run that starts from a base model, prepare its data, and save its initial checkpoint.

    Args:
        folder: where the model, the data and the run are written.
        template: chat template of the model.
        overrides: overrides of config keys.
        records: `data.records`.
        post_processor: kind of the tokenizer's post-processor, as in `add_post_processor`.
        config_end_ids: end tokens in the model's config.json, instead of in its generation_config.json.
    """
    model = folder / "model"
    tokenizer = add_post_processor(make_byte_tokenizer(" ".join(WORDS)), post_processor)
    save_random_model(model, "qwen2", vocab_size=tokenizer.get_vocab_size(), eos_token_id=config_end_ids)
    save_tokenizer(model, tokenizer, template, eos_token="<|end|>", bos_token="<s>")
    write_json(model / "special_tokens_map.json", {"eos_token": {"content": "<|end|>", "lstrip": False}})
    end_ids = {} if config_end_ids else {"eos_token_id": [END_ID]}
    write_json(model / "generation_config.json", {**end_ids, "temperature": 0.6, "pad_token_id": PAD_ID})
    roles = ("user", "assistant")
    lines: list[Any] = [
        {"messages": [{"role": role, "content": f"{role} {number}"} for role in roles]} for number in range(40)
    ]
    if records == "prompts":
        lines = [{"prompt": f"the model {number} ", "response": "of the run"} for number in range(40)]
    source = write_records(folder / "lines.jsonl", lines)
    config = folder / "chat.yaml"
    config.write_text(CONFIG.format(root=folder / "runs", source=source, model=model, records=records))
    run = Run.create(load_config(config, overrides))
    for stage in ("prepare", "shard"):
        load_stage_module(run, stage).run_stage(run, make_rank_info(0, 1, 1), {}, PassiveStopFlag())
    run_ranks(1, save_initial_checkpoint, run.path)
    return run


def read_end_tokens(folder: Path) -> dict[str, Any]:
    """Return the end tokens in each file of an export. Check that transformers and `generate` use them."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = {name: read_json(folder / name)["eos_token_id"] for name in ("config.json", "generation_config.json")}
    expected = tokens["generation_config.json"]
    assert GenerationConfig.from_pretrained(folder).eos_token_id == expected
    assert _load_folder(folder, "the model", None, 3)[2] == (expected if isinstance(expected, list) else [expected])
    return {**tokens, "tokenizer": tokenizer.eos_token}


def test_end_of_turn_token_is_exported_with_a_base_model_tuned_on_dialogues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_chat_run(tmp_path, CHATML)
    assert "<|im_end|>" in capsys.readouterr().out
    message = export_checkpoint(run, tmp_path / "out", None, "fp32")
    assert "warning" not in message
    end_ids = [IM_END_ID, END_ID]
    assert read_end_tokens(tmp_path / "out") == {
        "config.json": end_ids,
        "generation_config.json": end_ids,
        "tokenizer": "<|im_end|>",
    }
    assert _load_run(run.path, "the model", None, 3)[2] == end_ids
    generation, config = (read_json(tmp_path / "out" / name) for name in ("generation_config.json", "config.json"))
    assert (generation["temperature"], generation["pad_token_id"]) == (0.6, PAD_ID)
    assert (config["bos_token_id"], config["pad_token_id"]) == (BOS_ID, PAD_ID)
    assert read_json(tmp_path / "out/special_tokens_map.json")["eos_token"] == "<|im_end|>"


def evaluate_with_fixed_answer(rank_info: RankInfo, path: Path) -> int:
    """Run the evaluate stage with a model that answers `a`, an end-of-turn token and then other text."""
    answer = get_token_id(TOKENIZER, "a")
    next_ids = {answer: IM_END_ID, IM_END_ID: get_token_id(TOKENIZER, "b")}

    def compute_logits(task: TaskFile, model: nn.Module, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        ids = torch.tensor([next_ids.get(row[-1], answer) for row in rows])
        vocab_size = 300  # larger than all token IDs
        return nn.functional.one_hot(ids, vocab_size)[:, None].expand(-1, max(map(len, rows)), -1)

    TaskFile._compute_logits = compute_logits  # type: ignore[assignment, method-assign]
    return run_stage_on_rank(rank_info, path, "evaluate")


def test_generated_answer_of_an_evaluation_task_stops_at_the_end_of_turn_token(tmp_path: Path) -> None:
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "<|im_start|>assistant\n", "answer": "a"}) + "\n")
    run = make_chat_run(tmp_path, CHATML, f"evaluate.tasks={tmp_path}/asked.jsonl", "evaluate.answer_tokens=4")
    assert run_ranks(1, evaluate_with_fixed_answer, run.path) == [ExitCode.DONE]
    assert json.loads(next(run.evaluation_dir.glob("*.json")).read_text())["asked.accuracy"] == 1


def test_eos_token_of_the_config_is_exported_before_the_end_tokens_of_the_base_model(tmp_path: Path) -> None:
    tokenizer_override = f"data.tokenizer={{kind: file, path: {tmp_path}/model/tokenizer.json, eos_token: </s>}}"
    run = make_chat_run(tmp_path, CHATML, tokenizer_override, config_end_ids=[END_ID, PAD_ID])
    export_checkpoint(run, tmp_path / "out", None, "fp32")
    end_ids = [SENTENCE_END_ID, IM_END_ID, END_ID, PAD_ID]
    assert read_end_tokens(tmp_path / "out") == {
        "config.json": end_ids,
        "generation_config.json": end_ids,
        "tokenizer": "</s>",
    }
    assert _load_run(run.path, "the model", None, 3)[2] == end_ids


def test_eos_token_of_the_config_does_not_replace_the_eos_token_that_the_template_writes(tmp_path: Path) -> None:
    tokenizer_override = f"data.tokenizer={{kind: file, path: {tmp_path}/model/tokenizer.json, eos_token: </s>}}"
    export_checkpoint(make_chat_run(tmp_path, MISTRAL, tokenizer_override), tmp_path / "out", None, "fp32")
    end_ids = [END_ID, SENTENCE_END_ID]
    assert read_end_tokens(tmp_path / "out") == {
        "config.json": end_ids,
        "generation_config.json": end_ids,
        "tokenizer": "<|end|>",
    }


def test_chat_template_of_the_config_is_exported_instead_of_that_of_the_base_model(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (template := tmp_path / "custom.jinja").write_text(CHATML)
    export_checkpoint(
        make_chat_run(tmp_path, MISTRAL, f"data.chat_template={template}"), tmp_path / "out", None, "fp32"
    )
    messages = [{"role": "user", "content": "a"}]
    text = AutoTokenizer.from_pretrained(tmp_path / "out").apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>user\na<|im_end|>\n"
    assert read_end_tokens(tmp_path / "out")["tokenizer"] == "<|im_end|>"
    assert "chat_template" not in read_json(tmp_path / "out/tokenizer_config.json"), "the old template was exported"


@pytest.mark.story
def test_run_and_its_export_generate_the_same_answer(tmp_path: Path) -> None:
    """The run and its export use the chat template of the config.

    If the run was trained on prompts, the config has no chat template. Both then use the template of the base model.
    """
    options: dict[str, Any] = {"step": None, "max_tokens": 6, "temperature": 0.0, "top_p": 1.0, "seed": 1, "chat": True}
    for records, override in (("messages", "data.chat_template=qwen3"), ("prompts", "data.records=prompts")):
        run = make_chat_run(tmp_path / records, CHATML, override, records=records)
        export_checkpoint(run, tmp_path / records / "out", None, "fp32")
        question = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
        _, tokenizer, run_end_ids, run_ids = _load_run(run.path, question, None, 6)
        _, _, export_end_ids, export_ids = _load_folder(tmp_path / records / "out", question, None, 6)
        assert run_ids == export_ids
        assert IM_END_ID in run_end_ids
        assert set(run_end_ids) == set(export_end_ids)
        assert tokenizer.decode(run_ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
        answers = [generate_text(path, "a", system="s", **options) for path in (run.path, tmp_path / records / "out")]
        assert answers[0] == answers[1]


def test_files_of_the_base_model_are_exported_unchanged_if_their_end_token_is_correct(tmp_path: Path) -> None:
    run = make_chat_run(tmp_path, MISTRAL)
    export_checkpoint(run, tmp_path / "out", None, "fp32")
    assert not (tmp_path / "out/chat_template.jinja").exists()  # The template is in tokenizer_config.json.
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "model" / name).read_bytes(), name
    assert read_json(tmp_path / "out/config.json")["eos_token_id"] == END_ID


@pytest.mark.parametrize(
    ("template", "text_after_answers"), [(WITHOUT_END_TOKEN, r"\n\n"), (UNMARKED_END, "<|im_end|>")]
)
def test_shard_and_export_warn_if_no_token_in_the_loss_ends_an_answer(
    tmp_path: Path, template: str, text_after_answers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_chat_run(tmp_path, template)
    for output in (capsys.readouterr().out, export_checkpoint(run, tmp_path / "out", None, "fp32")):
        [warning] = [line for line in output.splitlines() if line.startswith("warning")]
        assert text_after_answers in warning
        assert "chat template" in warning


def test_prompt_response_pairs_end_with_the_eos_token_of_the_config(tmp_path: Path) -> None:
    tokenizer_override = f"data.tokenizer={{kind: file, path: {tmp_path}/model/tokenizer.json, eos_token: </s>}}"
    run = make_chat_run(
        tmp_path, CHATML, tokenizer_override, "data.add_special_tokens=false", records="prompts", post_processor="bert"
    )
    lines = export_checkpoint(run, tmp_path / "out", None, "fp32").splitlines()
    # The run was trained without <s>. The tokenizer in transformers adds <s>, and also </s> after a prompt.
    assert any("<s>" in line and "add_special_tokens=False" in line for line in lines)
    assert any("</s>" in line for line in lines)
    end_ids = [SENTENCE_END_ID, END_ID]
    assert read_end_tokens(tmp_path / "out") == {
        "config.json": end_ids,
        "generation_config.json": end_ids,
        "tokenizer": "</s>",
    }


def test_tokenizer_file_of_the_config_is_exported_with_its_chat_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    run_with_dialogues = make_chat_run(tmp_path / "a", CHATML, "model.dropout=0")  # only its data is used
    tokenizer = save_tokenizer(
        tmp_path / "tokenizer",
        add_post_processor(TOKENIZER, "mistral"),
        CHATML,
        eos_token="<|end|>",
        pad_token="<|pad|>",
    )
    tokenizer_override = f"data.tokenizer={{kind: file, path: {tokenizer}, eos_token: <|end|>}}"
    overrides = (
        tokenizer_override,
        f"data.source={run_with_dialogues.config.data.sources[0]}",
        "data.records=messages",
    )
    data = make_run(tmp_path, "data", overrides).data_dir
    folder, _ = export_initial_weights(tmp_path, data, "run", *overrides)
    assert read_end_tokens(folder)["tokenizer"] == "<|im_end|>"
    hf_tokenizer = AutoTokenizer.from_pretrained(folder)
    config = read_json(folder / "config.json")
    assert hf_tokenizer.bos_token_id == config["bos_token_id"] == BOS_ID
    assert hf_tokenizer.pad_token_id == config["pad_token_id"] == PAD_ID
    text = hf_tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert text == "<|im_start|>user\na<|im_end|>\n"


@pytest.mark.story
@pytest.mark.parametrize("family", ["mistral", "llama"])
def test_transformers_loads_a_large_tokenizer_without_a_warning(tmp_path: Path, family: str) -> None:
    """Without `transformers_version` in config.json, transformers warns about a tokenizer of more than 100,000 IDs.

    Transformers then assumes the faulty tokenizer of an early Mistral model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    content = json.loads(add_post_processor(make_byte_tokenizer(" ".join(WORDS)), "mistral").to_str())
    content["model"]["vocab"] |= {token["content"]: token["id"] for token in content["added_tokens"]}
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"unused {number}": number for number in range(len(vocabulary), 100_300)}
    file = tmp_path / "tokenizer.json"
    write_json(file, content)
    tokenizer_override = f"data.tokenizer={{kind: file, path: {file}, eos_token: <|end|>}}"
    window = ("model.sliding_window=32",) if family == "mistral" else ()
    overrides = (tokenizer_override, "model.dim=8", "model.tie_word_embeddings=true", *window)
    data = make_run(tmp_path, "data", overrides).data_dir
    folder, _ = export_initial_weights(tmp_path, data, "run", *overrides)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert model.config.model_type == family and tokenizer.vocab_size > 100_000
    assert tokenizer.bos_token_id == tokenizer("a").input_ids[0] == model.config.bos_token_id == BOS_ID
    assert warnings == []
    # with version 4.57 in config.json, transformers would warn for every model family
    assert read_json(folder / "config.json")["transformers_version"] >= "5.0.0"

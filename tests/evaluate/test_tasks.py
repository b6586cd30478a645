"""Tests of task files of evaluations: scores compared with transformers and lm-eval, and errors of malformed files."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from pipeline.base.errors import ExitCode
from pipeline.config.read import load_config
from pipeline.evaluate import evaluate_stage
from pipeline.evaluate.evaluator import TaskFile
from pipeline.evaluate.result import format_result
from pipeline.evaluate.task_files import derive_task_names, read_task_file
from pipeline.publish.export import export_checkpoint
from pipeline.publish.generate import _load_folder
from pipeline.run.directory import Run
from tests.publish.test_export import export_initial_weights
from tests.publish.test_generate import save_model
from tests.support.errors import raises_error
from tests.support.ranks import run_ranks
from tests.support.tiny import WORDS, make_run, run_stage_on_rank
from tests.support.tokenizers import add_post_processor, get_token_id, make_byte_tokenizer, save_tokenizer

TASK_OVERRIDES = ("train.steps=60", "stages.train.tasks_per_node=1", "model.dropout=0.0", "evaluate.answer_tokens=3")


def write_tasks(folder: Path) -> tuple[Path, Path]:
    """Write a file of multiple-choice items and a file of items with free answers. Return both paths.

    In the first file, one prompt is empty, one ends with a blank, and one is longer than a window.
    """
    generator = random.Random(4)
    lines = []
    for number in range(23):
        if number < 3:
            prompt = ["", "the model ", " ".join(WORDS * 9)][number]
        else:
            prompt = " ".join(generator.choices(WORDS, k=6))
        choice_count = generator.randint(2, 4)
        choices = [" ".join(generator.choices(WORDS, k=generator.randint(1, 4))) for _ in range(choice_count)]
        lines.append({"prompt": prompt, "choices": choices, "answer": generator.randrange(len(choices))})
    choice_file = folder / "chosen.jsonl"
    free_file = folder / "free.jsonl"
    choice_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    free_file.write_text("".join(json.dumps({"prompt": line["prompt"], "answer": "x"}) + "\n" for line in lines[3:9]))
    return choice_file, free_file


def make_task(file: Path, tokenizer: Tokenizer, eos_id: int, bos_ids: tuple[int, ...] = ()) -> TaskFile:
    """Return a task for sequences of 32 tokens and answers of 3 tokens."""
    return TaskFile(
        file,
        tokenizer,
        eos_id=eos_id,
        sequence_length=32,
        sequences_per_pass=8,
        answer_tokens=3,
        is_sharded=False,
        bos_ids=bos_ids,
    )


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run whose train stage is done, with the two task files of `write_tasks`."""
    folder = tmp_path_factory.mktemp("tasks")
    choice_file, free_file = write_tasks(folder)
    run = make_run(folder, "tiny", (*TASK_OVERRIDES, f"evaluate.tasks=[{choice_file}, {free_file}]"))
    assert run_ranks(1, run_stage_on_rank, run.path, "train") == [ExitCode.DONE]
    return run


def choose_with_transformers(
    folder: Path, length: int, items: list[dict[str, Any]], add_special_tokens: bool = False
) -> tuple[list[int], list[int]]:
    """Return for each item the choice with the highest score of transformers' model, in total and per character.

    Args:
        folder: the exported model.
        length: maximum number of predicted tokens.
        items: the items of the task file.
        add_special_tokens: whether a text begins with the tokenizer's special tokens.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    best_choices = []
    best_choices_per_character = []
    for item in items:
        scores = []
        for choice in item["choices"]:
            prompt = item["prompt"].rstrip()
            ids = tokenizer(f"{prompt} {choice}", add_special_tokens=add_special_tokens).input_ids
            choice_token_count = len(ids) - len(tokenizer(prompt, add_special_tokens=add_special_tokens).input_ids)
            ids = ids if prompt or add_special_tokens else [tokenizer.eos_token_id, *ids]
            window_ids = torch.tensor(ids)[-length - 1 :]
            with torch.no_grad():
                logits = model(window_ids[None, :-1]).logits[0].double().log_softmax(-1)
            scores.append(
                sum(
                    logits[i - 1, window_ids[i]].item()
                    for i in range(len(window_ids) - choice_token_count, len(window_ids))
                )
            )
        scores_per_character = [score / len(choice) for score, choice in zip(scores, item["choices"], strict=True)]
        best_choices.append(scores.index(max(scores)))
        best_choices_per_character.append(scores_per_character.index(max(scores_per_character)))
    return best_choices, best_choices_per_character


LM_EVAL = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

model, tasks = sys.argv[1:]
lm = HFLM(pretrained=model, device="cpu", dtype="float32", batch_size=1, max_length=32)
result = simple_evaluate(lm, tasks=["choices"], task_manager=TaskManager(include_path=tasks), log_samples=True)
samples = [(sample["doc_id"], sample["acc"], sample["acc_norm"]) for sample in result["samples"]["choices"]]
print(json.dumps([result["results"]["choices"], sorted(samples)], default=str))
"""
"""Program that evaluates a model on the task `choices` of a folder and prints its metrics and samples."""
LM_EVAL_TASK = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_scores_of_all_items_equal_those_of_lm_eval(trained_run: Run, tmp_path: Path) -> None:
    """Sluice and lm-eval evaluate the same exported model.

    In this test, no prompt ends with a blank, because lm-eval adds a blank between the prompt and a choice.
    """
    python = os.environ.get("LM_EVAL_PYTHON")
    if python is None:
        pytest.fail("LM_EVAL_PYTHON must name a Python with lm-eval; `make test-long` sets it")
    lines = [json.loads(line) for line in trained_run.config.evaluate.task_files[0].read_text().splitlines()]
    file = tmp_path / "choices.jsonl"
    folder = tmp_path / "out"
    file.write_text("".join(json.dumps({**line, "prompt": line["prompt"].rstrip()}) + "\n" for line in lines))
    (tmp_path / "choices.yaml").write_text(LM_EVAL_TASK.replace("FILE", str(file)))
    export_checkpoint(trained_run, folder, None, "fp32")
    result = subprocess.run(
        [python, "-c", LM_EVAL, str(folder), str(tmp_path)], capture_output=True, text=True, timeout=500, cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    expected_metrics, expected_samples = json.loads(result.stdout.splitlines()[-1])
    model, tokenizer, end_ids, _ = _load_folder(folder, prompt="the", step=None, max_tokens=40)
    task = make_task(file, tokenizer, end_ids[0])
    with torch.no_grad():
        sums = [task.compute_sums(model, number, number + 1) for number in range(task.count)]
    samples = [[number, item["accuracy"], item["accuracy_norm"]] for number, item in enumerate(sums)]
    assert samples == expected_samples
    assert len(samples) == len(lines) == 23 and {accuracy for _, accuracy, _ in samples} == {0.0, 1.0}
    metrics = task.compute_result(sums)
    for key, name in (("accuracy", "acc"), ("accuracy_norm", "acc_norm")):
        assert metrics[f"choices.{key}"] == expected_metrics[f"{name},none"]
        assert metrics[f"choices.{key}_stderr"] == pytest.approx(expected_metrics[f"{name}_stderr,none"], rel=1e-12)


def test_choices_equal_those_of_transformers(trained_run: Run, tmp_path: Path) -> None:
    export_checkpoint(trained_run, tmp_path / "out", None, "fp32")
    assert run_ranks(1, run_stage_on_rank, trained_run.path, "evaluate") == [ExitCode.DONE]
    file = next(trained_run.evaluation_dir.glob("*.json"))
    result = json.loads(file.read_text())
    items = [json.loads(line) for line in trained_run.config.evaluate.task_files[0].read_text().splitlines()]
    reference_choices = choose_with_transformers(tmp_path / "out", 32, items)
    for key, choices in zip(("accuracy", "accuracy_norm"), reference_choices, strict=True):
        expected_accuracy = sum(choice == item["answer"] for choice, item in zip(choices, items, strict=True)) / len(
            items
        )
        assert result[f"chosen.{key}"] == pytest.approx(expected_accuracy)
        standard_error = math.sqrt(expected_accuracy * (1 - expected_accuracy) / (len(items) - 1))
        assert result[f"chosen.{key}_stderr"] == pytest.approx(standard_error)
    assert result["chosen.items"] == 23 and 0 < result["chosen.accuracy"] < 1
    assert f"chosen.accuracy {result['chosen.accuracy']:.4f}" in format_result(result)
    # two ranks with a full copy of the weights each, then three ranks that shard the weights
    for ranks, overrides in ((2, ()), (3, ("parallel.zero=3",))):
        trained_run.apply_overrides([f"stages.evaluate.tasks_per_node={ranks}", *overrides])
        expected = file.read_bytes()
        file.unlink()
        assert run_ranks(ranks, run_stage_on_rank, trained_run.path, "evaluate") == [ExitCode.DONE] * ranks
        assert file.read_bytes() == expected


@pytest.mark.parametrize("kind", ["mistral", "qwen"])
def test_prompts_begin_with_the_given_special_tokens(tmp_path: Path, kind: str) -> None:
    """The tokenizer "mistral" adds <s> in transformers, and the tokenizer "qwen" adds no token.

    Sluice does not use the tokenizer's setting, but adds `bos_ids`: no token, or <s>. With "qwen" and <s>, the choices
    therefore differ from those of transformers.
    """
    save_model(tmp_path / "model", "qwen2")
    tokenizer = add_post_processor(make_byte_tokenizer(" ".join(WORDS)), kind)
    save_tokenizer(tmp_path / "model", tokenizer, eos_token="<|end|>")
    choice_file, _ = write_tasks(tmp_path)
    items = [json.loads(line) for line in choice_file.read_text().splitlines()]
    model, loaded_tokenizer = _load_folder(tmp_path / "model", prompt="the", step=None, max_tokens=40)[:2]
    for bos_ids in ((), (get_token_id(tokenizer, "<s>"),)):
        task = make_task(choice_file, loaded_tokenizer, 0, bos_ids)
        with torch.no_grad():
            sums = [task.compute_sums(model, number, number + 1) for number in range(task.count)]
        expected = [
            [float(choice == item["answer"]) for choice, item in zip(choices, items, strict=True)]
            for choices in choose_with_transformers(tmp_path / "model", 32, items, add_special_tokens=bool(bos_ids))
        ]
        has_equal_accuracy = [[item["accuracy"] for item in sums], [item["accuracy_norm"] for item in sums]] == expected
        expects_equal_accuracy = kind == "mistral" or not bos_ids
        assert has_equal_accuracy is expects_equal_accuracy, f"wrong special tokens with {bos_ids=}"


def test_prompts_begin_with_the_special_tokens_of_the_runs_tokenizer(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, add_post_processor(make_byte_tokenizer(" ".join(WORDS)), "llama 3"))
    choice_file, _ = write_tasks(tmp_path)
    tokenizer_option = f"data.tokenizer={{kind: file, path: {tokenizer}, eos_token: <|end|>}}"
    overrides = (tokenizer_option, f"evaluate.tasks={choice_file}", "model.initializer_range=0.2")
    folder, _ = export_initial_weights(tmp_path, make_run(tmp_path, "data", overrides).data_dir, "run", *overrides)
    run = Run.open(tmp_path / "runs/run")
    assert run_ranks(1, run_stage_on_rank, run.path, "evaluate") == [ExitCode.DONE]
    result = json.loads(next(run.evaluation_dir.glob("*.json")).read_text())
    items = [json.loads(line) for line in choice_file.read_text().splitlines()]

    def compute_expected_accuracies(add_special_tokens: bool) -> list[float]:
        """Return the accuracies of transformers' choices, in total and per character."""
        return [
            sum(choice == item["answer"] for choice, item in zip(choices, items, strict=True)) / len(items)
            for choices in choose_with_transformers(folder, 32, items, add_special_tokens)
        ]

    assert [result["chosen.accuracy"], result["chosen.accuracy_norm"]] == pytest.approx(
        compute_expected_accuracies(add_special_tokens=True)
    )
    assert compute_expected_accuracies(add_special_tokens=False) != compute_expected_accuracies(add_special_tokens=True)


def test_the_blank_before_a_choice_counts_as_part_of_the_choice(trained_run: Run) -> None:
    """The blank before a word may be part of the word's token. This also holds if the prompt ends with a blank."""
    tokenizer = Tokenizer.from_file(str(trained_run.data_dir / "tokenizer.json"))
    task = make_task(trained_run.config.evaluate.task_files[0], tokenizer, 0)
    for number in (1, 5):
        item = task.items[number]
        for choice, (ids, count) in zip(item.choices, task._choices[number], strict=True):
            assert tokenizer.decode(ids[-count:]) == " " + choice


def test_free_answers_equal_those_that_transformers_generates_greedily(trained_run: Run, tmp_path: Path) -> None:
    """Transformers generates the expected answers of the task file, except the first one, which is wrong."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export_checkpoint(trained_run, tmp_path / "out", None, "fp32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    lines = [json.loads(line) for line in trained_run.config.evaluate.task_files[1].read_text().splitlines()]
    for line in lines[1:]:
        # a sequence has 32 tokens, of which 3 are reserved for the answer
        ids = tokenizer(line["prompt"], return_tensors="pt", add_special_tokens=False).input_ids[:, -29:]
        new_ids = model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
        line["answer"] = tokenizer.decode(new_ids, skip_special_tokens=True).strip()
        assert line["answer"]
    file = tmp_path / "generated.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = make_run(tmp_path, "other", (*TASK_OVERRIDES, f"evaluate.tasks={file}"), trained_run.data_dir)
    run.checkpoints_dir.rmdir()
    run.checkpoints_dir.symlink_to(trained_run.checkpoints_dir)
    assert run_ranks(2, run_stage_on_rank, run.path, "evaluate") == [ExitCode.DONE] * 2
    assert json.loads(next(run.evaluation_dir.glob("*.json")).read_text())["generated.accuracy"] == pytest.approx(5 / 6)


@pytest.mark.parametrize(
    ("line", "expected_text"),
    [
        ("[]", "task.jsonl:2"),
        ('{"prompt": 3, "answer": "x"}', "task.jsonl:2"),
        ('{"prompt": "a", "choices": ["x"], "answer": 0}', "choices"),
        ('{"prompt": "a", "choices": ["x", "y"], "answer": 2}', "0 to 1"),
        ('{"prompt": "a", "choices": ["x", "y"], "answer": true}', "0 to 1"),
        ('{"prompt": "a", "answer": " "}', "answer"),
        ('{"prompt": "a", "answer": "b", "label": 1}', "label"),
        ('{"prompt": "a", "choices": ["x', "task.jsonl:2"),
    ],
)
def test_a_malformed_item_is_an_error_with_file_and_line(tmp_path: Path, line: str, expected_text: str) -> None:
    file = tmp_path / "task.jsonl"
    file.write_text('{"prompt": "a", "choices": ["x", "y"], "answer": 1}\n' + line)
    with raises_error("evaluate.malformed_item", f"{file}:2", expected_text):
        read_task_file(file)


def test_a_file_with_choices_and_free_answers_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "task.jsonl"
    file.write_text('{"prompt": "a", "choices": ["x", "y"], "answer": 1}\n{"prompt": "a", "answer": "b"}')
    with raises_error("evaluate.mixed_task", file):
        read_task_file(file)


def test_missing_or_equally_named_task_files_are_an_error_before_submission(tmp_path: Path) -> None:
    run = make_run(tmp_path, "tiny", ("evaluate.tasks=missing.jsonl",))
    with raises_error("evaluate.unreadable_task", "missing.jsonl"):
        evaluate_stage.check_inputs(run)
    with raises_error("evaluate.duplicate_task", "evaluate.tasks", "a"):
        derive_task_names([Path("x/a.jsonl"), Path("y/a.jsonl")])
    with raises_error("config.conflict", "evaluate.tasks", "data.held_out"):
        load_config(tmp_path / "tiny.yaml", ["evaluate.tasks=a.jsonl", "data.held_out=0"])

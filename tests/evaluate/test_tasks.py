"""Tasks: scores against a plain reference with transformers, on any number of ranks; files that are none."""

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

from pipeline.base.errors import ExitCode, UserError
from pipeline.config.read import ConfigError, load_config
from pipeline.evaluate import evaluate_stage
from pipeline.evaluate.evaluator import TaskFile
from pipeline.evaluate.result import format_result
from pipeline.evaluate.task_files import derive_task_names, read_task_file
from pipeline.publish.export import export_checkpoint
from pipeline.publish.generate import _load_folder
from pipeline.run.directory import Run
from tests.publish.test_export import exported
from tests.publish.test_generate import saved
from tests.support.ranks import run_ranks
from tests.support.tiny import WORDS, make_run, stage_rank
from tests.support.tokenizers import add_post_processor, get_token_id, make_byte_tokenizer, save_tokenizer

TRAIN = ("train.steps=60", "stages.train.tasks_per_node=1", "model.dropout=0.0", "evaluate.answer_tokens=3")


def write_tasks(folder: Path) -> tuple[Path, Path]:
    """Choices of other lengths, prompts that are empty, end with a blank or are longer than a window; words to say."""
    draw = random.Random(4)
    lines = []
    for number in range(23):
        prompt = ["", "the model ", " ".join(WORDS * 9)][number] if number < 3 else " ".join(draw.choices(WORDS, k=6))
        choices = [" ".join(draw.choices(WORDS, k=draw.randint(1, 4))) for _ in range(draw.randint(2, 4))]
        lines.append({"prompt": prompt, "choices": choices, "answer": draw.randrange(len(choices))})
    chosen, free = folder / "chosen.jsonl", folder / "free.jsonl"
    chosen.write_text("".join(json.dumps(line) + "\n" for line in lines))
    free.write_text("".join(json.dumps({"prompt": line["prompt"], "answer": "x"}) + "\n" for line in lines[3:9]))
    return chosen, free


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("tasks")
    chosen, free = write_tasks(folder)
    run = make_run(folder, "tiny", (*TRAIN, f"evaluate.tasks=[{chosen}, {free}]"))
    assert run_ranks(1, stage_rank, run.path, "train") == [ExitCode.DONE]
    return run


def reference(
    folder: Path, length: int, items: list[dict[str, Any]], special: bool = False
) -> tuple[list[int], list[int]]:
    """What transformers' model thinks likeliest of each item, plain and for its length: one row at a time.

    special: with the special tokens that the tokenizer puts before a text.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    plain, normed = [], []
    for item in items:
        scores = []
        for choice in item["choices"]:
            bare = item["prompt"].rstrip()
            whole = tokenizer(f"{bare} {choice}", add_special_tokens=special).input_ids
            count = len(whole) - len(tokenizer(bare, add_special_tokens=special).input_ids)
            whole = whole if bare or special else [tokenizer.eos_token_id, *whole]
            row = torch.tensor(whole)[-length - 1 :]
            with torch.no_grad():
                logits = model(row[None, :-1]).logits[0].double().log_softmax(-1)
            scores.append(sum(logits[at - 1, row[at]].item() for at in range(len(row) - count, len(row))))
        plain.append(max(range(len(scores)), key=scores.__getitem__))
        normed.append(max(range(len(scores)), key=lambda at: scores[at] / len(item["choices"][at])))
    return plain, normed


LM_EVAL = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

model, tasks = sys.argv[1:]
lm = HFLM(pretrained=model, device="cpu", dtype="float32", batch_size=1, max_length=32)
found = simple_evaluate(lm, tasks=["ours"], task_manager=TaskManager(include_path=tasks), log_samples=True)
samples = [(one["doc_id"], one["acc"], one["acc_norm"]) for one in found["samples"]["ours"]]
print(json.dumps([found["results"]["ours"], sorted(samples)], default=str))
"""
TASK = """
task: ours
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
def test_every_answer_is_that_of_lm_eval(trained: Run, tmp_path: Path) -> None:
    """On the exported model and the same file, with prompts that do not end with a blank (lm-eval adds another)."""
    python = os.environ.get("LM_EVAL_PYTHON")
    if python is None:
        pytest.fail("LM_EVAL_PYTHON must name a Python with lm-eval; `make test-long` sets it")
    lines = [json.loads(line) for line in trained.config.evaluate.task_files[0].read_text().splitlines()]
    file, folder = tmp_path / "choices.jsonl", tmp_path / "out"
    file.write_text("".join(json.dumps({**line, "prompt": line["prompt"].rstrip()}) + "\n" for line in lines))
    (tmp_path / "ours.yaml").write_text(TASK.replace("FILE", str(file)))
    export_checkpoint(trained, folder, None, "fp32")
    done = subprocess.run(
        [python, "-c", LM_EVAL, str(folder), str(tmp_path)], capture_output=True, text=True, timeout=500, cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    theirs, samples = json.loads(done.stdout.splitlines()[-1])
    model, tokenizer, ends, _ = _load_folder(folder, "the", None, 40)
    task = TaskFile(file, tokenizer, ends[0], 32, 8, 3, together=False)
    with torch.no_grad():
        ours = [task.sums(model, number, number + 1) for number in range(task.count)]
    assert [[number, one["accuracy"], one["accuracy_norm"]] for number, one in enumerate(ours)] == samples
    assert len(samples) == len(lines) == 23 and {one for _, one, _ in samples} == {0.0, 1.0}
    figures = task.result(ours)
    for key, name in (("accuracy", "acc"), ("accuracy_norm", "acc_norm")):
        assert figures[f"choices.{key}"] == theirs[f"{name},none"]
        assert figures[f"choices.{key}_stderr"] == pytest.approx(theirs[f"{name}_stderr,none"], rel=1e-12)


def test_choices_are_those_of_a_plain_reference(trained: Run, tmp_path: Path) -> None:
    export_checkpoint(trained, tmp_path / "out", None, "fp32")
    assert run_ranks(1, stage_rank, trained.path, "evaluate") == [ExitCode.DONE]
    file = next(trained.evaluation_dir.glob("*.json"))
    result = json.loads(file.read_text())
    items = [json.loads(line) for line in trained.config.evaluate.task_files[0].read_text().splitlines()]
    for key, found in zip(("accuracy", "accuracy_norm"), reference(tmp_path / "out", 32, items), strict=True):
        right = sum(one == item["answer"] for one, item in zip(found, items, strict=True))
        share = right / len(items)
        assert result[f"chosen.{key}"] == pytest.approx(share)
        assert result[f"chosen.{key}_stderr"] == pytest.approx(math.sqrt(share * (1 - share) / (len(items) - 1)))
    assert result["chosen.items"] == 23 and 0 < result["chosen.accuracy"] < 1
    assert f"chosen.accuracy {result['chosen.accuracy']:.4f}" in format_result(result)
    for ranks, more in ((2, ()), (3, ("parallel.zero=3",))):  # split over ranks, and each a part of the model
        run = trained
        run.apply_overrides([f"stages.evaluate.tasks_per_node={ranks}", *more])
        kept = file.read_bytes()
        file.unlink()
        assert run_ranks(ranks, stage_rank, run.path, "evaluate") == [ExitCode.DONE] * ranks
        assert file.read_bytes() == kept


@pytest.mark.parametrize("kind", ["mistral", "qwen"])
def test_prompts_begin_with_the_special_tokens_of_the_training(tmp_path: Path, kind: str) -> None:
    saved(tmp_path / "model", "qwen2")
    tokenizer = add_post_processor(make_byte_tokenizer(" ".join(WORDS)), kind)
    save_tokenizer(tmp_path / "model", tokenizer, eos_token="<|end|>")
    chosen, _ = write_tasks(tmp_path)
    items = [json.loads(line) for line in chosen.read_text().splitlines()]
    model, ours = _load_folder(tmp_path / "model", "the", None, 40)[:2]
    for bos_ids in ((), (get_token_id(tokenizer, "<s>"),)):
        task = TaskFile(chosen, ours, 0, 32, 8, 3, together=False, bos_ids=bos_ids)
        with torch.no_grad():
            sums = [task.sums(model, number, number + 1) for number in range(task.count)]
        found = reference(tmp_path / "model", 32, items, special=bool(bos_ids))
        expected = [[float(one == item["answer"]) for one, item in zip(row, items, strict=True)] for row in found]
        same = [[one["accuracy"] for one in sums], [one["accuracy_norm"] for one in sums]] == expected
        assert same is (kind == "mistral" or not bos_ids), "not the tokens of transformers"


def test_the_evaluation_of_a_run_puts_them_before_prompts(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, add_post_processor(make_byte_tokenizer(" ".join(WORDS)), "llama 3"))
    chosen, _ = write_tasks(tmp_path)
    given = f"data.tokenizer={{kind: file, path: {tokenizer}, eos_token: <|end|>}}"
    more = (given, f"evaluate.tasks={chosen}", "model.initializer_range=0.2")
    folder, _ = exported(tmp_path, make_run(tmp_path, "data", more).data_dir, "run", *more)
    run = Run.open(tmp_path / "runs/run")
    assert run_ranks(1, stage_rank, run.path, "evaluate") == [ExitCode.DONE]
    result = json.loads(next(run.evaluation_dir.glob("*.json")).read_text())
    items = [json.loads(line) for line in chosen.read_text().splitlines()]

    def shares(special: bool) -> list[float]:
        found = reference(folder, 32, items, special)
        return [sum(one == item["answer"] for one, item in zip(row, items, strict=True)) / 23 for row in found]

    assert [result["chosen.accuracy"], result["chosen.accuracy_norm"]] == pytest.approx(shares(True))
    assert shares(False) != shares(True)


def test_a_blank_before_a_choice_is_the_choices(trained: Run) -> None:
    """A token may hold the blank before a word, so it is not the prompt's, whether the prompt ends with one or not."""
    tokenizer = Tokenizer.from_file(str(trained.data_dir / "tokenizer.json"))
    task = TaskFile(trained.config.evaluate.task_files[0], tokenizer, 0, 32, 8, 3, together=False)
    for number in (1, 5):
        item = task.items[number]
        for choice, (ids, count) in zip(item.choices, task._pairs[number], strict=True):
            assert tokenizer.decode(ids[-count:]) == " " + choice


def test_a_free_answer_is_what_greedy_decoding_says(trained: Run, tmp_path: Path) -> None:
    """A file whose answers are what transformers says, but for one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export_checkpoint(trained, tmp_path / "out", None, "fp32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    lines = [json.loads(line) for line in trained.config.evaluate.task_files[1].read_text().splitlines()]
    for line in lines[1:]:
        ids = tokenizer(line["prompt"], return_tensors="pt", add_special_tokens=False).input_ids[:, -29:]
        new = model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
        line["answer"] = tokenizer.decode(new, skip_special_tokens=True).strip()
        assert line["answer"]
    file = tmp_path / "said.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = make_run(tmp_path, "other", (*TRAIN, f"evaluate.tasks={file}"), trained.data_dir)
    run.checkpoints_dir.rmdir()
    run.checkpoints_dir.symlink_to(trained.checkpoints_dir)
    assert run_ranks(2, stage_rank, run.path, "evaluate") == [ExitCode.DONE] * 2
    assert json.loads(next(run.evaluation_dir.glob("*.json")).read_text())["said.accuracy"] == pytest.approx(5 / 6)


@pytest.mark.parametrize(
    ("line", "code", "fact"),
    [
        ("[]", "malformed_item", "task.jsonl:2"),
        ('{"prompt": 3, "answer": "x"}', "malformed_item", "task.jsonl:2"),
        ('{"prompt": "a", "choices": ["x"], "answer": 0}', "malformed_item", "choices"),
        ('{"prompt": "a", "choices": ["x", "y"], "answer": 2}', "malformed_item", "0 to 1"),
        ('{"prompt": "a", "choices": ["x", "y"], "answer": true}', "malformed_item", "0 to 1"),
        ('{"prompt": "a", "answer": " "}', "malformed_item", "answer"),
        ('{"prompt": "a", "answer": "b", "label": 1}', "malformed_item", "label"),
        ('{"prompt": "a", "answer": "b"}', "mixed_task", "task.jsonl"),
        ('{"prompt": "a", "choices": ["x', "malformed_item", "task.jsonl:2"),
    ],
)
def test_malformed_items_are_reported_with_file_and_line(tmp_path: Path, line: str, code: str, fact: str) -> None:
    file = tmp_path / "task.jsonl"
    file.write_text('{"prompt": "a", "choices": ["x", "y"], "answer": 1}\n' + line)
    with pytest.raises(UserError) as caught:
        read_task_file(file)
    assert caught.value.code == f"evaluate.{code}" and fact in str(caught.value)


def test_task_files_are_checked_before_a_run_is_created(tmp_path: Path) -> None:
    run = make_run(tmp_path, "tiny", ("evaluate.tasks=missing.jsonl",))
    with pytest.raises(UserError) as caught:
        evaluate_stage.check_inputs(run)
    assert caught.value.code == "evaluate.unreadable_task" and "missing.jsonl" in str(caught.value)
    with pytest.raises(UserError) as caught:
        derive_task_names([Path("x/a.jsonl"), Path("y/a.jsonl")])
    assert caught.value.code == "evaluate.duplicate_task"
    with pytest.raises(ConfigError, match=r"evaluate\.tasks.*data\.held_out"):
        load_config(tmp_path / "tiny.yaml", ["evaluate.tasks=a.jsonl", "data.held_out=0"])

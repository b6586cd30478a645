"""Task files: scores compared with transformers and lm-eval on any number of ranks, and malformed files."""

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
from pipeline.config.read import load_config
from pipeline.evaluate import evaluate_stage
from pipeline.evaluate.evaluator import TaskFile
from pipeline.evaluate.result import format_result
from pipeline.evaluate.task_files import derive_task_names, read_task_file
from pipeline.publish.export import export_checkpoint
from pipeline.publish.generate import _load_folder
from pipeline.run.directory import Run
from tests.publish.test_export import exported
from tests.publish.test_generate import save_model
from tests.support.errors import raises_error
from tests.support.ranks import run_ranks
from tests.support.tiny import WORDS, make_run, stage_rank
from tests.support.tokenizers import add_post_processor, get_token_id, make_byte_tokenizer, save_tokenizer

OPTIONS = ("train.steps=60", "stages.train.tasks_per_node=1", "model.dropout=0.0", "evaluate.answer_tokens=3")


def write_tasks(folder: Path) -> tuple[Path, Path]:
    """Write a file of choices (some prompts are empty, end with a blank, exceed a window) and one of free answers."""
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
    chosen = folder / "chosen.jsonl"
    free = folder / "free.jsonl"
    chosen.write_text("".join(json.dumps(line) + "\n" for line in lines))
    free.write_text("".join(json.dumps({"prompt": line["prompt"], "answer": "x"}) + "\n" for line in lines[3:9]))
    return chosen, free


def make_task(file: Path, tokenizer: Tokenizer, eos_id: int, bos_ids: tuple[int, ...] = ()) -> TaskFile:
    """Return a task for sequences of 32 tokens and answers of 3 tokens."""
    return TaskFile(
        file, tokenizer, eos_id=eos_id, sequence_length=32, batch=8, answer_tokens=3, is_sharded=False, bos_ids=bos_ids
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("tasks")
    chosen, free = write_tasks(folder)
    run = make_run(folder, "tiny", (*OPTIONS, f"evaluate.tasks=[{chosen}, {free}]"))
    assert run_ranks(1, stage_rank, run.path, "train") == [ExitCode.DONE]
    return run


def choose_with_transformers(
    folder: Path, length: int, items: list[dict[str, Any]], special: bool = False
) -> tuple[list[int], list[int]]:
    """Return the choice of each item that transformers' model scores highest, in total and per character.

    Args:
        special: whether a text begins with the tokenizer's special tokens.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = []
    normed = []
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
def test_every_answer_equals_that_of_lm_eval(trained: Run, tmp_path: Path) -> None:
    """Compare on the exported model. Prompts do not end with a blank, because lm-eval adds one."""
    python = os.environ.get("LM_EVAL_PYTHON")
    if python is None:
        pytest.fail("LM_EVAL_PYTHON must name a Python with lm-eval; `make test-long` sets it")
    lines = [json.loads(line) for line in trained.config.evaluate.task_files[0].read_text().splitlines()]
    file = tmp_path / "choices.jsonl"
    folder = tmp_path / "out"
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
    task = make_task(file, tokenizer, ends[0])
    with torch.no_grad():
        ours = [task.compute_sums(model, number, number + 1) for number in range(task.count)]
    assert [[number, one["accuracy"], one["accuracy_norm"]] for number, one in enumerate(ours)] == samples
    assert len(samples) == len(lines) == 23 and {one for _, one, _ in samples} == {0.0, 1.0}
    metrics = task.compute_result(ours)
    for key, name in (("accuracy", "acc"), ("accuracy_norm", "acc_norm")):
        assert metrics[f"choices.{key}"] == theirs[f"{name},none"]
        assert metrics[f"choices.{key}_stderr"] == pytest.approx(theirs[f"{name}_stderr,none"], rel=1e-12)


def test_choices_equal_those_of_transformers(trained: Run, tmp_path: Path) -> None:
    export_checkpoint(trained, tmp_path / "out", None, "fp32")
    assert run_ranks(1, stage_rank, trained.path, "evaluate") == [ExitCode.DONE]
    file = next(trained.evaluation_dir.glob("*.json"))
    result = json.loads(file.read_text())
    items = [json.loads(line) for line in trained.config.evaluate.task_files[0].read_text().splitlines()]
    reference = choose_with_transformers(tmp_path / "out", 32, items)
    for key, choices in zip(("accuracy", "accuracy_norm"), reference, strict=True):
        right = sum(choice == item["answer"] for choice, item in zip(choices, items, strict=True))
        share = right / len(items)
        assert result[f"chosen.{key}"] == pytest.approx(share)
        assert result[f"chosen.{key}_stderr"] == pytest.approx(math.sqrt(share * (1 - share) / (len(items) - 1)))
    assert result["chosen.items"] == 23 and 0 < result["chosen.accuracy"] < 1
    assert f"chosen.accuracy {result['chosen.accuracy']:.4f}" in format_result(result)
    for ranks, more in ((2, ()), (3, ("parallel.zero=3",))):  # data parallel, then also a sharded model
        run = trained
        run.apply_overrides([f"stages.evaluate.tasks_per_node={ranks}", *more])
        expected = file.read_bytes()
        file.unlink()
        assert run_ranks(ranks, stage_rank, run.path, "evaluate") == [ExitCode.DONE] * ranks
        assert file.read_bytes() == expected


@pytest.mark.parametrize("kind", ["mistral", "qwen"])
def test_prompts_begin_with_the_special_tokens_of_the_training(tmp_path: Path, kind: str) -> None:
    save_model(tmp_path / "model", "qwen2")
    tokenizer = add_post_processor(make_byte_tokenizer(" ".join(WORDS)), kind)
    save_tokenizer(tmp_path / "model", tokenizer, eos_token="<|end|>")
    chosen, _ = write_tasks(tmp_path)
    items = [json.loads(line) for line in chosen.read_text().splitlines()]
    model, tokenizer_read = _load_folder(tmp_path / "model", "the", None, 40)[:2]
    for bos_ids in ((), (get_token_id(tokenizer, "<s>"),)):
        task = make_task(chosen, tokenizer_read, 0, bos_ids)
        with torch.no_grad():
            sums = [task.compute_sums(model, number, number + 1) for number in range(task.count)]
        found = choose_with_transformers(tmp_path / "model", 32, items, special=bool(bos_ids))
        expected = [[float(one == item["answer"]) for one, item in zip(row, items, strict=True)] for row in found]
        same = [[one["accuracy"] for one in sums], [one["accuracy_norm"] for one in sums]] == expected
        assert same is (kind == "mistral" or not bos_ids), "the special tokens differ from those of transformers"


def test_the_evaluation_of_a_run_puts_special_tokens_before_prompts(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, add_post_processor(make_byte_tokenizer(" ".join(WORDS)), "llama 3"))
    chosen, _ = write_tasks(tmp_path)
    tokenizer_option = f"data.tokenizer={{kind: file, path: {tokenizer}, eos_token: <|end|>}}"
    more = (tokenizer_option, f"evaluate.tasks={chosen}", "model.initializer_range=0.2")
    folder, _ = exported(tmp_path, make_run(tmp_path, "data", more).data_dir, "run", *more)
    run = Run.open(tmp_path / "runs/run")
    assert run_ranks(1, stage_rank, run.path, "evaluate") == [ExitCode.DONE]
    result = json.loads(next(run.evaluation_dir.glob("*.json")).read_text())
    items = [json.loads(line) for line in chosen.read_text().splitlines()]

    def compute_shares(special: bool) -> list[float]:
        found = choose_with_transformers(folder, 32, items, special)
        return [sum(one == item["answer"] for one, item in zip(row, items, strict=True)) / 23 for row in found]

    assert [result["chosen.accuracy"], result["chosen.accuracy_norm"]] == pytest.approx(compute_shares(True))
    assert compute_shares(False) != compute_shares(True)


def test_a_blank_before_a_choice_belongs_to_the_choice(trained: Run) -> None:
    """The blank before a word may be part of the word's token, whether the prompt ends with a blank or not."""
    tokenizer = Tokenizer.from_file(str(trained.data_dir / "tokenizer.json"))
    task = make_task(trained.config.evaluate.task_files[0], tokenizer, 0)
    for number in (1, 5):
        item = task.items[number]
        for choice, (ids, count) in zip(item.choices, task._choices[number], strict=True):
            assert tokenizer.decode(ids[-count:]) == " " + choice


def test_a_free_answer_is_decoded_greedily(trained: Run, tmp_path: Path) -> None:
    """All expected answers of the file, except one, are those that transformers generates."""
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
    file = tmp_path / "generated.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = make_run(tmp_path, "other", (*OPTIONS, f"evaluate.tasks={file}"), trained.data_dir)
    run.checkpoints_dir.rmdir()
    run.checkpoints_dir.symlink_to(trained.checkpoints_dir)
    assert run_ranks(2, stage_rank, run.path, "evaluate") == [ExitCode.DONE] * 2
    assert json.loads(next(run.evaluation_dir.glob("*.json")).read_text())["generated.accuracy"] == pytest.approx(5 / 6)


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
    with raises_error("config.conflict", "evaluate.tasks", "data.held_out"):
        load_config(tmp_path / "tiny.yaml", ["evaluate.tasks=a.jsonl", "data.held_out=0"])

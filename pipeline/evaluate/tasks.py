"""Tasks, as the evaluator sees them: which choice a model thinks likeliest, and what it answers.

Multiple choice goes by the log-likelihood of each choice after the prompt; `accuracy_norm` divides it by the choice's
length in characters. Tokens are those of prompt and choice together less those of the prompt; what does not fit into a
window loses its beginning. So does EleutherAI's lm-evaluation-harness (`multiple_choice`, `acc` and `acc_norm`), whose
numbers these are (docs/evaluation.md). A prompt begins with the special tokens that documents of the training begin
with. A free answer is decoded greedily to the end of its line, or to a token that ends an answer (the same ones at
which `generate` stops), and right where it is the answer to the letter, but for blanks around it.

The standard error is that of a mean of zeros and ones: sqrt(p (1 - p) / (n - 1)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from pipeline.base.errors import UserError
from pipeline.data.special_tokens import encode_prompt
from pipeline.evaluate.result import ITEMS, STANDARD_ERROR
from pipeline.evaluate.task_files import Item, read_task


class TaskFile:
    """One file of items; `sums` and `result` are what the evaluator asks, `batch` how many items at once."""

    def __init__(
        self,
        file: Path,
        tokenizer: Tokenizer,
        end: int,
        length: int,
        rows: int,
        answer_tokens: int,
        together: bool,
        bos_ids: Sequence[int] = (),
        end_ids: Sequence[int] = (),
    ) -> None:
        """`end`: the token that ends a text; `rows` of at most `length` tokens go through the model at once.

        bos_ids: what stands before each prompt, as before the documents of the training.
        end_ids: other tokens that end an answer, such as the one that closes the answers of a dialogue.
        together: whether all ranks must call the model equally often, for each has only a part of it.
        """
        self.name, self.items = file.stem, read_task(file)
        self.tokenizer, self.end, self.length, self.together = tokenizer, end, length, together
        self.answer_tokens, self.rows, self.bos_ids, self.end_ids = answer_tokens, rows, bos_ids, {end, *end_ids}
        self.width = max(1, *(len(item.choices) for item in self.items))
        self.count, self.batch = len(self.items), max(1, rows // self.width)
        if not self.items[0].choices and answer_tokens >= length:
            raise UserError(f"evaluate.answer_tokens ({answer_tokens}) must be below data.sequence_length ({length})")
        if self.items[0].choices:
            self._pairs = [[self._pair(item, choice) for choice in item.choices] for item in self.items]

    def sums(self, model: nn.Module, start: int, stop: int) -> dict[str, float]:
        """How many of these items are right."""
        items = self.items[start:stop]
        if items[0].choices:
            return self._chosen(model, start, stop)
        said = self._answers(model, items)
        right = sum(one.split("\n")[0].strip() == item.answer for item, one in zip(items, said, strict=True))
        return {"accuracy": float(right)}

    def result(self, sums: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Figures by the file's name."""
        found: dict[str, Any] = {ITEMS: self.count}
        for key in sums[0]:
            share = math.fsum(part[key] for part in sums) / self.count
            found |= {key: share, f"{key}{STANDARD_ERROR}": math.sqrt(share * (1 - share) / max(1, self.count - 1))}
        return {f"{self.name}.{key}": value for key, value in found.items()}

    def _ids(self, text: str) -> list[int]:
        return encode_prompt(self.tokenizer, text, self.bos_ids)

    def _pair(self, item: Item, choice: str) -> tuple[list[int], int]:
        """Tokens of prompt and choice, and how many of them are the choice's."""
        prompt = item.prompt.rstrip()  # a token may hold the blank that comes before a word
        before = self._ids(prompt) or [self.end]
        whole = self._ids(item.prompt + ("" if item.prompt[-1:].isspace() else " ") + choice)
        whole = whole if prompt or self.bos_ids else [self.end, *whole]
        count = len(whole) - len(before)
        if not 0 < count <= self.length:
            raise UserError(
                f"evaluate.tasks: {self.name}: a choice of {count} tokens does not fit into data.sequence_length "
                f"({self.length}): {choice[:60]!r}"
            )
        return whole[-self.length - 1 :], count

    def _logits(self, model: nn.Module, rows: Sequence[Sequence[int]]) -> Tensor:
        """Of rows of tokens, padded behind, which nothing before can see: `logits_BTV`."""
        longest = max(map(len, rows))
        tokens_BT = torch.tensor([[*row, *[self.end] * (longest - len(row))] for row in rows])
        logits_BTV: Tensor = model(tokens_BT.to(next(model.parameters()).device))
        return logits_BTV

    def _chosen(self, model: nn.Module, start: int, stop: int) -> dict[str, float]:
        """By the likeliest choice, and by the likeliest for its length; a fixed number of passes."""
        pairs = [pair for item in self._pairs[start:stop] for pair in item]
        scores: list[float] = []
        for first in range(0, self.batch * self.width, self.rows):
            some = pairs[first : first + self.rows]
            if not some and not self.together:
                break
            logits_BTV = self._logits(model, [ids[:-1] for ids, _ in some] or [[self.end]])
            for (ids, count), logits_TV in zip(some, logits_BTV, strict=False):
                at_TV = logits_TV[len(ids) - 1 - count : len(ids) - 1].float().log_softmax(dim=-1)
                scores.append(at_TV.gather(1, torch.tensor(ids[-count:], device=at_TV.device)[:, None]).sum().item())
        right, right_norm, at = 0, 0, 0
        for item in self.items[start:stop]:
            own = scores[at : at + len(item.choices)]
            at += len(item.choices)
            normed = [score / len(choice) for score, choice in zip(own, item.choices, strict=True)]
            right += own.index(max(own)) == item.right
            right_norm += normed.index(max(normed)) == item.right
        return {"accuracy": float(right), "accuracy_norm": float(right_norm)}

    def _answers(self, model: nn.Module, items: Sequence[Item]) -> list[str]:
        """What the model says, greedily, to the end of a line or text."""
        rows = [(self._ids(item.prompt) or [self.end])[-self.length + self.answer_tokens :] for item in items]
        begun = [len(row) for row in rows]
        said = [""] * len(rows)
        over = [False] * len(rows)
        for _ in range(self.answer_tokens):
            if all(over) and not self.together:
                break
            logits_BTV = self._logits(model, rows)
            for number, row in enumerate(rows):
                token = int(logits_BTV[number, len(row) - 1].argmax())
                if over[number]:
                    continue
                if token in self.end_ids:  # no part of the answer, also if the tokenizer does not call it special
                    over[number] = True
                    continue
                row.append(token)
                said[number] = self.tokenizer.decode(row[begun[number] :]).lstrip()
                over[number] = "\n" in said[number]
        return said

"""Determine which tokens a tokenizer adds to a text, and which token ends an answer of a dialogue.

Training, evaluation tasks, `generate` and `export` all use this module, so that prompts have the same form as the
training data.

The post-processor in `tokenizer.json` defines the added tokens: a beginning-of-sequence token (Llama, Mistral), none
(Qwen), or one before and one after the text (BERT). transformers adds these tokens to every text that it encodes with
the default `add_special_tokens=True`. A rendered chat template already contains special tokens, so transformers adds no
tokens to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, models

from pipeline.base.errors import UserError
from pipeline.data.chat_template import ChatTemplate, ChatTemplateError, split_marks

_ROLES = ("user", "assistant")
_QUESTIONS = ("sluicequestionone", "sluicequestiontwo")
_ANSWERS = ("sluiceanswerone", "sluiceanswertwo")
"""Answers of trial dialogues; `_QUESTIONS` has the questions.

A template has no reason to change these words, so they can be found in the rendered text.
"""


def load_tokenizer(file: Path, eos_token: str | None = None) -> Tokenizer:
    """Load a `tokenizer.json`, and disable truncation and padding.

    Args:
        file: path of the `tokenizer.json`.
        eos_token: text of a token that becomes a special token, even if the file does not list it as one. Ignored if
            the vocabulary does not contain it.

    Raises:
        UserError: if the file cannot be read. The message names the file.
    """
    try:
        tokenizer = Tokenizer.from_str(file.read_text())
    except Exception as error:  # The package tokenizers raises plain Exception for an invalid file.
        raise UserError("data.invalid_tokenizer", f"{file} is not a readable tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if eos_token is not None and tokenizer.token_to_id(eos_token) is not None:
        tokenizer.add_special_tokens([AddedToken(eos_token, special=True, normalized=False)])  # The token keeps its id.
    return tokenizer


def get_added_tokens(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the tokenizer's post-processor adds before a text, and those that it adds after it."""
    # The trial tokenizer encodes any text as one token. The post-processor defines the ids that it adds, so it adds the
    # same ids here as it does in `tokenizer`.
    trial_tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if tokenizer.post_processor is not None:
        trial_tokenizer.post_processor = tokenizer.post_processor
    encoding = trial_tokenizer.encode("a")
    text_index = encoding.special_tokens_mask.index(0)
    return tuple(encoding.ids[:text_index]), tuple(encoding.ids[text_index + 1 :])


def encode_prompt(tokenizer: Tokenizer, text: str, bos_ids: Sequence[int]) -> list[int]:
    """Return the token ids of a text that the model continues: `bos_ids`, followed by the text.

    If the text already begins with `bos_ids`, they are not repeated. The tokens that the tokenizer adds after a text
    are omitted, because they would end the text.
    """
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids if ids[: len(bos_ids)] == list(bos_ids) else [*bos_ids, *ids]


def encode_chat_prompt(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, str]]
) -> list[int]:
    """Return the token ids of a dialogue up to the start of an answer, as `apply_chat_template` of transformers does.

    The texts of special tokens, such as `<|im_end|>`, are encoded as these tokens, also inside a message.

    Raises:
        UserError: if the template fails on the dialogue.
    """
    try:
        text, _ = split_marks(template.render(messages, add_generation_prompt=True))
    except ChatTemplateError as error:
        raise UserError(
            "data.unusable_dialogue", f"--chat: the chat template does not accept these messages: {error}"
        ) from None
    tokenizer.encode_special_tokens = False  # False: the texts of special tokens are encoded as these tokens.
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


class EndOfTurn(NamedTuple):
    """The token that a chat template writes after an answer."""

    ids: tuple[int, ...]
    """Id of the token that ends an answer; several if the token depends on the dialogue; empty if it is unknown."""
    problem: str
    """The reason why a model does not learn to end its answers with this token; empty if there is no problem."""


def find_end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> EndOfTurn:
    """Return the token that ends the assistant's answers in the text of a chat template.

    This function renders two trial dialogues, one with one question and answer, one with two questions and answers. It
    then looks for the first special token after each answer.
    """
    end_tokens: dict[int, None] = {}  # Dictionaries are used as sets with an order.
    problems: dict[str, None] = {}
    encode_special_tokens_before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = False  # False: the texts of special tokens become these tokens, as in training.
    for turns in (1, 2):
        pairs = zip(_QUESTIONS[:turns], _ANSWERS[:turns], strict=True)
        messages = [{"role": role, "content": text} for pair in pairs for role, text in zip(_ROLES, pair, strict=True)]
        try:
            text, spans = split_marks(template.render(messages))
        except ChatTemplateError as error:
            if turns == 1:  # A template may accept one question and answer only, so a failure with two is ignored.
                problems[f"the chat template does not accept a question and an answer: {error}"] = None
            continue
        for number, answer in enumerate(_ANSWERS[:turns], 1):
            token, problem = _find_end_token(tokenizer, text, spans if template.has_marks else None, answer)
            if number < turns and (problem or not template.has_marks):
                continue  # The token after this answer may be the start of the next message.
            if token is not None:
                end_tokens[token] = None
            if problem:
                problems[problem] = None
    tokenizer.encode_special_tokens = encode_special_tokens_before
    return EndOfTurn(tuple(end_tokens), next(iter(problems), ""))


def _find_end_token(
    tokenizer: Tokenizer, text: str, learned_spans: Sequence[tuple[int, int]] | None, answer: str
) -> tuple[int | None, str]:
    """Return the special token that ends an answer in a rendered dialogue, and the reason if a model cannot learn it.

    Args:
        tokenizer: the tokenizer that encodes the dialogue.
        text: the rendered dialogue without marks.
        learned_spans: the marked character spans [start, end), which the model learns. None if the template has no
            marks. In that case, the model learns all text that the template writes for the answer's message.
        answer: the content of the answer's message.

    Returns:
        The token id (None if it cannot be determined), and the reason why the model does not learn the token ("" if the
        model learns it).
    """
    answer_start = text.rfind(answer)
    if answer_start < 0:
        return None, "the chat template does not write an answer unchanged"
    answer_end = answer_start + len(answer)
    encoding = tokenizer.encode(text, add_special_tokens=False)
    special_tokens = tokenizer.get_added_tokens_decoder()
    for token, (token_start, token_end) in zip(encoding.ids, encoding.offsets, strict=True):
        if token_end <= answer_end:
            continue
        if token in special_tokens:
            # This is the condition by which Encoder.encode_records selects learned tokens.
            if learned_spans is None or any(token_start < stop and start < token_end for start, stop in learned_spans):
                return token, ""
            name = special_tokens[token].content
            return token, f"{name} ends an answer outside of {{% generation %}}, so the model does not learn it"
        if text[max(token_start, answer_end) : token_end].strip():
            break  # Visible text follows the answer before any special token.
    return (
        None,
        f"the chat template ends an answer with {text[answer_end : answer_end + 40]!r}, which is not one special token",
    )

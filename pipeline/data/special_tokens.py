"""Special tokens: which tokens a tokenizer adds to a text, and which token ends an answer of a dialogue.

Training, evaluation tasks, `generate` and `export` all use this module, so that prompts have the same form as the
training data.

The post-processor in `tokenizer.json` defines the added tokens: a beginning-of-sequence token (Llama, Mistral), none
(Qwen), or one before and one after the text (BERT). transformers adds them to every text that it encodes with the
default `add_special_tokens=True`. It adds none to a rendered chat template, which contains its own special tokens.
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
"""Contents of trial messages. A template has no reason to change them, so they can be found in its text."""


def load_tokenizer(file: Path, eos_token: str | None = None) -> Tokenizer:
    """Load a `tokenizer.json`, and disable truncation and padding.

    Args:
        file: the file.
        eos_token: a token that becomes a special token, even if it is not one in the file.

    Raises:
        UserError: the file cannot be read; the message names it.
    """
    try:
        tokenizer = Tokenizer.from_str(file.read_text())
    except Exception as error:  # the package raises bare Exception for a file that it does not understand
        raise UserError("data.invalid_tokenizer", f"{file} is not a readable tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if eos_token is not None and tokenizer.token_to_id(eos_token) is not None:
        tokenizer.add_special_tokens([AddedToken(eos_token, special=True, normalized=False)])  # keeps its id
    return tokenizer


def get_added_tokens(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the tokenizer's post-processor adds before a text, and those that it adds after it."""
    # this tokenizer encodes any text as one token; the post-processor adds the same ids as with its own tokenizer
    trial_tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if tokenizer.post_processor is not None:
        trial_tokenizer.post_processor = tokenizer.post_processor
    encoding = trial_tokenizer.encode("a")
    text_index = encoding.special_tokens_mask.index(0)
    return tuple(encoding.ids[:text_index]), tuple(encoding.ids[text_index + 1 :])


def encode_prompt(tokenizer: Tokenizer, text: str, bos_ids: Sequence[int]) -> list[int]:
    """Return the token ids of a text that the model continues: `bos_ids`, followed by the text.

    `bos_ids` are not repeated if the text begins with them. The tokens that the tokenizer adds after a text are
    omitted, because they would end it.
    """
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids if ids[: len(bos_ids)] == list(bos_ids) else [*bos_ids, *ids]


def encode_chat_prompt(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, str]]
) -> list[int]:
    """Return the token ids of a dialogue up to the start of an answer, as `apply_chat_template` of transformers does.

    The names of special tokens are encoded as these tokens, also inside a message.

    Raises:
        UserError: the template fails on the dialogue.
    """
    try:
        text, _ = split_marks(template.render(messages, add_generation_prompt=True))
    except ChatTemplateError as error:
        raise UserError(
            "data.unusable_dialogue", f"--chat: the chat template does not accept these messages: {error}"
        ) from None
    tokenizer.encode_special_tokens = False
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


class EndOfTurn(NamedTuple):
    """The token that a chat template writes after an answer."""

    ids: tuple[int, ...]
    """The token that ends an answer; several if it depends on the dialogue, none if it cannot be determined."""
    problem: str
    """The reason why a model does not learn to stop there; empty if it does."""


def find_end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> EndOfTurn:
    """Return the token that ends the assistant's answers in the text of a chat template.

    The template renders a dialogue of one question and answer, and one of two.
    """
    end_tokens: dict[int, None] = {}  # dictionaries are used as sets with an order
    problems: dict[str, None] = {}
    encode_special_tokens_before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = False  # encode names of special tokens as these tokens, as in training
    for turns in (1, 2):
        pairs = zip(_QUESTIONS[:turns], _ANSWERS[:turns], strict=True)
        messages = [{"role": role, "content": text} for pair in pairs for role, text in zip(_ROLES, pair, strict=True)]
        try:
            text, spans = split_marks(template.render(messages))
        except ChatTemplateError as error:
            if turns == 1:
                problems[f"the chat template does not accept a question and an answer: {error}"] = None
            continue
        for number, answer in enumerate(_ANSWERS[:turns], 1):
            token, problem = _find_end_token(tokenizer, text, spans if template.has_marks else None, answer)
            if number < turns and (problem or not template.has_marks):
                continue  # the token that follows may be the start of the next message
            if token is not None:
                end_tokens[token] = None
            if problem:
                problems[problem] = None
    tokenizer.encode_special_tokens = encode_special_tokens_before
    return EndOfTurn(tuple(end_tokens), next(iter(problems), ""))


def _find_end_token(
    tokenizer: Tokenizer, text: str, learned_spans: Sequence[tuple[int, int]] | None, answer: str
) -> tuple[int | None, str]:
    """Return the special token that ends an answer in a rendered dialogue, and a problem with it.

    Args:
        tokenizer: encodes the dialogue.
        text: the rendered dialogue without marks.
        learned_spans: the marked character spans [start, end); None if the template marks nothing, so that the model
            learns everything after the answer.
        answer: the answer.

    Returns:
        The token id, None if it cannot be determined; and why the model does not learn it, "" if it does.
    """
    answer_start = text.rfind(answer)
    if answer_start < 0:
        return None, "the chat template does not write an answer unchanged"
    answer_end = answer_start + len(answer)
    encoding = tokenizer.encode(text, add_special_tokens=False)
    special_tokens = tokenizer.get_added_tokens_decoder()
    for token, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
        if last <= answer_end:
            continue
        if token in special_tokens:
            # the same condition as in Encoder.encode_records
            if learned_spans is None or any(first < stop and start < last for start, stop in learned_spans):
                return token, ""
            name = special_tokens[token].content
            return token, f"{name} ends an answer outside of {{% generation %}}, so the model does not learn it"
        if text[max(first, answer_end) : last].strip():
            break
    return (
        None,
        f"the chat template ends an answer with {text[answer_end : answer_end + 40]!r}, which is not one special token",
    )

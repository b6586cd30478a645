"""Special tokens: which ones a tokenizer puts around a text, and which one closes an answer of a dialogue.

Training, evaluation tasks, `generate` and `export` all ask here, so that a prompt looks to the model as its training
data did.

`tokenizer.json` has a post-processor that says which tokens are added: a beginning-of-sequence token (Llama, Mistral),
none (Qwen), one before and one behind (BERT). transformers adds them to every text that it encodes with the default
`add_special_tokens=True`. It adds none to a rendered chat template, which writes its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, models

from pipeline.base.errors import UserError
from pipeline.data.chat_template import ChatTemplate, ChatTemplateError, split_marks

_ASKED, _ANSWERED = ("sluicequestionone", "sluicequestiontwo"), ("sluiceanswerone", "sluiceanswertwo")
"""Contents that a template has no reason to change, and that are found again in what it writes."""


def load_tokenizer(file: Path, eos_token: str | None = None) -> Tokenizer:
    """Load a `tokenizer.json`, without the truncation and padding that it may ask for.

    eos_token: a token that is special even if the file does not mark it so. Raises UserError naming a file that cannot
    be read.
    """
    try:
        tokenizer = Tokenizer.from_str(file.read_text())
    except Exception as error:  # the package raises bare Exception for a file that it does not understand
        raise UserError("data.invalid_tokenizer", f"{file} is no tokenizer.json that can be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if eos_token is not None and tokenizer.token_to_id(eos_token) is not None:
        tokenizer.add_special_tokens([AddedToken(eos_token, special=True, normalized=False)])  # keeps its id
    return tokenizer


def get_added_tokens(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the tokenizer's post-processor puts before a text, and those that it puts behind it."""
    probe = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))  # knows any text; the ids are the post-processor's own
    if tokenizer.post_processor is not None:
        probe.post_processor = tokenizer.post_processor
    encoding = probe.encode("a")
    place = encoding.special_tokens_mask.index(0)
    return tuple(encoding.ids[:place]), tuple(encoding.ids[place + 1 :])


def encode_prompt(tokenizer: Tokenizer, text: str, bos_ids: Sequence[int]) -> list[int]:
    """Return the tokens of a text that the model is to continue: `bos_ids`, once, and those of the text.

    Tokens that the tokenizer puts behind a text are left out: they would end it.
    """
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids if ids[: len(bos_ids)] == list(bos_ids) else [*bos_ids, *ids]


def encode_chat_prompt(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, str]]
) -> list[int]:
    """Return the tokens of a dialogue up to where an answer begins, as `apply_chat_template` of transformers does.

    Names of special tokens become these tokens, also in a message. Raises UserError if the template fails on it.
    """
    try:
        text, _ = split_marks(template.render(messages, add_generation_prompt=True))
    except ChatTemplateError as error:
        raise UserError(
            "data.unusable_dialogue", f"--chat: the chat template does not take these messages: {error}"
        ) from None
    tokenizer.encode_special_tokens = False
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


class EndOfTurn(NamedTuple):
    """What a chat template writes behind an answer."""

    ids: tuple[int, ...]
    """The token that closes an answer; several if that depends on the dialogue, none if it cannot be determined."""
    problem: str
    """Why a model does not learn to stop there; empty if it does."""


def find_end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> EndOfTurn:
    """Find the token that closes the assistant's answers in what the template writes."""
    found: dict[int, None] = {}
    problems: dict[str, None] = {}
    before, tokenizer.encode_special_tokens = tokenizer.encode_special_tokens, False  # names are tokens, as in training
    for turns in (1, 2):
        pairs = zip(_ASKED[:turns], _ANSWERED[:turns], strict=True)
        messages = [{"role": role, "content": text} for pair in pairs for role, text in zip(_ROLES, pair, strict=True)]
        try:
            text, spans = split_marks(template.render(messages))
        except ChatTemplateError as error:
            if turns == 1:
                problems[f"the chat template does not take a question and an answer: {error}"] = None
            continue
        for number, answer in enumerate(_ANSWERED[:turns], 1):
            token, problem = _closing(tokenizer, text, spans if template.has_marks else None, answer)
            if number < turns and (problem or not template.has_marks):
                continue  # what follows may begin the next message
            found |= {} if token is None else {token: None}
            problems |= {problem: None} if problem else {}
    tokenizer.encode_special_tokens = before
    return EndOfTurn(tuple(found), next(iter(problems), ""))


_ROLES = ("user", "assistant")


def _closing(
    tokenizer: Tokenizer, text: str, learned: Sequence[tuple[int, int]] | None, answer: str
) -> tuple[int | None, str]:
    """Return the special token that follows an answer in a rendered dialogue, and a problem with it.

    learned: the marked spans; None if the template marks nothing, so that all behind the answer is learned.
    """
    start = text.rfind(answer)
    if start < 0:
        return None, "the chat template does not write an answer as it stands"
    end = start + len(answer)
    encoding, special = tokenizer.encode(text, add_special_tokens=False), tokenizer.get_added_tokens_decoder()
    for token, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
        if last <= end:
            continue
        if token in special:
            if learned is None or any(first < other and one < last for one, other in learned):  # as in encode_records
                return token, ""
            name = special[token].content
            return token, f"{name} closes an answer outside of {{% generation %}}, so the model does not learn it"
        if text[max(first, end) : last].strip():
            break
    return None, f"the chat template closes an answer with {text[end : end + 40]!r}, which is not one special token"

"""The command `generate RUN|DIR "prompt"`: continue a text with a trained model, token by token.

It runs in one process with weights in fp32, on a GPU if there is one. Attention caches keys and values
(`Attention.past`), so each new token costs one pass over this token. A temperature of 0 selects the likeliest token, as
transformers' `generate(do_sample=False)` does. Otherwise tokens are sampled with temperature and `top_p` (nucleus
sampling, Holtzman et al., arXiv 1904.09751); the same seed gives the same text on the same machine.

A prompt gets the special tokens with which the model's training data begins (pipeline/data/special_tokens.py). With
`--chat` it is a user's message, which the chat template of the run, its source model or the folder formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from pipeline.base.errors import UserError
from pipeline.base.files import parse_json_or_none, read_json, translate_read_errors
from pipeline.checkpoint.catalog import open_intact_checkpoint
from pipeline.checkpoint.checkpointer import CheckpointReader, load_checkpoint
from pipeline.checkpoint.identity import read_source
from pipeline.checkpoint.model_tokens import find_model_tokens
from pipeline.config.hugging_face import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    list_weight_files,
    make_model_config,
    open_inside,
    read_inside,
    read_model_section,
    read_tokenizer_files,
)
from pipeline.config.sections import ModelConfig
from pipeline.data.chat_template import ChatTemplate, ChatTemplateError, find_template
from pipeline.data.manifest import CHAT_FILE, Manifest
from pipeline.data.special_tokens import (
    encode_chat_prompt,
    encode_prompt,
    find_end_of_turn,
    get_added_tokens,
    load_tokenizer,
)
from pipeline.data.verify_shards import load_run_manifest
from pipeline.model.decoder import Decoder, init_weights
from pipeline.model.open_weights import match_tensors, read_tensor_specs
from pipeline.model.spec import EMBEDDING
from pipeline.run.directory import Run

LoadedModel = tuple[Decoder, Tokenizer, list[int], list[int]]
"""The decoder with its weights, its tokenizer, the tokens that end a text, and the tokens of the prompt."""
Prompt = str | Sequence[Mapping[str, str]]
"""A text to continue, or the messages of a dialogue to answer."""


def generate_text(
    target: Path,
    prompt: str,
    *,
    step: str | None,
    most: int,
    temperature: float,
    top_p: float,
    seed: int,
    chat: bool = False,
    system: str | None = None,
) -> str:
    """Continue a prompt with at most `most` tokens, up to one that ends a text, and return both as text.

    Args:
        target: a run, or a folder in Hugging Face's format.
        step: the checkpoint of a run; None: the newest.
        temperature: 0 for greedy decoding.
        chat: the prompt is a user's message, after the `system` message if given; only the answer is returned.

    Raises UserError for invalid arguments, CheckpointError if the checkpoint is damaged.
    """
    if most < 1 or not 0 <= temperature < float("inf") or not 0 < top_p <= 1 or not 0 <= seed < 2**63:
        raise UserError(
            "cli.out_of_range",
            f"--max-tokens {most} --temperature {temperature} --top-p {top_p} --seed {seed}: the first is at least 1, "
            "the second not negative, the third above 0 and at most 1, the last from 0 to 2^63 - 1",
        )
    if system is not None and not chat:
        raise UserError("cli.conflict", "--system: a system message is for --chat: add --chat, or leave it out")
    message: Prompt = _as_text(prompt)
    if chat:
        first = [] if system is None else [{"role": "system", "content": _as_text(system)}]
        message = [*first, {"role": "user", "content": _as_text(prompt)}]
    is_run = (target / "config.yaml").exists() or not (target / CONFIG_FILE).exists()
    model, tokenizer, ends, ids = (_load_run if is_run else _load_folder)(target, message, step, most)
    generator = torch.Generator().manual_seed(seed)
    new = generate_tokens(
        model, ids, most, ends, lambda logits_V: choose_token(logits_V, temperature, top_p, generator)
    )
    text: str = tokenizer.decode(new if chat else [*ids, *new])  # without special tokens
    return text


def _as_text(argument: str) -> str:
    """Replace invalid characters, because a command line may contain any bytes."""
    return argument.encode(errors="replace").decode()


def choose_token(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Return the next token by its logits (fp32, shape (V,)): the likeliest if `temperature` is 0, else a sample."""
    if temperature == 0:
        return int(logits_V.argmax())
    shifted_V = (logits_V - logits_V.max()).double().cpu()  # at most 0, so that no temperature is too small
    likely, order = (shifted_V / temperature).softmax(-1).sort(descending=True)
    likely[likely.cumsum(-1) - likely >= top_p] = 0
    return int(order[torch.multinomial(likely, 1, generator=generator)])


@torch.inference_mode()
def generate_tokens(
    model: Decoder, ids: Sequence[int], most: int, ends: Sequence[int], choose: Callable[[Tensor], int]
) -> list[int]:
    """Return at most `most` tokens after `ids`; the last one may be in `ends`.

    Args:
        choose: returns a token by its logits (fp32, shape (V,)).
    """
    device = next(model.parameters()).device
    for block in model.model.blocks:
        attention = block.self_attn
        empty = torch.empty((1, attention.k_proj.out_features // attention.head_size, 0, attention.head_size))
        attention.past = empty.to(device), empty.to(device)
    new_ids: list[int] = []
    assert model.lm_head is not None
    while len(new_ids) < most and not (new_ids and new_ids[-1] in ends):
        input_BT = torch.tensor([new_ids[-1:] or list(ids)], device=device)
        new_ids.append(choose(model.lm_head(model.model(input_BT)[:, -1])[0]))
    return new_ids


def _load_run(path: Path, prompt: Prompt, step: str | None, most: int) -> LoadedModel:
    """Load a run's checkpoint."""
    run = Run.open(path)
    if run.config.model.target is not None:
        raise UserError(
            "model.no_text",
            f"{run.name} trains a model of its own ({run.config.model.target}), which generates no text",
        )
    eos_token = run.config.data.tokenizer.eos_token
    manifest, tokenizer = load_run_manifest(run), load_tokenizer(run.data_dir / TOKENIZER_FILE, eos_token)
    assert isinstance(manifest, Manifest)
    ids, turn_ends = _encode_prompt(tokenizer, prompt, manifest.bos_ids, lambda: _template_of_run(run))
    checkpoint, _ = open_intact_checkpoint(run, step)
    rows = CheckpointReader(checkpoint).read_metadata().state_dict_metadata[f"model.{EMBEDDING}"].size[0]  # type: ignore[union-attr]
    model = _allocate(_build_decoder(run.config.model, rows, ids, most), run.config.model)
    load_checkpoint({f"model.{name}": weight.detach() for name, weight in model.named_weights()}, checkpoint, None)
    return model, tokenizer, [*find_model_tokens(run, manifest, tokenizer).end_ids, *turn_ends], ids


def _load_folder(folder: Path, prompt: Prompt, step: str | None, most: int) -> LoadedModel:
    """Load a folder in Hugging Face's format."""
    if step is not None:
        raise UserError("cli.conflict", f"--step: {folder} is no run and has no checkpoints: leave it out")
    config = make_model_config(read_model_section(folder))
    with translate_read_errors(str(folder / TOKENIZER_FILE)), open_inside(folder, TOKENIZER_FILE) as file:
        tokenizer = load_tokenizer(file)
    begin = get_added_tokens(tokenizer)[0]
    ids, turn_ends = _encode_prompt(
        tokenizer, prompt, begin, lambda: _template_in(read_tokenizer_files(folder), f"{folder}")
    )
    model = _build_decoder(config, config.vocab_size or 0, ids, most)
    specs = {name: read_tensor_specs(folder, name) for name in list_weight_files(folder)}
    source = match_tensors(folder, specs, dict(model.named_weights()), is_tied=config.tie_word_embeddings)
    source.copy_into(_allocate(model, config).named_weights())
    return (
        model,
        tokenizer,
        [*_find_end_ids(read_inside(folder, CONFIG_FILE), read_tokenizer_files(folder)), *turn_ends],
        ids,
    )


def _encode_prompt(
    tokenizer: Tokenizer, prompt: Prompt, bos_ids: Sequence[int], template: Callable[[], ChatTemplate]
) -> tuple[list[int], tuple[int, ...]]:
    """Return the tokens of a prompt, and the tokens that end an answer in addition to those that end any text."""
    if isinstance(prompt, str):
        return encode_prompt(tokenizer, prompt, bos_ids), ()
    found = template()
    return encode_chat_prompt(tokenizer, found, prompt), find_end_of_turn(found, tokenizer).ids


def _template_of_run(run: Run) -> ChatTemplate:
    """Return the chat template that wrote a run's dialogues, or that of the model which it started from.

    Raises UserError if there is none.
    """
    if run.config.data.records == "messages":
        chat = read_json(run.data_dir / CHAT_FILE)
        return ChatTemplate(chat["template"], chat["tokens"])
    return _template_in(read_source(run).get("along", {}), run.name)


def _template_in(files: Mapping[str, str], where: str) -> ChatTemplate:
    """Return the chat template among the files that go with a tokenizer. Raises UserError if there is none."""
    names = ("special_tokens_map.json", "tokenizer_config.json")
    mapping, settings = (parse_json_or_none(files.get(name, "").encode()) for name in names)
    given = {**(mapping if isinstance(mapping, dict) else {}), **(settings if isinstance(settings, dict) else {})}
    template, tokens = find_template(given, files.get("chat_template.jinja"))
    if template is None:
        raise UserError(
            "data.no_chat_template",
            f"--chat: {where} has no chat template, neither in chat_template.jinja nor in tokenizer_config.json: leave "
            "--chat out and write the whole prompt",
        )
    found = ChatTemplate(template, tokens)
    try:
        found.compile()
    except ChatTemplateError as error:
        raise UserError(
            "data.invalid_chat_template", f"--chat: the chat template of {where} cannot be used: {error}"
        ) from None
    return found


def _find_end_ids(config: Any, files: Mapping[str, str]) -> list[Any]:
    """Return the tokens that end a text, by generation_config.json among `files`, otherwise by `config`."""
    configs = [config, parse_json_or_none(files.get("generation_config.json", "").encode())]
    found = [one["eos_token_id"] for one in configs if isinstance(one, dict) and "eos_token_id" in one]
    return (found[-1] if isinstance(found[-1], list) else found[-1:]) if found else []


def _build_decoder(config: ModelConfig, vocab_size: int, ids: Sequence[int], most: int) -> Decoder:
    """Build the decoder on the device `meta`. Raises UserError if the prompt has unknown or too many tokens."""
    length = len(ids) + most
    if not ids or max(ids) >= vocab_size:
        raise UserError(
            "model.prompt_out_of_range",
            f"the prompt has {len(ids)} tokens, and the model knows the ids below {vocab_size}: write another",
        )
    if config.sliding_window is not None and length > config.sliding_window:
        raise UserError(
            "model.prompt_too_long",
            f"--max-tokens: {length} tokens are more than model.sliding_window ({config.sliding_window})",
        )
    with torch.device("meta"):
        return Decoder(config, vocab_size, length)


def _allocate(model: Decoder, config: ModelConfig) -> Decoder:
    """Allocate the memory of a decoder, with weights of zero."""
    model.to_empty(device="cuda" if torch.cuda.is_available() else "cpu").eval()
    init_weights(model, None, config.initializer_range)
    return model

"""The command `generate RUN|DIR "prompt"`: continue a text with a trained model, token by token.

The command runs in one process with weights in fp32, on a GPU if there is one. Attention caches keys and values
(`Attention.past`), so a new token needs a forward pass over the previous token only. A temperature of 0 selects the
most likely token, as transformers' `generate(do_sample=False)` does. Otherwise, tokens are sampled with temperature and
`top_p` (nucleus sampling, Holtzman et al., arXiv 1904.09751). The same seed gives the same text on the same machine.

A prompt begins with the special tokens with which the training documents begin (pipeline/data/special_tokens.py). With
`--chat`, the prompt is a user's message, which a chat template formats. The template comes from the run, from its
initial model, or from the model folder.
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
from pipeline.checkpoint.checkpointer import find_weights, load_checkpoint
from pipeline.checkpoint.identity import read_source
from pipeline.checkpoint.model_tokens import find_model_tokens
from pipeline.config.hugging_face import (
    CONFIG_FILE,
    TOKENIZER_FILE,
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
from pipeline.model import lora
from pipeline.model.decoder import Decoder, init_weights
from pipeline.model.open_weights import open_folder, open_unchanged_folder
from pipeline.model.spec import EMBEDDING
from pipeline.model.task import DTYPES
from pipeline.model.transformers_model import TransformersModel, build_model
from pipeline.publish.export import require_averages
from pipeline.run.directory import Run

LanguageModel = Decoder | TransformersModel
"""The model that generates a text."""
LoadedModel = tuple[LanguageModel, Tokenizer, list[int], list[int]]
"""The model with its weights, the tokenizer, the IDs of tokens that end a text, and the token IDs of the prompt."""
Prompt = str | Sequence[Mapping[str, str]]
"""A text to continue, or the messages of a dialogue to answer."""


def generate_text(
    target: Path,
    prompt: str,
    *,
    step: str | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    ema: bool = False,
    chat: bool = False,
    system: str | None = None,
) -> str:
    """Return the prompt and its continuation as text; with `chat`, only the answer.

    Args:
        target: a run directory, or a model folder in Hugging Face's format.
        prompt: the text to continue; with `chat`, a user's message.
        step: the step of the run's checkpoint; None for the newest checkpoint.
        max_tokens: the maximum number of new tokens. Generation also ends at a token that ends a text.
        temperature: the temperature of sampling; 0 for greedy decoding.
        top_p: tokens are sampled from the most likely tokens with this total probability.
        seed: the seed of sampling.
        ema: whether to use the moving average of the run's weights (`train.ema`).
        chat: whether to format the prompt with the chat template.
        system: the system message before the prompt; requires `chat`.

    Raises:
        UserError: if an argument is invalid, or the model or the chat template cannot be used.
        CheckpointError: if the checkpoint is damaged.
    """
    if max_tokens < 1 or not 0 <= temperature < float("inf") or not 0 < top_p <= 1 or not 0 <= seed < 2**63:
        raise UserError(
            "cli.out_of_range",
            f"--max-tokens {max_tokens} --temperature {temperature} --top-p {top_p} --seed {seed}: out of range. "
            "--max-tokens must be at least 1, --temperature at least 0, --top-p above 0 and at most 1, --seed from 0 "
            "to 2^63 - 1",
        )
    if system is not None and not chat:
        raise UserError("cli.conflict", "--system requires --chat: add --chat, or remove --system")
    message: Prompt = _replace_invalid_characters(prompt)
    if chat:
        message = [{"role": "user", "content": _replace_invalid_characters(prompt)}]
        if system is not None:
            message = [{"role": "system", "content": _replace_invalid_characters(system)}, *message]
    # If `target` is neither a run nor a model folder, `Run.open` raises an error that says so.
    is_run = (target / "config.yaml").exists() or not (target / CONFIG_FILE).exists()
    model, tokenizer, end_ids, ids = (_load_run if is_run else _load_folder)(target, message, step, max_tokens, ema)
    generator = torch.Generator().manual_seed(seed)
    new_ids = generate_tokens(
        model, ids, max_tokens, end_ids, lambda logits_V: choose_token(logits_V, temperature, top_p, generator)
    )
    text: str = tokenizer.decode(new_ids if chat else [*ids, *new_ids])  # This omits special tokens.
    return text


def _replace_invalid_characters(argument: str) -> str:
    """Return a command-line argument with `?` in place of bytes that are not valid UTF-8."""
    return argument.encode(errors="replace").decode()


def choose_token(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Return the ID of the next token: a sample, or the most likely token if `temperature` is 0.

    Args:
        logits_V: the logits of the next token (fp32, shape (V,)).
        temperature: the temperature of sampling.
        top_p: tokens are sampled from the most likely tokens with this total probability.
        generator: the random generator.
    """
    if temperature == 0:
        return int(logits_V.argmax())
    shifted_V = (logits_V - logits_V.max()).double().cpu()  # Values are at most 0, so no temperature causes overflow.
    probabilities, order = (shifted_V / temperature).softmax(-1).sort(descending=True)
    # A token is left out if the more likely tokens together already have the probability `top_p`.
    probabilities[probabilities.cumsum(-1) - probabilities >= top_p] = 0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


@torch.inference_mode()
def generate_tokens(
    model: LanguageModel, ids: Sequence[int], max_tokens: int, end_ids: Sequence[int], choose: Callable[[Tensor], int]
) -> list[int]:
    """Return the IDs of at most `max_tokens` new tokens. The last ID may be in `end_ids`.

    Args:
        model: the language model.
        ids: the token IDs of the prompt.
        max_tokens: the maximum number of new tokens.
        end_ids: the IDs of tokens that end generation.
        choose: a function that returns the ID of the next token, given its logits (fp32, shape (V,)).
    """
    device = next(model.parameters()).device
    predict = model.predict_next if isinstance(model, TransformersModel) else _start_cache(model)
    new_ids: list[int] = []
    while len(new_ids) < max_tokens and not (new_ids and new_ids[-1] in end_ids):
        # The first forward pass has the whole prompt. Each later pass has only the newest token.
        input_BT = torch.tensor([new_ids[-1:] or list(ids)], device=device)
        new_ids.append(choose(predict(input_BT)[0]))
    return new_ids


def _start_cache(model: Decoder) -> Callable[[Tensor], Tensor]:
    """Return a function from the next inputs (int64, (B, T)) to the logits of the next token (fp32, (B, V)).

    The model remembers keys and values of earlier inputs.
    """
    for block in model.model.blocks:
        attention = block.self_attn
        kv_heads = attention.k_proj.out_features // attention.head_size
        empty_cache = torch.empty((1, kv_heads, 0, attention.head_size), device=attention.k_proj.weight.device)
        attention.past = empty_cache, empty_cache
    output_layer = model.lm_head
    assert output_layer is not None

    def predict(input_BT: Tensor) -> Tensor:
        logits_BV: Tensor = output_layer(model.model(input_BT)[:, -1])
        return logits_BV

    return predict


def _load_run(path: Path, prompt: Prompt, step: str | None, max_tokens: int, ema: bool = False) -> LoadedModel:
    """Load a checkpoint of a run and encode the prompt. The result is as documented for `LoadedModel`."""
    run = Run.open(path)
    if run.config.model.target is not None:
        raise UserError(
            "model.no_text",
            f"{run.name} trains a custom model ({run.config.model.target}), which cannot generate text",
        )
    if ema:
        require_averages(run)
    eos_token = run.config.data.tokenizer.eos_token
    manifest = load_run_manifest(run)
    tokenizer = load_tokenizer(run.data_dir / TOKENIZER_FILE, eos_token)
    assert isinstance(manifest, Manifest)
    ids, end_of_turn_ids = _encode_prompt(tokenizer, prompt, manifest.bos_ids, lambda: _find_template_of_run(run))
    checkpoint, _ = open_intact_checkpoint(run, step)
    stored_weights = find_weights(checkpoint, averaged=ema)
    vocab_size = run.config.model.vocab_size or stored_weights[EMBEDDING][1][0]
    model = _build_model(run.config.model, vocab_size, ids, max_tokens)
    base = dict(model.named_weights())
    if (adapter := run.config.adapter) is not None:
        # Weights that are quantized must have the type from which they were quantized in training.
        dtype = None if adapter.base is None else DTYPES.get(run.config.train.precision)
        lora.add_adapters(model.model if isinstance(model, TransformersModel) else model, adapter, dtype)
    device = _allocate(model, run.config.model)
    saved = dict(model.named_weights())
    if adapter is not None:  # The checkpoint has only the adapter.
        weights = [(name, saved[name]) for name in base]
        open_unchanged_folder(run, base).copy_into(lora.quantize_copied(model, weights, device))
        saved = {name: weight for name, weight in saved.items() if name not in base}
    state = {stored_weights[name][0]: weight.detach() for name, weight in saved.items()}
    load_checkpoint(state, checkpoint, group=None)
    return model, tokenizer, [*find_model_tokens(run, manifest, tokenizer).end_ids, *end_of_turn_ids], ids


def _load_folder(folder: Path, prompt: Prompt, step: str | None, max_tokens: int, ema: bool = False) -> LoadedModel:
    """Load a model folder in Hugging Face's format and encode the prompt. The result is as in `_load_run`."""
    for option, is_given in (("--step", step is not None), ("--ema", ema)):
        if is_given:
            raise UserError("cli.conflict", f"{option}: {folder} is not a run and has no checkpoints: remove {option}")
    config = make_model_config({**read_model_section(folder), "init_from": folder})
    with translate_read_errors(str(folder / TOKENIZER_FILE)), open_inside(folder, TOKENIZER_FILE) as file:
        tokenizer = load_tokenizer(file)
    bos_ids, _ = get_added_tokens(tokenizer)
    ids, end_of_turn_ids = _encode_prompt(
        tokenizer, prompt, bos_ids, lambda: _find_template_in_files(read_tokenizer_files(folder), f"{folder}")
    )
    # `vocab_size` is never None, because config.json requires this key.
    model = _build_model(config, config.vocab_size or 0, ids, max_tokens)
    weights = open_folder(config, dict(model.named_weights()))
    _allocate(model, config)
    weights.copy_into(model.named_weights())
    end_ids = _find_end_ids(read_inside(folder, CONFIG_FILE), read_tokenizer_files(folder))
    return model, tokenizer, [*end_ids, *end_of_turn_ids], ids


def _encode_prompt(
    tokenizer: Tokenizer, prompt: Prompt, bos_ids: Sequence[int], get_template: Callable[[], ChatTemplate]
) -> tuple[list[int], tuple[int, ...]]:
    """Return the token IDs of a prompt, and the IDs of tokens that end an answer of a dialogue; () for a text.

    `get_template` returns the chat template. It is called only for a dialogue.
    """
    if isinstance(prompt, str):
        return encode_prompt(tokenizer, prompt, bos_ids), ()
    template = get_template()
    return encode_chat_prompt(tokenizer, template, prompt), find_end_of_turn(template, tokenizer).ids


def _find_template_of_run(run: Run) -> ChatTemplate:
    """Return the chat template of a run's dialogues; if the run has no dialogues, the template of its initial model.

    Raises UserError if the run has no dialogues and its initial model has no usable template.
    """
    if run.config.data.records == "messages":
        chat = read_json(run.data_dir / CHAT_FILE)
        return ChatTemplate(chat["template"], chat["tokens"])
    return _find_template_in_files(read_source(run).get("along", {}), run.name)


def _find_template_in_files(files: Mapping[str, str], owner: str) -> ChatTemplate:
    """Return the chat template in the files of a tokenizer.

    Args:
        files: name of a file → its text.
        owner: the run or the folder to which the files belong, for messages.

    Raises:
        UserError: if there is no template, or the template cannot be compiled.
    """
    names = ("special_tokens_map.json", "tokenizer_config.json")
    values = [parse_json_or_none(files.get(name, "").encode()) for name in names]
    settings = {key: value for content in values if isinstance(content, dict) for key, value in content.items()}
    source, tokens = find_template(settings, files.get("chat_template.jinja"))
    if source is None:
        raise UserError(
            "data.no_chat_template",
            f"--chat: {owner} has no chat template, neither in chat_template.jinja nor in tokenizer_config.json: "
            "remove --chat and write the whole prompt",
        )
    template = ChatTemplate(source, tokens)
    try:
        template.compile()
    except ChatTemplateError as error:
        raise UserError(
            "data.invalid_chat_template", f"--chat: the chat template of {owner} cannot be used: {error}"
        ) from None
    return template


def _find_end_ids(config: Any, files: Mapping[str, str]) -> list[Any]:
    """Return the IDs of tokens that end a text: from generation_config.json, otherwise from config.json.

    Args:
        config: the content of config.json.
        files: name of a file of the tokenizer → its text.
    """
    configs = [parse_json_or_none(files.get("generation_config.json", "").encode()), config]
    for content in configs:
        if isinstance(content, dict) and "eos_token_id" in content:
            end_ids = content["eos_token_id"]
            return end_ids if isinstance(end_ids, list) else [end_ids]
    return []


def _build_model(config: ModelConfig, vocab_size: int, ids: Sequence[int], max_tokens: int) -> LanguageModel:
    """Return the model, built on the meta device.

    Raises UserError if the prompt is empty, or has token IDs outside the vocabulary.
    """
    length = len(ids) + max_tokens
    if not ids or max(ids) >= vocab_size:
        raise UserError(
            "model.prompt_out_of_range",
            f"the prompt has {len(ids)} tokens, but it needs at least one, and all ids must be below {vocab_size}, the "
            "vocabulary size of the model: change the prompt",
        )
    if config.backend == "transformers":
        return TransformersModel(build_model(config))
    with torch.device("meta"):
        return Decoder(config, vocab_size, length)


def _allocate(model: LanguageModel, config: ModelConfig) -> torch.device:
    """Allocate the memory of a model that was built on the meta device, and return the device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lora.allocate(model, device)
    model.eval()
    if isinstance(model, TransformersModel):
        model.restore_after_allocation(device)
    else:
        init_weights(model, None, config.initializer_range)
    return device

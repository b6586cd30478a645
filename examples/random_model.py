"""Save a small language model with random weights and its tokenizer, to try a config without a download.

    .venv/bin/python examples/random_model.py gemma3_text gemma TEXT_FILE…

The script needs the package transformers. The directory `gemma` then has the files of a model in Hugging Face's format.
The tokenizer is trained on the text.
"""

from __future__ import annotations

import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512


def main(family: str, folder: str, *files: str) -> None:
    """Save a model of the family, such as `llama`, `gemma3_text` or `olmo2`."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train(list(files), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    config = AutoConfig.for_model(
        family, vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=0,
        pad_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(f"usage: {sys.argv[0]} FAMILY DIRECTORY TEXT_FILE…")
    main(*sys.argv[1:])

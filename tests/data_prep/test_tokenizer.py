"""Tests of the tokenizer.

Encoding and decoding return the same text, no text is encoded as the end-of-text ID, and training always gives the
same tokenizer.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from data_prep.prepare_text import prepare_tokenizer_and_units
from data_prep.tokenizer import Encoder, load_encoder, train_bpe
from pipeline.config.datasets import DataConfig, TokenizerConfig
from pipeline.run.code import CODE_ROOT as ROOT
from tests.support.errors import raises_error

EOS = "<|endoftext|>"
SAMPLE = [Path(__file__).read_text(), "é漢😀 " * 20]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    """Return the encoder of a small trained BPE."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_bpe(SAMPLE, 400, EOS))
    return load_encoder(path, EOS)


@settings(max_examples=200)
@given(parts=st.lists(st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.just(EOS))))
def test_text_survives_a_round_trip_without_the_end_of_text_id(encoder: Encoder, parts: list[str]) -> None:
    text = "".join(parts)
    (tokens,) = encoder.encode([text])
    assert tokens[-1] == encoder.eos_id and encoder.eos_id not in tokens[:-1]
    assert encoder.tokenizer.decode(tokens[:-1].tolist(), skip_special_tokens=False) == text


def test_texts_of_a_batch_have_the_same_tokens_as_single_texts(encoder: Encoder) -> None:
    texts = ["", "def f():\n    return", EOS, "é漢😀" * 50]
    for tokens, text in zip(encoder.encode(texts), texts, strict=True):
        assert tokens.dtype == np.uint16
        assert tokens.tolist() == [*encoder.tokenizer.encode(text, add_special_tokens=False).ids, encoder.eos_id]


def test_a_trained_tokenizer_has_the_end_of_text_token_and_all_bytes(encoder: Encoder) -> None:
    assert (encoder.eos_id, encoder.vocab_size) == (0, 400)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert {encoder.tokenizer.id_to_token(index) for index in range(1, 257)} == set(alphabet)


def test_training_gives_the_same_tokenizer_in_every_process(encoder: Encoder) -> None:
    script = (
        "import sys; from pathlib import Path; from data_prep.tokenizer import train_bpe\n"
        f"sys.stdout.write(train_bpe([Path({__file__!r}).read_text(), {SAMPLE[1]!r}], 400, {EOS!r}))"
    )
    expected = train_bpe(SAMPLE, 400, EOS)
    for threads in ("1", "2"):
        environment = {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads, "PYTHONUTF8": "1"}
        child = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, env=environment, timeout=240, capture_output=True, check=True
        )
        assert child.stdout.decode() == expected


def save_tokenizer_file(tokenizer: Tokenizer, path: Path) -> Path:
    """Write the file of a tokenizer and return its path."""
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_file_keeps_its_ids_and_its_padding_and_truncation_are_ignored(tmp_path: Path) -> None:
    user_tokenizer = Tokenizer.from_str(train_bpe(SAMPLE, 300, "<s>"))
    user_tokenizer.add_tokens([AddedToken("</s>", special=False, normalized=False)])
    user_tokenizer.enable_truncation(4)
    user_tokenizer.enable_padding(length=64)
    encoder = load_encoder(save_tokenizer_file(user_tokenizer, tmp_path / "t.json"), "</s>")
    assert (encoder.eos_id, encoder.vocab_size, encoder.dtype) == (300, 301, "uint16")
    short, long = encoder.encode(["a</s>", "longer than four tokens </s> 0123456789"])
    assert 300 not in [*short[:-1], *long[:-1]], "text was encoded as the end-of-text ID"
    assert len(short) == 6 and len(long) > 10


def test_tokens_are_uint32_if_the_vocabulary_has_more_than_65536_ids(tmp_path: Path) -> None:
    for size, dtype in ((65536, "uint16"), (65537, "uint32")):
        vocab = {f"w{i}": i for i in range(size - 1)} | {EOS: size - 1}
        word_level = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
        word_level.pre_tokenizer = pre_tokenizers.Whitespace()
        encoder = load_encoder(save_tokenizer_file(word_level, tmp_path / "words.json"), EOS)
        assert (encoder.vocab_size, encoder.dtype) == (size, dtype)
        assert encoder.encode([f"w1 w{size - 2}"])[0].tolist() == [1, size - 2, size - 1]


def test_a_missing_invalid_or_unsuitable_tokenizer_is_an_error(tmp_path: Path) -> None:
    with raises_error("data.no_tokenizer", "data.tokenizer.path", tmp_path / "none.json"):
        load_encoder(tmp_path / "none.json", EOS)
    with raises_error("data.no_tokenizer", "data.tokenizer.path", tmp_path, "folder"):
        load_encoder(tmp_path, EOS)
    for content in ("{}", "not json", '{"model": 3}'):
        (tmp_path / "broken.json").write_text(content)
        with raises_error("data.invalid_tokenizer", tmp_path / "broken.json", "AutoTokenizer"):
            load_encoder(tmp_path / "broken.json", EOS)
    path = save_tokenizer_file(Tokenizer.from_str(train_bpe(SAMPLE, 300, "<s>")), tmp_path / "other.json")
    with raises_error("data.no_eos_token", path, EOS, "data.tokenizer.eos_token"):
        load_encoder(path, EOS)
    lowercase = Tokenizer(models.WordLevel({"end": 0, "other": 1}, unk_token="other"))
    lowercase.normalizer = normalizers.Lowercase()
    with raises_error("data.ambiguous_eos_token", "words.json", "'end'"):
        load_encoder(save_tokenizer_file(lowercase, tmp_path / "words.json"), "end")


def test_unknown_tokens_are_reported_and_more_than_one_percent_is_an_error(tmp_path: Path) -> None:
    """Unknown text is lost, so many unknown tokens would make bits per byte look too good."""
    word_piece = Tokenizer(models.WordPiece({"[UNK]": 0, EOS: 1, "known": 2}, unk_token="[UNK]"))
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), (EOS, -1.0), ("known", -1.0)], unk_id=0))
    source = tmp_path / "a.txt"
    for tokenizer in (word_piece, unigram):
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        path = save_tokenizer_file(tokenizer, tmp_path / "words.json")
        for unknown in (0, 1, 5):  # of 300 words
            source.write_text(" ".join(["known"] * (300 - unknown) + ["слово"] * unknown))
            tokenizer_config = TokenizerConfig(kind="file", path=path, eos_token=EOS)
            data = DataConfig(source=str(source), tokenizer=tokenizer_config, held_out=0)
            log: list[str] = []
            if unknown == 5:
                with raises_error("data.unknown_text", "1.66%", "kind: byte_bpe"):
                    prepare_tokenizer_and_units(data, tmp_path, log.append, None)
                continue
            prepare_tokenizer_and_units(data, tmp_path, log.append, None)
            assert ("0.33%" in "\n".join(log)) == bool(unknown)

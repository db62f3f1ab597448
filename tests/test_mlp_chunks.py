"""The MLP half in chunks: what keeps its bits, what is rounded otherwise and by how much; what a
chunk is, what that takes, and what refuses or proposes it."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from cases.shapes import CONFIG
from harness.answers import ask, parse, question, run
from harness.planned import measured_peak, planner
from harness.runs import metrics, snapshot, train_here
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from memory import policies
from memory.policies import sizes_of_chunks
from model import Block, MiniGPT
from scripts.plan_table import Row
from trainer.flags import changed, words_of
from trainer.knobs import CHUNKED, next_knob

pytestmark = pytest.mark.usefixtures("everything_travels")

T = 321  # five chunks of 64 tokens, and one token more
WAYS = ["mlp", "sdpa", "full", "full/2", "full/2+nested", "full:3,cheap", "mlp:2,sdpa"]
WAYS += [f"{way}+offload" for way in ("mlp", "sdpa", "full", "full/3+nested")]
SIX = ("ln_2.weight", "ln_2.bias", *(f"mlp.{of}" for of in ("c_fc.weight", "c_fc.bias")))
SIX += ("mlp.c_proj.weight", "mlp.c_proj.bias")
LONG = replace(CONFIG, max_position_embeddings=T, vocab_size=61, d_ff=512)


@cache
def gradients(way: str, chunks: int, kind: str, dropout: float, cache: bool = False):
    """The loss, and all gradients by name."""
    torch.manual_seed(0)
    config = replace(LONG, recompute=way, mlp_chunks=chunks, dropout=dropout)
    model = MiniGPT(config).to(torch.float64 if kind == "fp64" else torch.float32).train()
    torch.manual_seed(1)
    ids = torch.randint(61, (2, T))
    low = torch.autocast("cpu", torch.bfloat16, enabled=kind == "bf16", cache_enabled=cache)
    with low:
        loss = model(ids, ids.roll(-1, 1))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of the six gradients of all blocks together, relative."""
    six = [name for name in found if name.endswith(SIX)]
    assert len(six) == 6 * LONG.n_layers
    wrong = torch.stack([(found[name] - expected[name]).double().norm() for name in six])
    return (
        wrong.norm() / torch.stack([expected[name].double().norm() for name in six]).norm()
    ).item()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["fp64", "fp32", "bf16"])
def test_all_but_six_gradients_a_block_keep_their_bits(kind, dropout):
    """With dropout, too: none is in the MLP half itself, so the masks are those of `none`. The six
    are the same in all ways that cut all blocks, and as far from the truth as before."""
    loss, whole = gradients("none", 1, kind, dropout)
    _, first = gradients("full", 5, kind, dropout)
    for way in WAYS:
        loss_of_chunks, found = gradients(way, 5, kind, dropout)
        assert torch.equal(loss_of_chunks, loss), way
        rest = [name for name in whole if not name.endswith(SIX)]
        assert all(torch.equal(found[name], whole[name]) for name in rest), way
        if "cheap" not in way:
            assert all(torch.equal(found[name], first[name]) for name in found), way
    assert 0 < error(first, whole) < {"fp64": 1e-12, "fp32": 2e-6, "bf16": 1e-2}[kind]
    if not dropout:
        _, truth = gradients("none", 1, "fp64", 0.0)
        assert error(first, truth) <= 1.05 * error(whole, truth) + (kind == "fp64")


def test_autocasts_cache_would_sum_up_in_its_precision(tmp_path, monkeypatch):
    """So a trainer has it off while the chunks run."""
    _, truth = gradients("none", 1, "fp64", 0.0)
    off, on = (error(gradients("full", 5, "bf16", 0.0, it)[1], truth) for it in (False, True))
    assert on > 1.05 * off
    feed_forward, caches = Block.feed_forward, set()

    def spy(block: Block, x: Tensor) -> Tensor:
        caches.add((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
        return feed_forward(block, x)

    monkeypatch.setattr(Block, "feed_forward", spy)
    flags = "--amp-dtype=bfloat16 --use-activation-checkpoint --mlp-chunks=2 --num-steps=1"
    assert train_here(tmp_path / "run.pt", *flags.split()) == 0
    assert {cache for in_low, cache in caches if in_low} == {
        False
    }  # (the check at the start has none)


@settings(deadline=None, derandomize=True)
@given(some.integers(1, 10**6), some.integers(1, 10**5), some.integers(0, 100))
def test_sizes_of_chunks(n_tokens, d_ff, asked):
    """All but the last are as long; none has a few rows; there are as many as asked, or fewer."""
    *before, last = sizes_of_chunks(n_tokens, d_ff, asked)
    assert sum(before) + last == n_tokens and len({*before}) <= 1
    assert all(size % 64 == 0 and last < size + 64 for size in before) and last >= min(64, n_tokens)
    assert len(before) < (asked or n_tokens)
    if n_tokens >= 128 and asked > 1:
        assert before
    if not asked:  # as many as keep each of them small
        assert (before or [last])[0] * d_ff <= max(policies.WIDE, 64 * d_ff) + 64 * d_ff


@pytest.mark.parametrize(
    ("way", "precision", "chunks"),
    [("mlp", "fp32", 5), ("sdpa", "bf16", 5), ("full/2", "bf16", 4), ("full+offload", "fp32", 3)]
    + [pytest.param("full/2+nested", "fp32", 5, marks=pytest.mark.slow)],
)
def test_a_few_chunks_tell_what_a_real_step_takes(way, precision, chunks, monkeypatch):
    """To the byte; and the work is that of all chunks."""
    config = replace(LONG, recompute=way, mlp_chunks=chunks)
    few = planner(config, precision, seq_len=T).step(2)
    assert few.peak == measured_peak(config, 2, precision, seq_len=T, by_ours=True)
    monkeypatch.setattr("planner.step.few_of", lambda n: [1] * n)
    every = planner(config, precision, seq_len=T).step(2)
    assert few.peak == every.peak
    for which in (few.work, every.work):
        assert which.times.sum() == pytest.approx(every.work.times.sum(), rel=0.01)
        assert which.times @ which.flops == every.work.times @ every.work.flops


def test_a_run_may_change_them_when_it_goes_on(tmp_path, capsys):
    """And a snapshot that was written before there were any has none."""
    path, whole = tmp_path / "run.pt", tmp_path / "whole.pt"
    flags = "--use-activation-checkpoint --seq-len=128 --lr-scheduler=constant --warmup-steps=0"
    assert train_here(path, *flags.split(), "--num-steps=2") == 0
    state = snapshot(path)
    assert state["config"].pop("mlp_chunks") == state["args"].pop("mlp_chunks") == 1
    torch.save(state, path)
    assert train_here(path, "--resume", "--num-steps=4", "--mlp-chunks=2", base=[]) == 0
    assert snapshot(path)["config"]["mlp_chunks"] == 2
    assert train_here(whole, *flags.split(), "--num-steps=4") == 0
    losses, expected = ([line["train_loss"] for line in metrics(it)[-2:]] for it in (path, whole))
    assert losses == pytest.approx(expected, rel=1e-4)


def test_the_way_out_names_them():
    """Where all that changes nothing is done, and only of what is long."""
    flags = "--batch-size 1 --seq-len 20000 --use-activation-checkpoint full/2+nested --d-model 512"
    said = next_knob(parse(flags), torch.device("cpu"), None)
    assert said.endswith("try --mlp-chunks 0 (other rounding of six gradients a block)")
    for more in ("--mlp-chunks 4", "--seq-len 8000", "--compile"):
        assert "mlp" not in next_knob(parse(f"{flags} {more}"), torch.device("cpu"), None)


@pytest.mark.slow
def test_the_longest_sequence_names_them(monkeypatch):
    """Beside the command of the longest row; and no row that has none to make asks for any."""
    monkeypatch.setattr(policies, "WIDE", 2**15)
    flags = "--batch-size 1 --d-ff 512 --dropout 0 --no-amp"
    answer = ask(f"{flags} --device cuda --memory-budget 50MB --longest-sequence")
    (line,) = (line for line in answer.out.splitlines() if CHUNKED in line)
    found = run(line.partition(": ")[2].split())
    assert found.mlp_chunks == 0 and f"{found.seq_len:,} tokens" in line
    assert found.seq_len > 1.1 * run(answer.command).seq_len
    cut = question(f"{flags} --mlp-chunks 4")
    for policy, more in (("cheap", " --mlp-chunks 1"), ("mlp", "")):
        row = Row(cut.about(changed(cut.args, use_activation_checkpoint=policy)))
        said = " ".join(words_of(row.changes(cut.args)))
        assert said == f"--use-activation-checkpoint {policy}{more}"

"""A resumed run ends as the one that nothing happened to, to the bit: weights, optimizer, log.

Whatever ended the first part: a crash, a signal, a damaged file, a forgotten --resume. The snapshot
has the flags: --resume needs no other. What is typed wins, or is refused by the name of its flag.
(Two runs that want the same files: test_snapshot.py. More refusals: test_bad_input.py.)
"""

import os
import re
import shlex
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from harness.faults import broken, undisturbed
from harness.marks import has_float16_attention
from harness.rows import row
from harness.runs import TINY_MODEL, metrics, parse, same, snapshot, train_here, typed
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

import train_minimal
from memory import MemorySavingGPT
from trainer.resume import check_fixed_flags, with_saved_flags
from trainer.settings import Settings, resolve
from trainer.snapshot import (
    LoadedSnapshot,
    SnapshotError,
    files_of_run,
    save_snapshot,
    sibling_path,
)

FP32, BF16, FULL = "--no-amp", "--amp-dtype=bfloat16", "--use-activation-checkpoint"
FP16 = "--amp-dtype=float16" if has_float16_attention() else BF16
CONSTANT = ("--lr-scheduler=constant", "--warmup-steps=1")
LOSSES = ("step", "epoch", "lr", "train_loss", "train_ppl", "grad_norm", "val_loss", "val_ppl")


def resume_alone(path, *flags: str) -> int:
    return train_here(path, "--resume", *flags, base=[])


# ---- Resumed == uninterrupted


LEAN = ("--optimizer=muon", "--moments-dtype=bfloat16")
kinds = st.sampled_from([(FP32,), (BF16,), (FP16, "--grad-accum-steps=2"), (BF16, LEAN[0])])
memory = st.sampled_from(
    [f"{FULL}={words}" for words in ("none", "full", "auto", "mlp", "cheap+offload",
                                     "full/2+offload")]
)  # fmt: skip
stops = st.tuples(
    st.integers(1, 19), st.sampled_from(["error", "term", "evaluation"]), memory
).filter(lambda stop: stop[1] != "term" or stop[0] % 4)  # (a stopped evaluation has no result)


# (To find the smallest case takes long.)
@settings(max_examples=5, phases=[Phase.explicit, Phase.generate])
@example((FP32, *LEAN), [(9, "error", FULL)], FULL)
@example((FP16,), [(9, "error", FULL)], FULL)
@given(kinds, st.lists(stops, min_size=1, max_size=2, unique_by=lambda stop: stop[0]), memory)
def test_resumed_equals_uninterrupted(kind, parts, last):
    """However often it is stopped, by a crash or a signal, and whatever memory is spent in between:
    that changes no weight. What is done twice is logged once. Nothing but that memory is typed
    again."""
    kind = (*kind, "--eval-interval=4", "--save-interval=3")
    with tempfile.TemporaryDirectory() as folder, patch("memory.offload.MIN_OFFLOAD_BYTES", 1):
        path = Path(folder, "run.pt")
        for step, fault, words in sorted(parts):
            if path.exists() and snapshot(path)["step"] >= step:  # it has come further
                continue
            how = {"base": []} if path.exists() else {}
            flags = ["--resume"] if how else kind
            code = broken(path, f"{fault}:0:{step}", *flags, words, **how)
            assert code == (143 if fault == "term" else None)
            with open(path.with_name("run.metrics.jsonl"), "a") as file:
                # No records of a run, and one that is cut short by the crash
                file.write('{"step": null}\n{"step": "7"}\n' + "[" * 10**5 + '\n{"step": 9, "tr')
        code = resume_alone(path, last) if path.exists() else train_here(path, *kind, last)
        assert code == 0
        resumed, log = snapshot(path), metrics(path)
    whole = undisturbed(*kind)
    for key in ("model", "optimizer", "scaler", "step", "best_val_loss"):
        assert same(resumed[key], snapshot(whole)[key]), key
    for key in LOSSES:
        assert [record.get(key) for record in log] == [r.get(key) for r in metrics(whole)]


class WithSpare(MemorySavingGPT):
    """A model with a weight that no step uses, so that it never gets a gradient or moments."""

    def __init__(self, config):
        super().__init__(config)
        self.spare = torch.nn.LayerNorm(config.d_model)


@pytest.mark.parametrize("flags", [(), LEAN])
def test_a_weight_that_never_got_a_gradient(tmp_path, monkeypatch, flags):
    monkeypatch.setattr("trainer.process.MemorySavingGPT", WithSpare)
    path, whole = tmp_path / "run.pt", tmp_path / "whole.pt"
    assert train_here(whole, *flags) == 0
    assert broken(path, "error:0:9", *flags, "--save-interval=3") is None
    assert resume_alone(path) == 0
    for key in ("model", "optimizer", "step"):
        assert same(snapshot(path)[key], snapshot(whole)[key])


def test_what_decides_the_weights_and_what_does_not():
    flags = ("--eval-interval=1", "--eval-interval=0", "--seed=1")
    often, seldom, other = (snapshot(undisturbed(flag))["model"] for flag in flags)
    assert same(often, seldom) and not same(often, other)


def test_other_flags_may_be_typed_and_are_said(path, tmp_path, capsys):
    """The best snapshot survives, though the run gets worse; as may the precision."""
    assert train_here(path, "--warmup-steps=0") == 0
    before = (tmp_path / "run.best.pt").read_bytes()
    other = ("--num-steps=25", "--lr=3", "--weight-decay=0.3", "--eval-interval=2")
    assert train_here(path, "--resume", *other, FP16, FULL) == 0
    said = "resume   changed.*: (.*)\n(?:.*\n)*note     the learning rate (.*), and"
    ((line, rate),) = re.findall(said, capsys.readouterr().out)
    assert {*line.split(", "), rate} == {
        "of step 20 was 0.0025",
        "--use-activation-checkpoint none -> full",
        "--num-steps 20 -> 25",
        "--lr 0.025 -> 3",
        "--min-lr 0.0025 -> 0.3",
        "--weight-decay 0.1 -> 0.3",
        f"--amp-dtype auto -> {FP16.partition('=')[2]}",
        "--eval-interval 0 -> 2",
    }
    groups = snapshot(path)["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert metrics(path)[-1]["val_loss"] > metrics(path)[19]["val_loss"]
    assert (tmp_path / "run.best.pt").read_bytes() == before


@pytest.mark.parametrize("typed", [(), ("--eval-tokens=64",)])
def test_the_lowest_loss_is_of_the_same_windows(path, tmp_path, capsys, typed):
    """Where they are others, no loss of before keeps the next best weights from being saved."""
    best = tmp_path / "run.best.pt"
    assert train_here(path, "--eval-tokens=32") == 0
    before = best.read_bytes()
    save_snapshot(path, snapshot(path) | {"best_val_loss": 0.25})
    assert resume_alone(path, "--num-steps=21", *typed) == 0
    says = f"counts as the lowest so far and replaces {best}\n"
    assert (says in capsys.readouterr().out) == (best.read_bytes() != before) == bool(typed)
    lowest = metrics(path)[-1]["val_loss"] if typed else 0.25
    assert snapshot(best if typed else path)["best_val_loss"] == lowest


# ---- Resumed from what is not the newest


@row("newest snapshot damaged")
@pytest.mark.parametrize("lost", [1, 2, 3])  # the newest, the one before, the best
def test_damaged_snapshots_are_replaced_by_the_next_best(tmp_path, capsys, lost):
    """And not kept in their place at the next save."""
    whole, flags = tmp_path / "whole.pt", ("--save-interval=15", "--eval-interval=4", *CONSTANT)
    assert train_here(whole, *flags) == 0
    content, here = whole.read_bytes(), whole.stat().st_size // 2
    ways = {
        "one bit": content[:here] + bytes([content[here] ^ 1]) + content[here + 1 :],
        "zeroed block": content[:here] + bytes(4096) + content[here + 4096 :],
        "truncated": content[:here],
        "no snapshot": b"It was a dark night.",
        "empty": b"",
    }
    for how, bad in ways.items():
        path = tmp_path / f"{how}.pt"
        names, whole_names = files_of_run(path)[:3], files_of_run(whole)[:3]
        for name, good in zip(names, whole_names, strict=True):
            name.write_bytes(bad if name in names[:lost] else good.read_bytes())
        capsys.readouterr()
        code, (said, error) = train_here(path, "--resume", *flags), capsys.readouterr()
        if lost == 3:
            assert code == 2 and re.fullmatch(f"error: --resume: {path} is .*\n", error)
            continue
        step = snapshot(whole_names[lost])["step"]
        resumed = f"taking {names[lost]}\nresume   {names[lost]}, step {step}\n"
        assert code == 0 and re.search(f"resume   {path} is .*; {resumed}", said)
        assert sibling_path(path, ".damaged.pt").read_bytes() == bad  # it might be the disk's fault
        assert same(snapshot(path)["model"], snapshot(whole)["model"])
        assert lost == 2 or snapshot(names[1])["step"] == 15


# ---- The flags


def resumed(before: str, words: str) -> Settings:
    """The settings of a run of `before` that is resumed with `words`."""
    saved, now = parse(before), typed("--resume", words)
    state = {"args": saved.words(), "config": {"vocab_size": 289}}
    state["tokenizer"] = {"name": saved.tokenizer_name or "bpe"}
    state["data"] = {"sequences_per_step": saved.batch_size * saved.grad_accum_steps}
    snapshot = LoadedSnapshot(state, now.checkpoint_path)
    settings = resolve(with_saved_flags(now, snapshot))
    check_fixed_flags(settings, 1, snapshot)
    return settings


MLP, AUTO = f"{FULL} mlp", f"{FULL} auto"


@pytest.mark.parametrize(
    ("before", "words", "as_if"),
    [
        ("--num-steps 77", "", "--num-steps 77"),
        ("--num-tokens 7680", "", "--num-tokens 7680"),
        ("--num-tokens 7680", "--num-steps 9", "--num-steps 9"),
        ("--num-steps 9", "--num-tokens 7680", "--num-tokens 7680"),
        ("--model gpt2 --seq-len 64", "--model gpt2", "--model gpt2 --seq-len 64"),
        ("--compile --tf32", "--no-compile", "--tf32"),
        ("--lr 0.01 --min-lr 0.0005", "--lr 0.001", "--lr 0.001 --min-lr 0.0005"),
        ("--no-amp", "--amp-dtype bfloat16", "--amp-dtype bfloat16"),
        (f"{AUTO} --memory-budget 1GiB", MLP, f"{MLP} --memory-budget 1GiB"),
        (f"{AUTO} --memory-budget 1.5GiB", "", f"{AUTO} --memory-budget 1.5GiB"),
        (f"{AUTO} --card h100", "", f"{AUTO} --card H100"),
        (f"{FULL} full:2,mlp+offload", MLP, MLP),
        ("--vocab-size 300", "--vocab-size 289", "--vocab-size 289"),  # as many as its text gave
        # What the run cannot change; the flag that was typed is blamed.
        ("", "--model gpt2", "error: --n-layers: x.pt was trained with 3, this run"),
        ("", "--seed 7", "error: --seed: x.pt was trained with 1337, this run has 7"),
        ("--vocab-size 300", "--vocab-size 290", "error: --vocab-size: .* with 289, this run has"),
        ("", "--tokenizer-name byte", "error: --tokenizer-name: x.pt was trained with bpe, this"),
        ("", "--use-toy-data", "error: --use-toy-data: x.pt was trained with False, this run has"),
    ],
)
def test_what_is_typed_wins_or_is_refused(before, words, as_if):
    """All other flags are the run's; and what follows from a flag follows from the new one."""
    if as_if.startswith("error: "):
        with pytest.raises(SnapshotError, match=as_if.removeprefix("error: ")):
            resumed(before, words)
        return
    wanted = parse("--resume", as_if)
    assert resumed(before, words).replace(typed=wanted.typed) == wanted


# ---- What is said, and can be pasted


def test_any_path_can_be_pasted(tmp_path, capsysbinary):
    """From stopped, next and note, through a shell's eyes; and each goes on where it says. With a
    space and a quote."""
    path = tmp_path / "my runs" / "it's.pt"

    def pasted(pattern: str) -> list[str]:
        (command,) = re.findall(pattern, os.fsdecode(capsysbinary.readouterr().out), re.M)
        return shlex.split(command)

    assert broken(path, "term:0:3", "--log-interval=10") == 143
    resume = pasted("^stopped .*: saved; go on with --resume: python train_minimal.py (.*)")
    assert train_minimal.main(resume) == 0
    assert pasted("^next     (.*)")[-1] == str(path.with_suffix(".best.pt"))

    assert train_here(path, "--num-steps=2") == 0
    older = pasted("to go on with that one: (.*)")
    assert train_minimal.main([*older, "--num-steps=30"]) == 0
    logs = [[record["step"] for record in metrics(Path(name))] for name in (path, older[-1])]
    assert logs == [[1, 2], [3, 10, 20, 30]]


# ---- The data


def test_a_text_that_has_moved_is_gone_on_with_and_one_that_was_edited_is_refused(
    cache, path, monkeypatch, capsys
):
    """Also if it has the same name where one goes on."""
    text = path.with_name("here") / "my text.txt"
    text.parent.mkdir()
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    monkeypatch.chdir(text.parent)
    flags = "--tokenizer-name=bpe --vocab-size=300 --seq-len=8 --max-position-embeddings=8".split()
    flags += ["--num-steps=4", f"--train-data={text.name}"]
    assert train_here(path, *flags, base=TINY_MODEL) == 0
    monkeypatch.chdir(path.parent)
    before = snapshot(path)
    assert 257 < before["config"]["vocab_size"] < 300  # so little text has no more pairs

    other = Path(text.name)
    other.write_text(text.read_text() + "another one\n")
    moved = text.rename(text.with_name("moved.txt"))
    refused = {
        (): f"--train-data {text}: no such file",
        (f"--train-data={other}",): r"--train-data: .* \(--train-data\); the data must",
    }
    for words, says in refused.items():
        assert resume_alone(path, *words) == 2
        assert re.match(f"error: {says}", capsys.readouterr().err)
    for steps in (5, 6):
        assert resume_alone(path, f"--num-steps={steps}", f"--train-data={moved}") == 0
        out = capsys.readouterr().out
        assert (f"--train-data {text} -> {moved}" in out) == (steps == 5)
    assert snapshot(path)["step"] == 6 and snapshot(path)["tokenizer"] == before["tokenizer"]
    moved.write_text(moved.read_text() + "zebras quarrel with quiet quetzals\n" * 9)
    assert resume_alone(path, "--num-steps=7") == 2
    assert "(edited); the data must stay the same to resume" in capsys.readouterr().err

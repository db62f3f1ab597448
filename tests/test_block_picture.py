"""The picture of a block is what the block does: each tensor kept, replayed, or neither."""

import argparse
import builtins
from collections import Counter
from dataclasses import replace

import pytest
import torch
from harness.runs import ROOT

from model import RECOMPUTE_POLICIES
from planner.formulas import closed_form, step_flops
from scripts import block_picture
from scripts.block_picture import BATCH_SIZE, GPT2_SMALL, SEQ_LEN, look
from scripts.kept_tensors import kept_by_one_block

COMMITTED = ROOT / "studies/results" / "block_policies.png"


@pytest.fixture(scope="module")
def blocks():
    return block_picture.look_at_all()


@pytest.mark.parametrize("policy", RECOMPUTE_POLICIES)
def test_kept_as_listed_and_as_in_the_formulas(policy):
    """Against what a model of two blocks keeps more than one of one, and against the closed form.

    With autocast's copies of the weights, which the picture leaves out.
    """
    flags = {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, "d_model": 768, "n_heads": 12}
    listed = kept_by_one_block(policy, argparse.Namespace(**flags, no_amp=False))
    kept = [tensor for tensor in look(policy) if tensor.kept]
    assert sum(tensor.bytes for tensor in kept) == sum(tensor.bytes for tensor in listed)
    config = replace(GPT2_SMALL, n_layers=1, recompute=policy)
    formula = closed_form(config, BATCH_SIZE, SEQ_LEN, torch.bfloat16)["blocks"]
    assert sum(tensor.bytes for tensor in kept) == formula
    # and not only in sum: mean and deviation are one entry here, and two there
    sizes = Counter(tensor.bytes for tensor in kept if "mean" not in tensor.name)
    assert sizes == Counter(s.bytes for s in listed if s.shape[-1] != 1)


@pytest.mark.parametrize("policy", RECOMPUTE_POLICIES)
def test_replayed_matmuls_are_those_of_the_formula(policy):
    """FLOPs of the tensors that are drawn as multiplied once more = what step_flops says."""
    C = GPT2_SMALL.d_model
    inner = {"q, k, v": C, "attn.c_proj": C, "c_fc": C, "mlp.c_proj": 4 * C}  # summed over
    flops = 0
    for tensor in look(policy):
        if tensor.state == "replayed, multiplied" and tensor.name in inner:
            flops += 2 * (tensor.bytes // 2) * inner[tensor.name]  # 2 bytes an element
        elif tensor.state == "replayed, multiplied" and tensor.name == "attention":
            flops += 2 * SEQ_LEN * (tensor.bytes // 2)  # two products, half of them masked
    config = replace(GPT2_SMALL, n_layers=1, recompute=policy)
    assert flops == step_flops(config, SEQ_LEN)[1] * BATCH_SIZE * SEQ_LEN


def test_what_backward_needs_is_there_one_way_or_another(blocks):
    """What `none` keeps is kept or replayed by each policy; and nothing is both."""
    for tensors in blocks.values():
        assert [tensor.name for tensor in tensors] == [tensor.name for tensor in blocks["none"]]
        for tensor, plain in zip(tensors, blocks["none"], strict=True):
            assert tensor.bytes == plain.bytes
            assert not (tensor.kept and tensor.replayed)
            assert tensor.kept or tensor.replayed or not plain.kept
    assert not any(tensor.replayed for tensor in blocks["none"])


def test_every_tensor_has_a_name(blocks):
    names = {name for names in block_picture.NAMES.values() for name in names}
    assert {tensor.name for tensor in blocks["none"]} <= names


def test_the_committed_picture_is_of_this_code(blocks):
    """It carries the table that it was drawn from. (Else: --out studies/results, and commit.)"""
    assert block_picture.text_table(blocks).encode("latin-1") in COMMITTED.read_bytes()


def test_sums_are_those_of_the_ladder(blocks):
    """docs/ladder.md's `keeps` column, in whole BTC, and its FLOPs."""
    page = (ROOT / "docs" / "ladder.md").read_text()
    for policy, tensors in blocks.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{policy}` |"))
        assert row.startswith(f"| `{policy}` | {block_picture.kept_btc(tensors):.0f} |")
        flops = row.split(" | ")[4]
        assert flops == f"{block_picture.relative_flops(policy):.2f}"


@pytest.mark.parametrize(
    ("suffix", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_draws_each_format_in_a_new_folder(tmp_path, suffix, begins, capsys, blocks, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(block_picture, "look_at_all", lambda: blocks)
    out = tmp_path / "new" / "folder"
    assert block_picture.main(["--out", str(out), "--format", suffix]) == 0
    file = out / f"block_policies.{suffix}"
    assert file.read_bytes().startswith(begins)
    assert capsys.readouterr().out == f"wrote {file}\n"


def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.chdir(tmp_path)
    assert block_picture.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "pip install matplotlib" in line and "--text" in line
    assert list(tmp_path.iterdir()) == []
    assert block_picture.main(["--text"]) == 0
    assert "kept (BTC)" in capsys.readouterr().out


def test_a_file_is_no_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        block_picture.main(["--out", str(tmp_path / "file")])
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and line.startswith("error: --out: ")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "stopped"),
        (OSError(28, "No space left on device", "out/x.png"), 2, "error: --out: out/x.png: No"),
    ],
    ids=["Ctrl-C", "full disk"],
)
def test_interrupted(error, code, line, monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")

    def fail():
        raise error

    monkeypatch.setattr(block_picture, "look_at_all", fail)
    assert block_picture.main(["--out", str(tmp_path / "new")]) == code
    assert capsys.readouterr().err.strip().startswith(line)
    assert list(tmp_path.iterdir()) == []

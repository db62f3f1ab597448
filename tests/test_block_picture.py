"""The picture of a block is what the block does: each tensor kept, replayed, or neither."""

import argparse
import sys
from collections import Counter
from dataclasses import replace

import pytest
from harness.runs import ROOT

from planner.formulas import step_flops
from scripts.kept_tensors import kept_by_one_block
from studies import block_picture
from studies.block_picture import BATCH_SIZE, GPT2_SMALL, SEQ_LEN


@pytest.fixture(scope="module")
def blocks():
    return block_picture.look_at_all()


def test_kept_as_listed(blocks):
    """By what a model of two blocks keeps more than one of one; autocast's copies of the weights
    are not drawn."""
    flags = {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, "d_model": 768, "n_heads": 12}
    for policy, tensors in blocks.items():
        listed = kept_by_one_block(policy, argparse.Namespace(**flags, no_amp=False))
        listed = [s for s in listed if s.shape[0] in (BATCH_SIZE, BATCH_SIZE * SEQ_LEN)]
        kept = [tensor for tensor in tensors if tensor.kept]
        assert sum(tensor.bytes for tensor in kept) == sum(tensor.bytes for tensor in listed)
        # and not only in sum: mean and deviation are one entry here, and two there
        sizes = Counter(tensor.bytes for tensor in kept if "mean" not in tensor.name)
        assert sizes == Counter(s.bytes for s in listed if s.shape[-1] != 1)


def test_replayed_matmuls_are_those_of_the_formula(blocks):
    """FLOPs of the tensors that are drawn as multiplied once more = what step_flops says."""
    C = GPT2_SMALL.d_model
    inner = {"q, k, v": C, "attn.c_proj": C, "c_fc": C, "mlp.c_proj": 4 * C}  # summed over
    for policy, tensors in blocks.items():
        flops = 0
        for tensor in tensors:
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
    drawn = {tensor.name for tensor in blocks["none"]}
    assert drawn == {block_picture.X, *block_picture.NAMES.values()}


def test_the_committed_picture_is_of_this_code(blocks):
    """It carries the table that it was drawn from. (Else: --out studies/results, and commit.)"""
    file = ROOT / "studies/results" / "block_policies.png"
    assert block_picture.text_table(blocks).encode("latin-1") in file.read_bytes()


def test_sums_are_those_of_the_ladder(blocks):
    """docs/ladder.md's `keeps` column, in whole BTC, and its FLOPs."""
    page = (ROOT / "docs" / "ladder.md").read_text()
    for policy, tensors in blocks.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{policy}` |"))
        assert row.startswith(f"| `{policy}` | {block_picture.kept_btc(tensors):.0f} |")
        assert row.split(" | ")[4] == f"{block_picture.step_cost(policy):.2f}"


def test_draws_or_prints(tmp_path, capsys, blocks, monkeypatch, plt):
    monkeypatch.setattr(block_picture, "look_at_all", lambda: blocks)
    out = tmp_path / "new" / "folder"
    assert block_picture.main(["--out", str(out)]) == 0
    file = out / "block_policies.png"
    assert capsys.readouterr().out == f"wrote {file}\n"
    assert block_picture.text_table(blocks).encode("latin-1") in file.read_bytes()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert block_picture.main(["--out", str(tmp_path / "other")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "pip install matplotlib" in line and "--text" in line
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert block_picture.main(["--text"]) == 0
    assert "kept (BTC)" in capsys.readouterr().out

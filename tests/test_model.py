"""The model is GPT-2, and starts where an untrained model should; and the text that it
writes with a KV cache is the text that full forwards write, token by token."""

import inspect
import json
import math
import shutil
import sys

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from harness.runs import ROOT, run

from memory import MemorySavingGPT
from model import MiniGPT, MiniGPTConfig, sample_next_ids
from trainer.device import compile_blocks

TINY = dict(vocab_size=61, max_position_embeddings=16, n_layers=2, n_heads=2, d_model=32, d_ff=64)
TINY |= dict(dropout=0.0)
LIMIT = TINY["max_position_embeddings"]


def tiny(device_type=None, **changes) -> MemorySavingGPT:
    torch.manual_seed(0)
    return MemorySavingGPT(MiniGPTConfig(**{**TINY, **changes}), device_type)


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, TINY["vocab_size"], shape)


def test_the_default_is_gpt2_small():
    """124,439,808 parameters; the head is the token embedding."""
    shape = (50257, 1024, 12, 12, 768, 3072)  # vocabulary, positions, layers, heads, d_model, d_ff
    assert MiniGPTConfig() == MiniGPTConfig(*shape, 0.1, "none", 0, 1)
    with torch.device("meta"):
        weights = dict(MiniGPT(MiniGPTConfig()).named_parameters())
    assert sum(weight.numel() for weight in weights.values()) == 124_439_808
    assert "token_embedding.weight" in weights and not [name for name in weights if "head" in name]


def test_initial_loss_is_that_of_a_guess():
    model, ids = tiny(vocab_size=5000), torch.randint(0, 5000, (8, 16))
    assert abs(model(ids, ids.roll(-1, 1)).item() - math.log(5000)) < 0.1


def test_residual_projections_start_smaller_with_depth():
    for n_layers in (1, 16):
        mlp = tiny(n_layers=n_layers, d_model=128).blocks[0].mlp
        ratio = (mlp.c_proj.weight.std() / mlp.c_fc.weight.std()).item()
        assert abs(ratio - 1 / math.sqrt(2 * n_layers)) < 0.05


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_heads", 3, "must be divisible by n_heads"),
        ("n_layers", 0, "n_layers must be at least 1"),
        *(("dropout", value, "dropout must be in") for value in (1.0, -0.5, math.nan)),
        ("loss_chunks", -1, "loss_chunks must be at least 0"),
        ("mlp_chunks", -1, "mlp_chunks must be at least 0"),
        ("recompute", "mlp:3", "recompute must be POLICY.*N must be in 0..2"),
    ],
)
def test_impossible_config(field, value, message):
    with pytest.raises(ValueError, match=message):
        tiny(**{field: value})


def test_compiled_code_is_not_cut_to_ddps_buckets_and_draws_what_manual_seed_says():
    functorch, random = torch._functorch.config, "graphsafe_rng_functionalization"
    with torch._dynamo.config.patch(optimize_ddp=True), functorch.patch({random: True}):
        compile_blocks(tiny())
        assert torch._dynamo.config.optimize_ddp is getattr(functorch, random) is False


# ---- the file alone


def learn(MiniGPT, MiniGPTConfig, **changes) -> tuple[list[float], int, list[list[int]]]:
    """Losses of three steps, the FLOPs of one, and two texts. (It runs without this file, too.)"""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    model = MiniGPT(MiniGPTConfig(61, 16, 3, 2, 32, 64, **changes)).train()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    ids = torch.randint(0, 61, (2, 17))
    for _ in range(3):
        optimizer.zero_grad()
        with FlopCounterMode(display=False) as counter:
            loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    texts = model.generate(ids[:, :3], 20, temperature=0).tolist()
    return losses, counter.get_total_flops(), texts


ALONE = f"""
import json, sys
sys.path.insert(0, "")  # this folder, which -I leaves out
from model import MiniGPT, MiniGPTConfig

{inspect.getsource(learn)}

def refusal(**memory):
    try:
        MiniGPT(MiniGPTConfig(**memory))
    except ValueError as error:
        return str(error)

found = [[learn(MiniGPT, MiniGPTConfig, dropout=dropout, recompute=recompute)
          for recompute in ("none", "full")] for dropout in (0.0, 0.1)]
refused = [refusal(recompute="cheap"), refusal(loss_chunks=2), refusal(mlp_chunks=2)]
print(json.dumps([found, refused]))
"""


def test_the_file_trains_and_writes_alone_in_a_folder(tmp_path):
    """With none and with full, to the same bits. Here a block does as much; and what needs memory/
    says so."""
    shutil.copy(ROOT / "model.py", tmp_path)
    result = run([sys.executable, "-Ic", ALONE], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found, refused = json.loads(result.stdout)
    asked = ["recompute cheap", "loss_chunks 2", "mlp_chunks 2"]
    for line, value in zip(refused, asked, strict=True):
        assert value in line and " need memory.MemorySavingGPT: " in line
    for dropout, (none, full) in zip((0.0, 0.1), found, strict=True):
        here = learn(
            MemorySavingGPT, MiniGPTConfig, dropout=dropout, recompute="full", loss_chunks=1
        )
        assert none[0] == full[0] and none[0][2] < none[0][0] - 0.1
        assert none[2] == full[2] and [*map(len, full[2])] == [23, 23]
        assert full[0][0] == here[0][0] and full[0] == pytest.approx(here[0], rel=1e-4)
        assert none[1] < full[1] == here[1]


# ---- sampling


def test_the_edges_of_top_p_and_of_the_temperature():
    """(All else of sampling is below.)"""
    # The fewest whose sum is at least p: at 0.5 one of two equal ones is enough.
    for logits, top_p, n_drawn in (([0.0, 0.0], 0.5, 1), ([0.0, 0.0], 0.51, 2), ([0.0, 1.0], 0, 1)):
        assert (
            len(sample_next_ids(torch.tensor([logits] * 99), 1.0, None, top_p).unique()) == n_drawn
        )
    assert sample_next_ids(torch.tensor([[0.0, 1.0]]), 1e-7, None, None).tolist() == [[1]]


# ---- The text that it writes


def trained(**changes) -> MiniGPT:
    """Weights so large that each token matters to those after it."""
    model = tiny(**changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / parameter.size(-1) ** 0.5)
    return model.eval()


@torch.no_grad()
def written_plainly(model, ids, n_new, temperature=1.0, top_k=None, top_p=None):
    """All logits of all tokens that fit, for each new one; and each row sampled by itself."""
    for _ in range(n_new):
        rows = model(ids[:, -LIMIT:])[:, -1]
        if temperature == 0:
            ids = torch.hstack([ids, rows.max(dim=1, keepdim=True).indices])
            continue
        probabilities = torch.zeros_like(rows)
        for row, result in zip(rows / temperature, probabilities, strict=True):
            best = sorted(range(len(row)), key=lambda i, row=row: -row[i].item())[: top_k or None]
            among = F.softmax(row[best], dim=0).tolist()
            taken = [i for n, i in enumerate(best) if n == 0 or sum(among[:n]) < (top_p or 2)]
            result[taken] = F.softmax(row[taken], dim=0)
        ids = torch.hstack([ids, torch.multinomial(probabilities, 1)])
    return ids


@pytest.mark.parametrize(
    ("n_prompt", "batch_size", "how"),
    [
        (1, 3, dict(temperature=0.0)),
        (LIMIT - 1, 3, dict()),
        (5, 1, dict(temperature=0.8, top_k=7)),
        (5, 1, dict(temperature=0.8, top_k=0)),
        (LIMIT, 1, dict(temperature=1.5, top_p=0.7)),
        (LIMIT + 4, 3, dict(temperature=1.2, top_k=9, top_p=0.8)),
    ],
    ids=str,
)
def test_the_same_text_as_by_full_forwards(how, n_prompt, batch_size):
    """Up to the longest sequence and beyond; and as many random numbers are drawn."""
    model, prompt = trained(recompute="mlp:1,cheap"), random_ids(batch_size, n_prompt)
    torch.manual_seed(1)
    expected = written_plainly(model, prompt, 2 * LIMIT, **how)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(model.generate(prompt, 2 * LIMIT, **how), expected)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    streamed = list(model.stream_tokens(prompt, 2 * LIMIT, **how))
    assert {token.shape for token in streamed} == {(batch_size, 1)}
    assert torch.equal(torch.hstack([prompt, *streamed]), expected)


def test_nothing_is_computed_twice_until_the_window_slides():
    model, lengths, rows = trained(), [], []
    model.blocks[1].register_forward_hook(lambda _block, inputs, _: lengths.append(inputs[0].shape))
    model.register_forward_hook(lambda _model, _inputs, logits: rows.append(logits.shape))
    model.generate(random_ids(2, 5), LIMIT)
    expected = [5, *[1] * (LIMIT - 5), *[LIMIT] * 4]
    assert lengths == [(2, T, 32) for T in expected]
    assert rows == [(2, 1, TINY["vocab_size"])] * LIMIT


def test_a_kv_cache_takes_one_token_a_call_and_only_so_many():
    """Several tokens would see each other's future, and a replay would not fill the cache."""
    model, ids, past = trained(recompute="full"), random_ids(2, LIMIT), {}
    model(ids, kv_cache=past)
    some = {key: (k[:, :, :3], v[:, :, :3]) for key, (k, v) in past.items()}
    for mode, n_tokens, cache in (("eval", 2, some), ("train", 1, some), ("train", 2, {})):
        with pytest.raises(ValueError, match="KV cache is for eval"):
            model.train(mode == "train")(random_ids(2, n_tokens), kv_cache=cache)
    with pytest.raises(ValueError, match="17 tokens, but max_position_embeddings is 16"):
        model.eval()(ids[:, :1], kv_cache=past)

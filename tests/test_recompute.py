"""Recompute changes what is kept, and nothing else: not one bit of the result.

How policies are spelled: test_policy_string.py. Masks that a GPU draws: test_masks.py.
"""

import gc
import weakref
from functools import cache

import pytest
import torch
from cases.shapes import PRECISIONS, WIDE, ways
from harness.planned import planner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as some
from test_model import random_ids, tiny

from memory.policies import POLICIES, expand, one_by_one, schedule
from model import RECOMPUTE_POLICIES
from planner.log import Storage, kept_for_backward

pytestmark = pytest.mark.usefixtures("everything_travels")


def autocast(precision: str):
    dtype = PRECISIONS[precision]
    return torch.autocast("cpu", dtype, enabled=precision == "bf16", cache_enabled=False)


@cache
def train(way: str, dropout: float, precision: str):
    """Losses, gradients of the last of two steps, and the weights then."""
    model = tiny(recompute=way, n_layers=4, dropout=dropout, loss_chunks=4).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        for micro_batch in range(2):
            torch.manual_seed(100 * step + micro_batch)
            ids = random_ids(2, 16)
            with autocast(precision):
                loss = model(ids, ids.roll(-1, 1))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    gradients = [p.grad for p in model.parameters()]
    return losses, [*gradients, *model.parameters()]


def laws(n: int):
    fixture = [HealthCheck.function_scoped_fixture]
    return settings(max_examples=n, deadline=None, derandomize=True, suppress_health_check=fixture)


@pytest.mark.parametrize("first", RECOMPUTE_POLICIES[1:])
@laws(8)
@given(some.data(), some.sampled_from([0.0, 0.1]), some.sampled_from([*PRECISIONS]))
def test_every_way_equals_none(first, data, dropout, precision):
    way = data.draw(ways(4, first))
    losses, tensors = train(way, dropout, precision)
    none, expected = train("none", dropout, precision)
    assert losses == none
    assert all(map(torch.equal, tensors, expected))


@pytest.mark.parametrize(
    ("policy", "last"),
    [
        ("full", "mlp.c_proj"),
        ("mlp", "mlp.c_proj"),
        ("attn", "attn.c_proj"),
        ("cheap", "attn.c_attn"),
        ("cheap", "mlp.c_fc"),
        ("cheap", "mlp.c_proj"),
    ],
)
def test_no_replay_of_the_last_matmul_even_with_dropout(policy, last):
    """Early stop comes before it; a dropout behind it, inside the region, would be too late."""
    model, ids, ran = tiny(recompute=policy, dropout=0.1).train(), random_ids(2, 16), []
    for block in model.blocks:
        block.get_submodule(last).register_forward_hook(lambda *_: ran.append(last))
    model(ids, ids).backward()
    assert len(ran) == len(model.blocks)


# ---- what is kept

B, T, C, H = 4, 16, 32, 2
BTC = B * T * C


def keep(policy: str, precision: str = "bf16", mode: str = "train", **changes) -> list[Storage]:
    config = dict(n_layers=3, d_ff=4 * C, loss_chunks=1, recompute=policy)
    model, ids = tiny(**config | changes), random_ids(B, T)
    model.train(mode == "train")
    with autocast(precision):
        return kept_for_backward(model, lambda: model(ids, ids))


def total(*args, **kwargs) -> int:
    return sum(kept.bytes for kept in keep(*args, **kwargs))


# One block under bfloat16 autocast with fused attention, tensor by tensor: (B, T, C) is 4 BTC bytes
# in float32 and 2 in bfloat16. With a layer's input a copy of its weight is kept.
STATISTICS = [4 * B * T] * 2  # of a LayerNorm: mean and deviation
TENSORS = {
    "x": [4 * BTC],
    "ln_1": [2 * BTC, *STATISTICS, 6 * C * C],
    "qkv": [6 * BTC],
    "attention": [2 * BTC, 4 * B * T * H],  # with the softmax's normaliser
    "c_proj": [2 * C * C],
    "mask": [],  # without dropout
    "x2": [4 * BTC],
    "ln_2": [2 * BTC, *STATISTICS, 8 * C * C],
    "c_fc": [8 * BTC],
    "gelu": [8 * BTC, 8 * C * C],
    "results": [2 * BTC] * 2,
}


@pytest.mark.parametrize("policy", RECOMPUTE_POLICIES)
def test_a_policy_keeps_what_its_entry_says(policy):
    """What a third block adds, tensor by tensor."""
    three, two = (sorted(k.bytes for k in keep(policy, n_layers=n)) for n in (3, 2))
    for size in two:
        three.remove(size)
    assert three == sorted(sum((TENSORS[name] for name in POLICIES[policy].keeps.split()), []))


def test_without_recompute_it_is_that_of_the_literature():
    """36 bsh + 4 bsa + 16 bs (Korthikanti et al., 2022: 34 bsh, with masks, without autocast)."""
    none, weights = sum(map(sum, TENSORS.values())) - 4 * BTC, 24 * C * C
    assert none - weights == 36 * BTC + 4 * B * T * H + 16 * B * T


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fake_count_equals_what_autograd_really_saves(precision):
    """Without selective policies, whose caches autograd's hooks do not see."""
    for policy in ("none", "cheap", "mlp", "attn", "full"):
        model, ids = tiny(loss_chunks=1, recompute=policy).train(), random_ids(B, T)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved = {}

        def note(tensor, saved=saved, weights=weights, ids=ids):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights | {ids.untyped_storage().data_ptr()}:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), autocast(precision):
            loss = model(ids, ids)
        with autocast(precision):
            kept = kept_for_backward(model, lambda model=model, ids=ids: model(ids, ids))
        assert sum(saved.values()) == sum(k.bytes for k in kept), policy
        del loss


@laws(20)
@example("full/3")
@example("full:3,mlp/2")
@given(ways(5, ends=("",)))
def test_a_way_keeps_what_its_policies_keep(way):
    """One after the other; a group of blocks what one of them does. And nothing in evaluation."""
    policies = [policy for policy, _ in expand(way, 5).calls]
    last = of_blocks(policies[-1], 1)
    others = sum(of_blocks(policy, 2) - of_blocks(policy, 1) for policy in policies[:-1])
    assert total(way, n_layers=5) == others + last
    assert total(way, n_layers=5, mode="eval") == of_blocks("none", 5, mode="eval")


@cache
def of_blocks(policy: str, n_layers: int, **how) -> int:
    return total(policy, n_layers=n_layers, **how)


def test_who_does_what():
    def calls(way: str, training: bool = True) -> list[str]:
        model = tiny(n_layers=5, recompute=way)
        return [policy for _, policy in schedule(model.blocks, model.config, training, None)]

    assert calls("mlp:2,cheap") == ["mlp"] * 2 + ["cheap"] * 3
    assert calls("full:3,mlp/2") == ["full"] * 2 + ["mlp"] * 2  # two and one; each alone
    assert calls("mlp:2,cheap+offload", training=False) == ["none"] * 5


@pytest.mark.parametrize(("less", "more"), [("full", "cheap"), ("mlp", "cheap")])
def test_the_policy_that_keeps_less_comes_first(less, more):
    """Backward of the last block works with all of its tensors, whatever it kept of them, beside
    what the others keep: that should be little."""
    plan = planner(WIDE)
    right, wrong = (plan.step(24, recompute=f"{a}:2,{b}") for a, b in ((less, more), (more, less)))
    assert right.kept == wrong.kept and right.peak < wrong.peak


def test_listing_names_module_operator_and_line():
    (gelu,) = [k for k in keep("none", n_layers=1) if k.operator == "gelu"]
    assert gelu.module == "MiniGPT.blocks.0.mlp"
    assert gelu.shape == (B, T, 4 * C) and gelu.dtype == torch.bfloat16
    file, line = gelu.line.split(":")
    assert "gelu" in open(file).read().splitlines()[int(line) - 1]


# ---- offload


def run_offloaded(way: str, steps: int = 1, n_layers: int = 4):
    """The model, and the bytes that wait in CPU memory."""
    model = tiny(recompute=f"{way}+offload", n_layers=n_layers).train()
    for _ in range(steps):
        ids = random_ids(3, 16)  # 48 tokens: no weight has a shape like that
        model(ids, ids).backward()
        gc.collect()
    assert sum(map(len, model.host_memory.unused.values())) == len(model.host_memory.made)
    return model, sum(block.nbytes for block in model.host_memory.made)


@pytest.mark.parametrize("policy", RECOMPUTE_POLICIES[1:])
def test_what_travels_is_what_the_policy_keeps(policy):
    """Of all blocks but the last, each storage once: q, k and v are one, and attention's output is
    kept by two operators. The results that selective policies keep are no saved tensors: theirs is
    the block's input alone."""

    def saved(n_layers: int) -> int:
        """Bytes of all that autograd saves and that is no weight."""
        model, ids = tiny(recompute=policy, n_layers=n_layers), random_ids(3, 16)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes: dict[int, int] = {}

        def note(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            loss = model(ids, ids)
        del loss
        return sum(sizes.values())

    _, travelled = run_offloaded(policy, steps=2)  # the same blocks, step after step
    assert travelled == saved(4) - saved(1)
    if policy in ("sdpa", "selective", "full"):
        assert travelled == 3 * 3 * 16 * 32 * 4


@pytest.mark.parametrize(("first", "rest"), [("full", "cheap"), ("mlp", "full"), ("attn", "mlp")])
def test_offload_takes_what_both_keep(first, rest):
    """Of all blocks but the last."""

    def travelled(way: str) -> int:
        return run_offloaded(way, n_layers=5)[1]

    of_first, of_rest = travelled(first) // 4, travelled(rest) // 4
    assert travelled(f"{first}:3,{rest}") == 3 * of_first + of_rest
    assert travelled(f"{first}:3") == 3 * of_first


def test_a_group_holds_no_update_beside_its_next_block():
    updates = []

    class Stage:
        def add(self, x, update):
            return x + update

        def __call__(self, x, policy):
            assert all(update() is None for update in updates)
            update = torch.ones(3)
            updates.append(weakref.ref(update))
            return x, update

    one_by_one([Stage(), Stage(), Stage()])(torch.zeros(3))
    assert len(updates) == 3


def test_offloaded_copy_is_what_backward_gets(monkeypatch):
    """Spoil the copies: the gradients must change, else nothing was offloaded at all."""
    from memory import offload

    def gradients():
        model = tiny(recompute="full+offload").train()
        ids = torch.arange(32).view(2, 16)
        loss = model(ids, ids)
        for ticket in tickets:
            for block in ticket.blocks:
                block.zero_()
        loss.backward()
        return [p.grad for p in model.parameters()]

    tickets: list = []
    clean = gradients()
    real = offload.Ticket.__init__

    def init(self, *args):
        real(self, *args)
        tickets.append(self)

    monkeypatch.setattr(offload.Ticket, "__init__", init)
    assert not all(map(torch.equal, clean, gradients()))
    assert len(tickets) == 1

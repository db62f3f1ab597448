"""Two policies in one model: one in the first blocks, another one in the rest."""

from dataclasses import asdict, replace
from functools import cache
from itertools import product

import pytest
import torch
from cases.shapes import CONFIG, MIXES, PRECISIONS, WIDE, T, mix
from harness.planned import planner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from test_model import random_ids, tiny
from test_recompute import BTC, total, train

from memory.policies import schedule
from model import RECOMPUTE_POLICIES, MiniGPTConfig
from planner.choose import describe_recompute, pick_recompute, recompute_flags
from planner.formulas import recompute_cost, step_flops
from scripts.plan_memory import command_line
from scripts.plan_memory import parse as parse_plan
from trainer.flags import UsageError, build_parser, fill_in, model_config

pytestmark = pytest.mark.usefixtures("everything_travels")

PAIRS = [pair for pair in product(RECOMPUTE_POLICIES[1:], repeat=2) if pair[0] != pair[1]]


# ---- the same results


@cache
def trained(policy: str, **changes):
    return train(policy, steps=1, accumulate=1, **changes)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    first=some.sampled_from(RECOMPUTE_POLICIES[1:]),
    rest=some.sampled_from(RECOMPUTE_POLICIES),
    n=some.integers(1, 3),
    group=some.integers(1, 2),
    offloaded=some.booleans(),
    dropout=some.sampled_from([0.0, 0.1]),
    precision=some.sampled_from([*PRECISIONS]),
)
def test_every_mix_equals_none(first, rest, n, group, offloaded, dropout, precision):
    memory = mix(first, n, rest, recompute_group=group if first == "full" else 1)
    memory |= {"offload_activations": offloaded, "dropout": dropout, "precision": precision}
    none = trained("none", dropout=dropout, precision=precision)
    losses, *tensors = trained(memory.pop("recompute"), **memory)
    assert losses == none[0]
    assert all(map(torch.equal, sum(tensors, []), sum(none[1:], [])))


# ---- who does what


def calls(training: bool = True, **memory) -> list[str]:
    """The policy of each call, in order."""
    model = tiny(n_layers=5, **memory)
    return [policy for _, policy in schedule(model.blocks, model.config, training, None)]


def test_the_policy_of_each_block():
    assert calls(**mix("mlp", 2, "cheap")) == ["mlp"] * 2 + ["cheap"] * 3
    assert calls(**mix("mlp", 0, "cheap")) == ["cheap"] * 5
    assert calls(**mix("mlp", 5, "cheap")) == ["mlp"] * 5
    assert calls(**mix("mlp", 2, "none")) == ["mlp"] * 2 + ["none"] * 3
    grouped = mix("full", 3, "full", recompute_group=2)
    assert calls(**grouped) == ["full"] * 4  # two and one; then the rest, each alone
    assert calls(training=False, **mix("mlp", 2, "cheap", offload_activations=True)) == ["none"] * 5


# ---- what is kept, what moves, what runs twice


@cache
def all_of(policy: str, n_layers: int) -> int:
    return total(policy, n_layers=n_layers)


def test_each_block_keeps_what_its_policy_keeps():
    for first, rest in PAIRS[::3]:
        kept = total(first, n_layers=4, recompute_layers=3, recompute_rest=rest)
        assert kept - all_of(rest, 1) == 3 * (all_of(first, 2) - all_of(first, 1))


def test_only_the_first_part_is_in_groups():
    changes = dict(n_layers=5, recompute_layers=3, recompute_rest="full")
    assert total("full", **changes) - total("full", **changes, recompute_group=3) == 2 * 4 * BTC


def test_nothing_is_recomputed_without_training():
    none = total("none", mode="eval")
    assert total("full", mode="eval", recompute_layers=1, recompute_rest="cheap") == none


def travelled(**memory) -> int:
    """Bytes that wait in CPU memory."""
    model, ids = tiny(n_layers=5, offload_activations=True, **memory).train(), random_ids(3, 16)
    model(ids, ids).backward()
    return sum(block.nbytes for block in model.host_memory.made)


@pytest.mark.parametrize(("first", "rest"), [("full", "cheap"), ("mlp", "full"), ("attn", "mlp")])
def test_offload_takes_what_both_keep(first, rest):
    """Of all blocks but the last."""
    of_first, of_rest = (travelled(recompute=policy) // 4 for policy in (first, rest))
    assert of_first > 0 and of_rest > 0
    assert travelled(**mix(first, 3, rest)) == 3 * of_first + of_rest
    assert travelled(**mix(first, 0, rest)) == 4 * of_rest
    assert travelled(**mix(first, 3, "none")) == 3 * of_first


def test_compiled_blocks_of_the_rest_run_to_their_end_too():
    last = 2 * CONFIG.d_model * CONFIG.d_ff  # FLOPs a token of the matmul that early stop spares
    for first, rest, n_full in (("full", "mlp", 3), ("mlp", "full", 1), ("full", "full", 4)):
        config = replace(CONFIG, **mix(first, 3, rest))
        _, eager = step_flops(config, T)
        assert step_flops(config, T, compiled=True)[1] - eager == n_full * last


# ---- prediction


def test_a_mix_costs_what_its_parts_cost():
    def cost(**memory) -> tuple[float, int]:
        return recompute_cost(replace(CONFIG, **memory), T)

    for first, rest in PAIRS:
        parts = [
            cost(recompute=first, recompute_layers=3),
            cost(recompute=rest, recompute_layers=1),
        ]
        assert cost(**mix(first, 3, rest)) == tuple(map(sum, zip(*parts, strict=True)))


@pytest.mark.parametrize(("less", "more"), [("full", "cheap"), ("mlp", "cheap")])
def test_the_policy_that_keeps_less_comes_first(less, more):
    """Backward of the last block works with all of its tensors, whatever it kept of them, beside
    what the others keep: that should be little."""
    plan = planner(WIDE)
    right, wrong = (plan.step(24, **mix(*way)) for way in ((less, 2, more), (more, 2, less)))
    assert right.kept == wrong.kept and right.peak < wrong.peak


def test_auto_starts_from_anything():
    """What the planner's own config says of the rest is not mixed into its rungs."""
    plain, mixed = planner(), planner(replace(CONFIG, **mix("full", 2, "cheap")))
    budget = plain.step(16, recompute="cheap", recompute_layers=2).peak
    assert pick_recompute(mixed, 16, budget).config == pick_recompute(plain, 16, budget).config


# ---- names and flags


def test_the_flags_of_a_mix_ask_for_it():
    shape = f"--n-layers=4 --n-heads=2 --d-model=32 --seq-len={T} --loss-chunks=4".split()
    for memory in [*MIXES, mix("mlp", 0, "cheap"), mix("mlp", 0, "none")]:
        config = replace(CONFIG, **memory)
        args = fill_in(build_parser("test", "x.pt").parse_args(shape + recompute_flags(config)))
        assert model_config(args, CONFIG.vocab_size) == config


def test_names():
    assert [describe_recompute(replace(CONFIG, **memory)) for memory in MIXES] == [
        "mlp in 2 of 4 blocks, cheap in the rest",
        "full in 1 of 4 blocks, sdpa in the rest",
        "cheap in 3 of 4 blocks, full in the rest",
        "full in groups of 2 in 2 of 4 blocks, full in the rest",
        "full in groups of 2 in 3 of 4 blocks, attn in the rest",
        "full in 3 of 4 blocks, selective in the rest",
        "full in 2 of 4 blocks, cheap in the rest, offloaded",
    ]
    assert describe_recompute(replace(CONFIG, **mix("full", 4, "cheap"))) == "full"


@pytest.mark.parametrize("more", ["", " --recompute-layers 2", " --use-activation-checkpoint"])
def test_a_rest_of_nothing_is_refused(more):
    needed = "--recompute-rest needs --use-activation-checkpoint and --recompute-layers for"
    with pytest.raises(UsageError, match=needed):
        fill_in(build_parser("test", "x.pt").parse_args(f"--recompute-rest cheap{more}".split()))


def test_the_plan_is_about_all_policies_whatever_was_asked():
    argv = "--use-activation-checkpoint mlp --recompute-layers 2 --recompute-rest cheap".split()
    args = parse_plan([*argv, "--lr=1"])
    assert args.recompute_rest is None
    assert command_line([*argv, "--lr=1"], args, []) == "python train_minimal.py --lr=1"


def test_a_snapshot_can_hold_it():
    config = MiniGPTConfig(**mix("mlp", 2, "cheap"))
    assert MiniGPTConfig(**asdict(config)) == config

"""Two policies in one model: one in the first blocks, another one in the rest."""

import re
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from cases.shapes import CONFIG, PRECISIONS, WIDE, T, mix
from harness.planned import planner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from test_model import random_ids, tiny
from test_recompute import BTC, total, train

from memory.policies import GRAMMAR, Recompute, expand, schedule, write
from model import RECOMPUTE_POLICIES, MiniGPTConfig
from planner.choose import pick_recompute
from planner.formulas import recompute_cost, step_flops
from scripts.plan_memory import command_line
from scripts.plan_memory import parse as parse_plan
from trainer.flags import build_parser, fill_in, model_config

pytestmark = pytest.mark.usefixtures("everything_travels")


def parse(words: list[str]):
    return build_parser("test", "x.pt").parse_args(words)


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
    way = f"{first}:{n},{rest}" + f"/{group}" * (first == "full") + "+offload" * offloaded
    none = trained("none", dropout=dropout, precision=precision)
    losses, *tensors = trained(way, dropout=dropout, precision=precision)
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
    assert calls(recompute="full:3,mlp/2") == ["full"] * 2 + ["mlp"] * 2  # two, one; each alone
    assert calls(training=False, recompute="mlp:2,cheap+offload") == ["none"] * 5


# ---- what is kept, what moves, what runs twice


@cache
def all_of(policy: str, n_layers: int) -> int:
    return total(policy, n_layers=n_layers)


def test_each_block_keeps_what_its_policy_keeps():
    for first, rest in PAIRS[::3]:
        kept = total(f"{first}:3,{rest}", n_layers=4)
        assert kept - all_of(rest, 1) == 3 * (all_of(first, 2) - all_of(first, 1))


def test_only_the_first_part_is_in_groups():
    alone, grouped = (total(f"full:3,mlp{group}", n_layers=5) for group in ("", "/3"))
    assert alone - grouped == 2 * 4 * BTC


def test_nothing_is_recomputed_without_training():
    none = total("none", mode="eval")
    assert total("full:1,cheap", mode="eval") == none


def travelled(way: str) -> int:
    """Bytes that wait in CPU memory."""
    model, ids = tiny(n_layers=5, recompute=f"{way}+offload").train(), random_ids(3, 16)
    model(ids, ids).backward()
    return sum(block.nbytes for block in model.host_memory.made)


@pytest.mark.parametrize(("first", "rest"), [("full", "cheap"), ("mlp", "full"), ("attn", "mlp")])
def test_offload_takes_what_both_keep(first, rest):
    """Of all blocks but the last."""
    of_first, of_rest = (travelled(policy) // 4 for policy in (first, rest))
    assert of_first > 0 and of_rest > 0
    assert travelled(f"{first}:3,{rest}") == 3 * of_first + of_rest
    assert travelled(f"{first}:0,{rest}") == 4 * of_rest
    assert travelled(f"{first}:3") == 3 * of_first


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
            cost(recompute=f"{first}:3"),
            cost(recompute=f"{rest}:1"),
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
    budget = plain.step(16, recompute="cheap:2").peak
    assert pick_recompute(mixed, 16, budget).config == pick_recompute(plain, 16, budget).config


# ---- the policy string

WORDS = some.sampled_from(RECOMPUTE_POLICIES)
STRINGS = some.builds(
    "{}{}{}{}".format,
    WORDS,
    some.just("")
    | some.builds(":{}{}".format, some.integers(0, 7), some.just("") | WORDS.map(",{}".format)),
    some.just("") | some.integers(0, 9).map("/{}".format),
    some.sampled_from(["", "+offload"]),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(STRINGS, some.integers(1, 7))
def test_what_is_written_says_the_same_and_is_the_shortest(text, n_layers):
    """Or it cannot be, and why is said in one line, with the grammar."""
    try:
        found = expand(text, n_layers)
    except ValueError as error:
        assert GRAMMAR in str(error) and text in str(error) and "\n" not in str(error)
        first, *more = re.split(r"([:/+])", text)
        layers = re.search(r":(\d+)", text)
        wrong = first == "none" and more
        wrong = wrong or layers and int(layers[1]) > n_layers or "/0" in text
        assert wrong or "/" in text and "/1" not in text and first != "full"
        return
    written = write(found)
    assert expand(written, n_layers) == found and len(written) <= len(text)
    assert write(expand(written, n_layers)) == written
    config = replace(CONFIG, n_layers=n_layers, recompute=text)
    assert config.recompute == written and config.expanded == found
    assert sum(blocks for _, blocks in found.calls) == n_layers
    typed = fill_in(parse(["--use-activation-checkpoint", text, f"--n-layers={n_layers}"]))
    assert model_config(typed, 97).recompute == written


@pytest.mark.parametrize(
    ("text", "policies", "group", "offload", "written"),
    [
        ("full", ["full"] * 4, 1, False, "full"),
        ("mlp:4,cheap", ["mlp"] * 4, 1, False, "mlp"),
        ("mlp:0,cheap", ["cheap"] * 4, 1, False, "cheap"),
        ("mlp:3,mlp+offload", ["mlp"] * 4, 1, True, "mlp+offload"),
        ("cheap:1,none", ["cheap", "none", "none", "none"], 1, False, "cheap:1"),
        ("full:3,attn/2", ["full", "full", "full", "attn"], 2, False, "full:3,attn/2"),
        ("full/1", ["full"] * 4, 1, False, "full"),
        ("full:0/2+offload", ["none"] * 4, 1, False, "none"),
    ],
)
def test_a_policy_string(text, policies, group, offload, written):
    found = expand(text, 4)
    assert found == (tuple(policies), group, offload) and write(found) == written


CANNOT_BE = ["", "some", "FULL", "mlp:5", "mlp,cheap", "mlp:-1", "mlp: 1", "mlp:1,some", "mlp/2",
             "full/0", "full /2", "full+offloads", "none:2", "none:1,mlp", "none+offload",
             "mlp:1,cheap,full"]  # fmt: skip


@pytest.mark.parametrize("text", CANNOT_BE)
def test_a_string_that_cannot_be(text):
    with pytest.raises(ValueError, match=re.escape(f"recompute must be {GRAMMAR}, not {text!r}: ")):
        expand(text, 4)
    with pytest.raises(ValueError):
        MiniGPTConfig(n_layers=4, recompute=text)


def test_no_string_says_three_policies():
    with pytest.raises(ValueError):
        write(Recompute(("mlp", "cheap", "full")))
    with pytest.raises(ValueError):
        write(Recompute(("none", "cheap")))


@pytest.mark.parametrize(
    ("older", "policy"),
    [
        ("--use-activation-checkpoint --recompute-layers 2", "full:2"),
        (
            "--recompute-layers 3 --use-activation-checkpoint mlp --recompute-rest cheap",
            "mlp:3,cheap",
        ),
        ("--use-activation-checkpoint --recompute-group 2 --offload-activations", "full/2+offload"),
        ("--use-activation-checkpoint mlp:2 --recompute-rest full", "mlp:2,full"),
        ("--use-activation-checkpoint mlp --recompute-group 1 --recompute-rest none", "mlp"),
        ("--use-activation-checkpoint auto --offload-activations", "auto+offload"),
        ("--use-activation-checkpoint auto --no-offload-activations --recompute-group 1", "auto"),
    ],
)
def test_older_flags_are_translated(older, policy):
    args = fill_in(parse([*older.split(), "--n-layers=4"]))
    assert args.use_activation_checkpoint == policy and "use_activation_checkpoint" in args.typed
    assert not {"recompute_layers", "recompute_rest", "recompute_group"} & vars(args).keys()
    assert not {"offload_activations", "older"} & vars(args).keys()


def test_help_has_one_spelling():
    text = build_parser("test", "x.pt").format_help()
    assert "--recompute-" not in text and "--offload" not in text and "mlp:7,cheap" in text


def test_the_plan_is_about_all_policies_whatever_was_asked():
    argv = "--use-activation-checkpoint mlp --recompute-layers 2 --recompute-rest cheap".split()
    args = parse_plan([*argv, "--lr=1"])
    assert args.use_activation_checkpoint == "none"
    assert command_line(args) == "python train_minimal.py --lr 1"

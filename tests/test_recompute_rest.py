"""Two policies in one model: one in the first blocks, another one in the rest."""

from dataclasses import asdict, replace
from functools import cache
from itertools import product

import pytest
from test_memory import CONFIG, PRECISIONS, WIDE, T, measured_peak, planner
from test_model import random_ids, tiny
from test_recompute import BTC, assert_same, total, train
from torch.utils.flop_counter import FlopCounterMode

from memory.policies import schedule
from model import RECOMPUTE_POLICIES, MiniGPT, MiniGPTConfig
from planner.choose import describe_recompute, pick_recompute, recompute_flags
from planner.formulas import closed_form, recompute_cost, step_flops
from scripts.plan_memory import command_line
from scripts.plan_memory import parse as parse_plan
from studies.ladder import of_products
from trainer.flags import UsageError, build_parser, fill_in, model_config

pytestmark = pytest.mark.usefixtures("everything_travels")

PAIRS = [pair for pair in product(RECOMPUTE_POLICIES[1:], repeat=2) if pair[0] != pair[1]]


def mix(first: str, n: int, rest: str, **changes) -> dict:
    """`first` in n blocks, `rest` in those after them."""
    return {"recompute": first, "recompute_layers": n, "recompute_rest": rest, **changes}


# ---- the same results


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("rest", RECOMPUTE_POLICIES)
def test_every_pair_equals_none(rest, dropout, precision):
    settings = dict(precision=precision, steps=1, dropout=dropout)
    none = train("none", **settings)
    for first in RECOMPUTE_POLICIES[1:]:
        for changes in ({}, {"offload_activations": True}):
            memory = mix(first, 2, rest, **changes)
            assert_same(none, train(memory.pop("recompute"), **settings, **memory))


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("rest", RECOMPUTE_POLICIES)
def test_groups_before_the_rest_equal_none(rest, offloaded):
    settings = dict(precision="bf16", steps=1, dropout=0.1)
    changes = dict(recompute_group=2, recompute_layers=3, recompute_rest=rest)
    grouped = train("full", **settings, **changes, offload_activations=offloaded)
    assert_same(train("none", **settings), grouped)


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


@pytest.mark.parametrize(("first", "rest"), PAIRS)
def test_each_block_keeps_what_its_policy_keeps(first, rest):
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


@cache
def counted(config: MiniGPTConfig) -> int:
    model, ids = MiniGPT(config).train(), random_ids(2, T)
    with FlopCounterMode(display=False) as counter:
        model(ids, ids).backward()
    return of_products(counter)


@pytest.mark.parametrize(("first", "rest"), PAIRS)
def test_flops_equal_those_that_torch_counts(first, rest):
    """But for attention's own: the difference to `none` has what those replay that replay
    attention."""
    config = replace(CONFIG, **mix(first, 3, rest))
    replays = 3 * (first in ("attn", "full")) + (rest in ("attn", "full"))
    unseen = replays * 2 * T * 2 * T * config.d_model
    _, replayed = step_flops(config, T)
    assert counted(config) - counted(CONFIG) == 2 * T * replayed - unseen


def test_compiled_blocks_of_the_rest_run_to_their_end_too():
    last = 2 * CONFIG.d_model * CONFIG.d_ff  # FLOPs a token of the matmul that early stop spares
    for first, rest, n_full in (("full", "mlp", 3), ("mlp", "full", 1), ("full", "full", 4)):
        config = replace(CONFIG, **mix(first, 3, rest))
        _, eager = step_flops(config, T)
        assert step_flops(config, T, compiled=True)[1] - eager == n_full * last


# ---- prediction

MIXES = [
    mix("mlp", 2, "cheap"),
    mix("full", 1, "sdpa"),
    mix("cheap", 3, "full"),
    mix("full", 2, "full", recompute_group=2),
    mix("full", 3, "attn", recompute_group=2),
    mix("full", 3, "selective"),
    mix("full", 2, "cheap", offload_activations=True),
]


@pytest.mark.parametrize(
    ("memory", "precision"),
    [*((memory, "fp32") for memory in MIXES), (MIXES[0], "bf16"), (MIXES[4], "bf16")],
    ids=str,
)
def test_predicted_peak_is_that_of_a_real_step(memory, precision):
    predicted = planner(precision=precision).step(16, **memory).peak
    measured = measured_peak(replace(CONFIG, **memory), 16, precision)
    assert predicted == pytest.approx(measured, rel=0.003)


SETTINGS = list(product(PRECISIONS, (0.0, 0.1)))


@pytest.mark.parametrize("i", range(4))
def test_closed_form_equals_the_simulation(i):
    """Each pair in one of the four settings: the policies alone are tested in all of them."""
    precision, dropout = SETTINGS[i]
    config = replace(CONFIG, dropout=dropout)
    plan = planner(config, precision, device_type="cuda")
    for memory in (*(mix(first, 3, rest) for first, rest in PAIRS[i::4]), *MIXES[3:5]):
        step = plan.step(5, **memory)
        form = closed_form(step.config, 5, T, PRECISIONS[precision])
        assert form["blocks"] == step.kept_per_block * config.n_layers, memory


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


@pytest.mark.parametrize("memory", [*MIXES, mix("mlp", 0, "cheap"), mix("mlp", 0, "none")], ids=str)
def test_the_flags_of_a_mix_ask_for_it(memory):
    config = replace(CONFIG, **memory)
    shape = f"--n-layers=4 --n-heads=2 --d-model=32 --seq-len={T} --loss-chunks=4".split()
    args = fill_in(build_parser("test", "x.pt").parse_args(shape + recompute_flags(config)))
    assert model_config(args, CONFIG.vocab_size) == config


def test_names():
    names = {describe_recompute(replace(CONFIG, **memory)) for memory in (MIXES[0], *MIXES[-3:])}
    assert names == {
        "mlp in 2 of 4 blocks, cheap in the rest",
        "full in groups of 2 in 3 of 4 blocks, attn in the rest",
        "full in 3 of 4 blocks, selective in the rest",
        "full in 2 of 4 blocks, cheap in the rest, offloaded",
    }
    assert describe_recompute(replace(CONFIG, **mix("full", 4, "cheap"))) == "full"


@pytest.mark.parametrize(
    "flags",
    [
        "--recompute-rest cheap",
        "--recompute-rest cheap --recompute-layers 2",
        "--recompute-rest cheap --use-activation-checkpoint",
    ],
)
def test_a_rest_of_nothing_is_refused(flags):
    needed = "--recompute-rest needs --use-activation-checkpoint and --recompute-layers for"
    with pytest.raises(UsageError, match=needed):
        fill_in(build_parser("test", "x.pt").parse_args(flags.split()))


def test_the_plan_is_about_all_policies_whatever_was_asked():
    argv = "--use-activation-checkpoint mlp --recompute-layers 2 --recompute-rest cheap".split()
    args = parse_plan([*argv, "--lr=1"])
    assert args.recompute_rest is None
    assert command_line([*argv, "--lr=1"], args, []) == "python train_minimal.py --lr=1"


def test_a_snapshot_can_hold_it():
    config = MiniGPTConfig(**mix("mlp", 2, "cheap"))
    assert MiniGPTConfig(**asdict(config)) == config

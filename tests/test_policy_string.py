"""The policy string: what it says, how it is written, and what older flags are translated to."""

import re
from dataclasses import replace

import pytest
from cases.shapes import CONFIG
from hypothesis import given, settings
from hypothesis import strategies as some

from memory.policies import GRAMMAR, Recompute, expand, write
from model import RECOMPUTE_POLICIES, MiniGPTConfig
from scripts.plan_memory import command_line
from scripts.plan_memory import parse as parse_plan
from trainer.flags import build_parser, fill_in, model_config
from trainer.older import OLDER


def parse(words: list[str]):
    return build_parser("test", "x.pt").parse_args(words)


WORDS = some.sampled_from(RECOMPUTE_POLICIES)
STRINGS = some.builds(
    "{}{}{}{}{}".format,
    WORDS,
    some.just("")
    | some.builds(":{}{}".format, some.integers(0, 7), some.just("") | WORDS.map(",{}".format)),
    some.just("") | some.integers(0, 9).map("/{}".format),
    some.sampled_from(["", "+nested"]),
    some.sampled_from(["", "+offload"]),
)


@settings(max_examples=300)
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
        wrong = wrong or "+nested" in text and ("/" not in text or "/1" in text)
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
    ("text", "policies", "group", "nested", "offload", "written"),
    [
        ("mlp:0,cheap", ["cheap"] * 4, 1, False, False, "cheap"),
        ("mlp:3,mlp+offload", ["mlp"] * 4, 1, False, True, "mlp+offload"),
        ("cheap:1,none", ["cheap", "none", "none", "none"], 1, False, False, "cheap:1"),
        ("full:3,attn/2", ["full", "full", "full", "attn"], 2, False, False, "full:3,attn/2"),
        ("full/2+nested+offload", ["full"] * 4, 2, True, True, "full/2+nested+offload"),
        ("full:0/2+nested+offload", ["none"] * 4, 1, False, False, "none"),
    ],
)
def test_a_policy_string(text, policies, group, nested, offload, written):
    found = expand(text, 4)
    assert found == (tuple(policies), group, nested, offload) and write(found) == written


CANNOT_BE = ["", "some", "FULL", "mlp:5", "mlp,cheap", "mlp:-1", "mlp: 1", "mlp:1,some", "mlp/2",
             "full/0", "full /2", "full+nested", "full/1+nested", "mlp/2+nested",
             "full/2+offload+nested", "full+offloads", "none:2", "none:1,mlp", "none+offload",
             "mlp:1,cheap,full"]  # fmt: skip


@pytest.mark.parametrize("text", CANNOT_BE)
def test_a_string_that_cannot_be(text):
    with pytest.raises(ValueError, match=re.escape(f"recompute must be {GRAMMAR}, not {text!r}: ")):
        expand(text, 4)
    with pytest.raises(ValueError):
        MiniGPTConfig(n_layers=4, recompute=text)


@pytest.mark.parametrize("policies", [("mlp", "cheap", "full"), ("none", "cheap")])
def test_what_no_string_says(policies):
    with pytest.raises(ValueError):
        write(Recompute(policies))


OLD = {
    "--use-activation-checkpoint --recompute-layers 2": "full:2",
    "--recompute-layers 3 --use-activation-checkpoint mlp --recompute-rest cheap": "mlp:3,cheap",
    "--use-activation-checkpoint --recompute-group 2 --offload-activations": "full/2+offload",
    "--use-activation-checkpoint full/2+nested --offload-activations": "full/2+nested+offload",
    "--use-activation-checkpoint mlp:2 --recompute-rest full": "mlp:2,full",
    "--use-activation-checkpoint mlp --recompute-group 1 --recompute-rest none": "mlp",
    "--use-activation-checkpoint auto --offload-activations": "auto+offload",
    "--use-activation-checkpoint auto --no-offload-activations --recompute-group 1": "auto",
}


@pytest.mark.parametrize(("older", "policy"), OLD.items())
def test_older_flags_are_translated(older, policy):
    args = fill_in(parse([*older.split(), "--n-layers=4"]))
    assert args.use_activation_checkpoint == policy and "use_activation_checkpoint" in args.typed
    assert not {*OLDER, "older"} & vars(args).keys()


def test_help_has_one_spelling():
    text = build_parser("test", "x.pt").format_help()
    assert "--recompute-" not in text and "--offload" not in text and "mlp:7,cheap" in text


def test_the_plan_is_about_all_policies_whatever_was_asked():
    argv = "--use-activation-checkpoint mlp --recompute-layers 2 --recompute-rest cheap".split()
    args = parse_plan([*argv, "--lr=1"])
    assert args.use_activation_checkpoint == "none"
    assert command_line(args) == "python train_minimal.py --lr 1"

"""The command line: what was typed, and back to words; shapes by name; how long a run is; and how
policies are spelled."""

from dataclasses import replace

import pytest
from cases.shapes import CONFIG
from harness.runs import parse, typed
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from memory import POLICY_NAMES, recompute_plan_of_config
from memory.policies import format_recompute_plan, parse_recompute_plan
from planner import Layout
from planner.formulas import count_parameters
from trainer.settings import Settings, resolve

# ---- back to words

# Of each type, and with what a shell or a parser might take for something else.
WAYS = [
    ["--train-data", "x", "a b*.txt"],
    ["--val-data=x.txt"],
    ["--tokenizer-name=byte"],
    ["--use-toy-data"],
    ["--seed=7"],
    ["--lr=0.03"],
    ["--lr=1e-05"],
    ["--model=gpt2"],
    ["--n-layers=7"],
    ["--init-from=x"],
    ["--use-activation-checkpoint"],
    ["--use-activation-checkpoint=mlp:7,full+offload"],
    ["--memory-budget=8GiB"],
    ["--memory-budget=500 MB"],
    ["--card=RTX 4090"],
    ["--num-steps=12"],
    ["--num-tokens=1.5B"],
    ["--eval-tokens=0"],
    ["--no-amp"],
    ["--amp-dtype=bfloat16"],
    ["--compile"],
    ["--no-compile"],
    ["--checkpoint-path", "it's $a b.pt"],
    ["--resume"],
]
TYPED = st.lists(st.sampled_from(WAYS), max_size=6)


def parse_all(typed: list[list[str]]) -> Settings:
    return Settings.parse([word for words in typed for word in words], "test")


@settings(max_examples=150)
@given(TYPED, TYPED)
def test_words_and_settings_are_the_same(typed, later):
    """And a change is as if it had been typed last."""
    first, new, both = (parse_all(words) for words in (typed, later, typed + later))
    assert parse_all([first.words()]) == first
    changes = {name: getattr(new, name) for name in new.typed}
    assert new.model or parse_all([first.words(**changes)]) == both
    assert first.words(**dict.fromkeys(first.typed)) == []


# ---- shapes by name


@pytest.mark.parametrize(
    ("name", "millions"),  # of parameters, as on Hugging Face's model cards
    [("gpt2", 124.4), ("gpt2-medium", 354.8), ("gpt2-large", 774.0), ("gpt2-xl", 1557.6)],
)
def test_a_name_stands_for_a_shape(name, millions):
    """And a single flag overrides it."""
    whole = parse(f"--model {name}")
    config = whole.model_config(50257)
    assert round(count_parameters(config) / 1e6, 1) == millions
    assert config.d_model // config.n_heads == 64 and config.d_ff == 4 * config.d_model
    assert whole.seq_len == whole.max_position_embeddings == 1024
    assert whole.tokenizer_name == "gpt2"
    part = typed(f"--seq-len 256 --n-layers 2 --model {name} --tokenizer-name byte")
    assert (part.seq_len, part.n_layers, part.tokenizer_name) == (256, 2, "byte")
    assert (part.d_model, part.max_position_embeddings) == (config.d_model, 1024)


# ---- how long a run is


@pytest.mark.parametrize(
    ("word", "tokens"),
    [
        ("1B", 10**9),
        ("1.5b", 1_500_000_000),
        ("2T", 2 * 10**12),
        ("10k", 10_000),
        ("768", 768),
        ("1e9", 10**9),
        ("1.234567M", 1_234_567),
    ],
)
def test_tokens_as_people_write_them(word, tokens):
    both = typed(f"--num-tokens {word} --eval-tokens {word}")
    assert both.num_tokens == both.eval_tokens == tokens


BATCH = "--batch-size 5 --grad-accum-steps 2 --seq-len 10"  # 100 tokens a replica


@pytest.mark.parametrize(
    ("flags", "replicas", "steps", "warm_up"),
    [
        ("", 1, 1000, 50),  # the default
        ("--num-steps 40", 1, 40, 2),
        ("--num-tokens 10K", 4, 25, 1),
        ("--num-tokens 9801", 1, 99, 4),  # whole steps, rounded up
        ("--num-tokens 200 --warmup-steps 7", 1, 2, 7),
    ],
)
def test_in_steps(flags, replicas, steps, warm_up):
    run = resolve(typed(BATCH, flags), Layout("ddp", world_size=replicas))
    assert (run.num_steps, run.warmup_steps) == (steps, warm_up)


# ---- the policy string: what it says, how it is written

WORDS = st.sampled_from(POLICY_NAMES)
STRINGS = st.builds(
    "{}{}{}{}{}".format,
    WORDS,
    st.just("")
    | st.builds(":{}{}".format, st.integers(0, 7), st.just("") | WORDS.map(",{}".format)),
    st.just("") | st.integers(0, 9).map("/{}".format),
    st.sampled_from(["", "+nested"]),
    st.sampled_from(["", "+offload"]),
)


@settings(max_examples=300)
@given(STRINGS, st.integers(1, 7))
def test_what_is_written_says_the_same_and_is_the_shortest(text, n_layers):
    try:
        found = parse_recompute_plan(text, n_layers)
    except ValueError:
        reject()
    written = format_recompute_plan(found)
    assert parse_recompute_plan(written, n_layers) == found and len(written) <= len(text)
    with pytest.raises(ValueError, match="no policy string"):  # a third policy between two
        format_recompute_plan(found._replace(policies=("mlp", "cheap", "mlp")))
    config = replace(CONFIG, n_layers=n_layers, recompute=text)
    assert recompute_plan_of_config(config) == found
    assert sum(blocks for _, blocks in found.group_policies_and_sizes) == n_layers
    run = parse(f"--use-activation-checkpoint {text} --n-layers={n_layers}")
    assert run.model_config(97).recompute == written


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
    found = parse_recompute_plan(text, 4)
    assert (
        found == (tuple(policies), group, nested, offload)
        and format_recompute_plan(found) == written
    )

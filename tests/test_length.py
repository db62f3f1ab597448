"""How long a run is: so many steps, so many tokens, or so many times the data."""

import pytest
from harness.runs import TINY, same, snapshot

import train_minimal
from trainer.flags import build_parser, fill_in, settle_length
from trainer.length import format_tokens

# 2 x 16 tokens a step, 12 sequences an epoch; without --num-steps.
FREE = [word for i, word in enumerate(TINY) if "--num-steps" not in TINY[max(i - 1, 0) : i + 1]]


def parse(*flags: str):
    return build_parser("test", "x.pt").parse_args(flags)


@pytest.mark.parametrize(
    ("word", "tokens", "again"),
    [
        ("1B", 10**9, "1B"),
        ("1.5b", 1_500_000_000, "1.5B"),
        ("300M", 3 * 10**8, "300M"),
        ("2T", 2 * 10**12, "2T"),
        ("10k", 10_000, "10K"),
        ("768", 768, "768"),
        ("1e9", 10**9, "1B"),
        ("1.234567M", 1_234_567, "1,234,567"),
        ("12345678901", 12_345_678_901, "12,345,678,901"),
        (".5B", None, ""),
        ("0", None, ""),
        ("1.5", None, ""),
        ("-1B", None, ""),
        ("1GB", None, ""),
        ("1e99", None, ""),
    ],
)
def test_tokens_as_people_write_them(word, tokens, again, capsys):
    if tokens is None:
        with pytest.raises(SystemExit):
            parse(f"--num-tokens={word}")
        assert "--num-tokens: must be a whole number of tokens" in capsys.readouterr().err
    else:
        assert parse("--num-tokens", word).num_tokens == tokens and format_tokens(tokens) == again


BATCH = "--batch-size 5 --grad-accum-steps 2 --seq-len 10".split()  # 100 tokens a process


@pytest.mark.parametrize(
    ("flags", "processes", "steps", "warm_up"),
    [
        ("", 1, 1000, 50),  # the default
        ("--num-steps 40", 1, 40, 2),
        ("--num-tokens 1K", 1, 10, 0),
        ("--num-tokens 10K", 4, 25, 1),
        ("--num-tokens 9801", 1, 99, 4),  # whole steps, rounded up
        ("--num-tokens 1", 1, 1, 0),
        ("--num-epochs 20", 1, 220, 11),  # 110 sequences, 10 a step
        ("--num-epochs 20", 2, 110, 5),
        ("--num-epochs 1.1", 1, 13, 0),
        ("--num-epochs 0.7", 1, 8, 0),
        ("--num-epochs 0.1 --warmup-steps 7", 1, 2, 7),
    ],
)
def test_in_steps(flags, processes, steps, warm_up):
    args = fill_in(parse(*BATCH, *flags.split()), processes)
    if args.num_epochs is None:  # then nothing has to wait for the data
        assert (args.num_steps, args.warmup_steps) == (steps, warm_up)
    settle_length(args, processes, windows=110)
    assert (args.num_steps, args.warmup_steps) == (steps, warm_up)


def test_epochs_are_not_rounded_as_floats_are():
    args = parse("--batch-size", "1", "--seq-len", "8", "--num-epochs", "1.1")
    settle_length(args, 1, windows=10)
    assert args.num_steps == 11


def train(path, *flags: str) -> int:
    return train_minimal.main([*FREE, f"--checkpoint-path={path}", *flags])


def test_a_run_of_tokens_or_epochs_is_one_of_steps(tmp_path, capsys):
    steps, tokens, epochs = (tmp_path / f"{name}.pt" for name in ("steps", "tokens", "epochs"))
    assert train(steps, "--num-steps=21", "--dropout=0.1") == 0
    assert train(tokens, "--num-tokens=641") == 0
    assert "2 sequences of 16 tokens a step, 21 steps, 672 tokens, 3.50 " in capsys.readouterr().out
    assert train(epochs, "--num-epochs=3.5") == 0
    for path in (tokens, epochs):
        assert snapshot(path)["args"]["num_steps"] == 21
        assert snapshot(path)["args"]["warmup_steps"] == 1
        assert same(snapshot(path)["model"], snapshot(steps)["model"])
        # A run goes on to its own end; or to another one, however that is said.
        assert train_minimal.main(["--resume", f"--checkpoint-path={path}"]) == 0
        assert "already at step 21" in capsys.readouterr().out
    resume = "--resume", f"--checkpoint-path={tokens}"
    for longer, end in (("--num-epochs=4", 24), ("--num-steps=25", 25), ("--num-tokens=832", 26)):
        before = snapshot(tokens)["step"]
        assert train_minimal.main([*resume, longer]) == 0
        said = capsys.readouterr().out
        assert f"changed, from here on: --num-steps {before} -> {end}\n" in said
        args = snapshot(tokens)["args"]
        assert snapshot(tokens)["step"] == args["num_steps"] == end
        given = {name: args[name] for name in ("num_tokens", "num_epochs") if args[name]}
        assert len(given) == (longer != "--num-steps=25")


def test_longer_than_any_run(tmp_path, capsys):
    for flag in ("--num-tokens=1000T", "--num-epochs=999999 --batch-size=1 --max-tokens=99999"):
        assert train(tmp_path / "new" / "run.pt", *flag.split()) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "steps of " in line and "at most 1,000,000,000 can be run" in line
    assert not list(tmp_path.iterdir())


def test_too_few_steps_to_profile(tmp_path, capsys):
    for flag in ("--num-tokens=192", "--num-epochs=1"):
        assert train(tmp_path / "run.pt", flag, "--profile=4") == 2
        assert "needs --num-steps 7 at least, not 6" in capsys.readouterr().err

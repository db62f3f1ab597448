"""--resume needs nothing else: the snapshot has the flags; what is typed wins, or is refused.

What a resumed run computes: test_resume.py.
"""

import math
import re
import shlex
import signal
from types import SimpleNamespace

import pytest
import torch
from harness.runs import TINY, Crash, crash_after, metrics, same, snapshot, train_here
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import train_ddp
import train_minimal
from data import find_dataset
from trainer import older
from trainer.flags import UsageError, build_parser, fill_in
from trainer.process import OneProcess
from trainer.resume import flag, keep_batch, same_batch, take_flags
from trainer.snapshot import Resumed, SnapshotError, peek

OWN_TEXT = [word for word in TINY if word != "--use-toy-data"]


def resume_alone(path, *flags: str) -> int:
    return train_minimal.main(["--resume", "--checkpoint-path", str(path), *flags])


FLAGS = "--use-activation-checkpoint=cheap:1,mlp"
FLAGS += " --grad-accum-steps=2 --lr=0.01"


def test_no_other_flag_is_needed(tmp_path, monkeypatch, capsys):
    """The weights are those of the uninterrupted run, though nothing of it was typed again."""
    path, whole = tmp_path / "run.pt", tmp_path / "whole.pt"
    flags = [*FLAGS.split(), "--save-interval=5", "--seed=4"]
    assert train_here(whole, *flags) == 0
    with monkeypatch.context() as here, pytest.raises(Crash):
        crash_after(11, here)
        train_here(path, *flags)
    capsys.readouterr()
    assert resume_alone(path) == 0
    assert "changed" not in capsys.readouterr().out
    assert same(snapshot(path)["model"], snapshot(whole)["model"])
    ours, theirs = (snapshot(file)["args"] for file in (path, whole))
    own = {"resume": True, "checkpoint_path": str(path)}
    assert ours == theirs | own
    assert [r["step"] for r in metrics(path)] == [r["step"] for r in metrics(whole)]


# ---- snapshots from before the policy string

# The keys and values that the code of then wrote into a snapshot of such a run: `args`, `config`.
OLD = {"recompute_layers": None, "recompute_rest": None, "recompute_group": 1}
OLD |= {"offload_activations": False}
MIX = {"recompute_layers": 1, "recompute_rest": "mlp"}


@pytest.mark.parametrize(
    ("policy", "fields", "now"),
    [
        ("none", {}, "none"),
        ("cheap", MIX, "cheap:1,mlp"),
        ("full", {"recompute_layers": 0}, "full:0"),
        ("full", {"recompute_group": 2, "offload_activations": True}, "full/2+offload"),
        ("auto", {"offload_activations": True}, "auto+offload"),
    ],
)
def test_older_flags_and_fields_are_one_string_now(policy, fields, now):
    rest = {"recompute_rest": fields.get("recompute_rest", "none")}  # (of a config; of args None)
    state = {
        "args": {"use_activation_checkpoint": policy, **OLD, **fields, "lr": 1.0},
        "config": {"recompute": policy, **OLD, **fields, **rest, "dropout": 0.0},
    }
    older.translate(state)
    config = {"recompute": now, "dropout": 0.0}
    assert state == {"args": {"use_activation_checkpoint": now, "lr": 1.0}, "config": config}
    older.translate(state)
    assert state["config"] == config  # what has no such field stays as it is


def test_a_snapshot_of_then_goes_on(tmp_path):
    """The oldest ones had no rest."""
    path, whole = tmp_path / "run.pt", tmp_path / "whole.pt"
    flags = ["--dropout=0.1", "--warmup-steps=2", "--lr-scheduler=constant"]
    assert train_here(whole, *flags, "--num-steps=6") == 0
    assert train_here(path, *flags, "--num-steps=2") == 0
    state = snapshot(path)
    fields = OLD | {"recompute_layers": 1}
    del fields["recompute_rest"]
    state["args"] |= fields | {"use_activation_checkpoint": "cheap"}
    state["config"] |= fields | {"recompute": "cheap"}
    torch.save(state, path)
    assert peek(path)["config"]["recompute"] == "cheap:1"
    assert resume_alone(path, "--num-steps=4") == 0
    assert snapshot(path)["config"]["recompute"] == "cheap:1"
    assert resume_alone(path, "--num-steps=6", "--recompute-rest=mlp") == 0
    assert snapshot(path)["config"]["recompute"] == "cheap:1,mlp"
    assert not OLD.keys() & snapshot(path)["args"].keys()
    assert same(snapshot(path)["model"], snapshot(whole)["model"])


def parse(words: list[str]):
    return build_parser("test", "x.pt").parse_args(words)


def taken(before: str | dict, typed: str):
    """The flags of a run of `before` that is resumed with `typed`."""
    saved = before if isinstance(before, dict) else vars(fill_in(parse(before.split())))
    args = parse(["--resume", *typed.split()])
    state = {"args": saved, "tokenizer": {"name": saved.get("tokenizer_name") or "bpe"}}
    take_flags(args, Resumed(state, args.checkpoint_path))
    return fill_in(args)


some = st.floats(1e-9, 1e-3)
DRAWN = {
    "--num-steps": st.integers(1, 10**9),
    "--lr": some,
    "--weight-decay": some | st.just(0),
    "--grad-clip-norm": some | st.just(0),
    "--val-ratio": st.floats(0.01, 0.99),
    "--seed": st.integers(0, 2**63 - 1),
    "--eval-interval": st.integers(0, 10**9),
    "--seq-len": st.integers(1, 10**6),
    "--memory-budget": st.integers(1, 2**50).map("{}b".format),
    "--use-activation-checkpoint": st.sampled_from(["none", "mlp", "full", "auto"]),
    "--optimizer": st.sampled_from(["adamw", "muon"]),
    "--train-data": st.lists(st.text("ab*- ", min_size=1).filter(lambda s: s[0] != "-")),
    **dict.fromkeys(["--compile", "--tf32", "--no-amp", "--use-toy-data"], st.none()),
}


@settings(deadline=None, derandomize=True, database=None)
@given(st.fixed_dictionaries({}, optional=DRAWN))
def test_all_flags_come_back(drawn):
    words: list[str] = []
    for flag_, value in drawn.items():
        values = value if isinstance(value, list) else [value]
        words += [flag_, *(str(one) for one in values if one is not None)] if values else []
    try:
        before = fill_in(parse(words))
    except UsageError:
        reject()
    saved = {"args": vars(before), "tokenizer": {"name": "bpe"}}
    after = parse(["--resume"])
    take_flags(after, Resumed(saved, after.checkpoint_path))
    assert vars(fill_in(after)) == vars(before) | {"resume": True, "typed": {"resume"}}


@pytest.mark.parametrize(
    ("before", "typed", "expected"),
    [
        ("--num-steps 77", "--num-steps 1000", {"num_steps": 1000, "warmup_steps": 3}),
        ("--num-tokens 7680", "", {"num_tokens": 7680, "num_steps": 10}),
        ("--num-tokens 7680", "--num-steps 9", {"num_tokens": None, "num_steps": 9}),
        ("--num-steps 9", "--num-tokens 7680", {"num_tokens": 7680, "num_steps": 10}),
        ("--num-epochs 2", "--num-tokens 7680", {"num_epochs": None, "num_steps": 10}),
        ("--model gpt2 --seq-len 64", "", {"d_model": 768, "seq_len": 64, "n_heads": 12}),
        ("--model gpt2 --seq-len 64", "--model gpt2", {"d_model": 768, "seq_len": 64}),
        ("--compile", "--no-compile", {"compile": False}),
        ("--tf32", "--no-tf32", {"tf32": False}),
        ("--lr 0.01", "--lr 0.001", {"min_lr": 0.0001}),  # it was a tenth of the rate, and is
        ("--lr 0.01 --min-lr 0.0005", "--lr 0.001", {"min_lr": 0.0005}),
        ("--no-amp", "--amp-dtype bfloat16", {"no_amp": False, "amp_dtype": "bfloat16"}),
        ("--amp-dtype bfloat16", "--no-amp", {"no_amp": True, "amp_dtype": "auto"}),
        (
            "--use-activation-checkpoint auto --memory-budget 1GiB",
            "--use-activation-checkpoint mlp",
            {"use_activation_checkpoint": "mlp", "memory_budget": None},
        ),
        ("--use-activation-checkpoint auto --card h100", "", {"card": "H100"}),
        (
            "--use-activation-checkpoint auto --card this-machine",
            "--use-activation-checkpoint mlp",
            {"use_activation_checkpoint": "mlp", "card": None},
        ),
        (
            "--use-activation-checkpoint full:2+offload",
            "--use-activation-checkpoint none",
            {"use_activation_checkpoint": "none"},
        ),
        (
            "--use-activation-checkpoint full:2/2",
            "--recompute-layers 1 --offload-activations",
            {"use_activation_checkpoint": "full:1/2+offload"},
        ),
        (
            "--use-activation-checkpoint full:2,mlp+offload",
            "--recompute-layers 0 --no-offload-activations",
            {"use_activation_checkpoint": "full:0,mlp"},
        ),
        (
            "--use-activation-checkpoint full:2,mlp",
            "--recompute-rest none",
            {"use_activation_checkpoint": "full:2"},
        ),
        (
            "--use-activation-checkpoint --recompute-layers 2 --recompute-rest mlp",
            "--use-activation-checkpoint --recompute-group 2",
            {"use_activation_checkpoint": "full/2"},
        ),
    ],
)
def test_what_is_typed_wins(before, typed, expected):
    args = taken(before, typed)
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("before", "typed", "named"),
    [
        ("", "--seq-len 128", "--seq-len: x.pt was trained with 64, this run has 128"),
        ("", "--model gpt2", "--model gpt2, --n-layers: x.pt was trained with 3, this run has 12"),
        ("--model gpt2", "--d-model 96", "--d-model: x.pt was trained with 768"),
        ("--seed 4", "--seed 5", "--seed: x.pt was trained with 4, this run has 5"),
        ("", "--tokenizer-name byte", "--tokenizer-name: x.pt was trained with bpe, this run has"),
        ("", "--use-toy-data", "--use-toy-data: x.pt was trained with text, this run has toy data"),
        (
            "--use-toy-data --vocab-size 31",
            "--train-data x.txt",
            "--train-data: x.pt was trained with toy data, this run has text",
        ),
    ],
)
def test_the_flag_that_was_typed_is_blamed(before, typed, named):
    with pytest.raises(SnapshotError, match=named):
        taken(before, typed)


@pytest.mark.parametrize(
    "strange",
    [
        {"n_layers": "x"},
        {"lr": {}},
        {"lr": math.nan},
        {"batch_size": 0},
        {"num_steps": True},
        {"lr_scheduler": "steps"},
        {"device": "gpu"},
        {"seq_len": 64.0},
    ],
    ids=str,
)
def test_a_strange_flag_in_a_snapshot(strange):
    """Nothing gets in by a file that the command line would refuse."""
    with pytest.raises(SnapshotError, match="of its flags, --" + flag(*strange)[2:]):
        taken(strange, "")


def test_a_path_with_a_space_can_be_pasted(tmp_path, monkeypatch, capfd):
    """From stopped, note and next, through a shell's eyes."""
    folder = tmp_path / "my runs"
    path = folder / "it's.pt"
    real = train_minimal.train_step

    def train_step(run):
        if run.step == 3:
            signal.raise_signal(signal.SIGTERM)
        return real(run)

    with monkeypatch.context() as here:
        here.setattr(train_minimal, "train_step", train_step)
        assert train_here(path) == 143
    out, err = capfd.readouterr()
    assert "finishing this step and saving; again to stop at once" in err
    (command,) = re.findall("^stopped .*with --resume: (.*)", out, re.M)
    words = ["python", "train_minimal.py", "--resume", "--checkpoint-path", str(path)]
    assert shlex.split(command) == words
    assert train_minimal.main(shlex.split(command)[2:]) == 0
    (command,) = re.findall("^next     (.*)", capfd.readouterr().out, re.M)
    assert shlex.split(command)[1:] == ["-m", "scripts.generate", "--checkpoint-path", str(path)]
    assert train_here(path, "--num-steps=2") == 0
    (command,) = re.findall("to go on with that one: (.*)", capfd.readouterr().out)
    assert train_minimal.main([*shlex.split(command)[2:], "--num-steps=21"]) == 0
    assert "step 20\n" in capfd.readouterr().out


def test_the_end_names_the_command_that_goes_on(tmp_path, capsys):
    """And of a run that does not go on nothing is said to have changed "from here on"."""
    path = tmp_path / "run.pt"
    assert train_here(path) == 0
    before = path.read_bytes()
    capsys.readouterr()
    assert resume_alone(path, "--log-interval=7") == 0
    assert path.read_bytes() == before
    out = capsys.readouterr().out
    assert "already at step 20; raise --num-steps" in out and "changed" not in out
    (command,) = re.findall("to go on: (.*)", out)
    assert train_minimal.main(shlex.split(command)[2:]) == 0
    assert snapshot(path)["step"] == 40


def test_a_jump_of_the_learning_rate_is_said(tmp_path, capsys):
    path = tmp_path / "run.pt"
    assert train_here(path) == 0
    assert resume_alone(path, "--num-steps=30") == 0
    records = metrics(path)
    said = f"was {records[19]['lr']:.2e} at step 20 and is {records[20]['lr']:.2e} at the next"
    assert said in capsys.readouterr().out and records[20]["lr"] > 1.5 * records[19]["lr"]
    assert resume_alone(path, "--num-steps=31", "--lr-scheduler=constant", "--lr=2e-9") == 0
    capsys.readouterr()
    assert resume_alone(path, "--num-steps=32") == 0  # another schedule, but the same rate
    assert "learning rate was" not in capsys.readouterr().out


def test_the_first_step_is_said_at_once(tmp_path, capsys):
    """But not recorded: the log's intervals stay what they are."""
    path = tmp_path / "run.pt"
    assert train_here(path, "--log-interval=10") == 0
    out = capsys.readouterr().out
    (line,) = re.findall(r"^first    step +1/20 \| .*loss .*", out, re.M)
    assert "eta" not in line  # the first step warms up: it would be a lie
    assert [r["step"] for r in metrics(path)] == [10, 20]


@pytest.mark.parametrize(
    ("before", "processes", "size", "steps", "words"),
    [
        (24, 1, 12, 1, "--grad-accum-steps 2 fits"),
        (24, 3, 12, 1, "--batch-size 8 fits"),
        (24, 4, 12, 2, "--batch-size 6 --grad-accum-steps 1 fits"),
        (30, 1, 12, 1, "--batch-size 10 --grad-accum-steps 3 fits"),
        (24, 5, 12, 1, "they cannot be dealt out evenly to 5 processes: start another number"),
    ],
)
def test_the_old_batch_on_another_number_of_processes(before, processes, size, steps, words):
    args = {"batch_size": size, "grad_accum_steps": steps}
    assert same_batch(before, size * steps * processes, args) == words


@pytest.mark.parametrize(
    ("typed", "world_size", "steps"),
    [
        ("", 1, 2),
        ("", 2, 1),  # two processes do what two micro-batches did
        ("", 3, 2),  # and three cannot: check_resumable says so
        ("--batch-size 24", 1, 1),
        ("--grad-accum-steps 2", 2, 2),
        ("--grad-accum-steps 3", 2, 3),
    ],
)
def test_accumulation_goes_where_processes_come(typed, world_size, steps):
    args = taken("--grad-accum-steps 2", typed)
    keep_batch(args, {"data": {"sequences_per_step": 24}}, world_size)
    assert args.grad_accum_steps == steps


def test_commands_of_several_processes(monkeypatch):
    monkeypatch.setattr("trainer.torchrun.end_with_torchrun", lambda: None)
    world = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    world |= {"MASTER_ADDR": "host", "MASTER_PORT": "29500", "MINIGPT_TIMEOUT_S": "9"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    args = SimpleNamespace(device="cpu")
    assert train_ddp.DDPProcess(args).command == ("torchrun", "--nproc-per-node=2", "train_ddp.py")
    for name, value in {"WORLD_SIZE": "6", "GROUP_WORLD_SIZE": "3", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert shlex.join(train_ddp.DDPProcess(args).command) == (
        "torchrun --nproc-per-node=2 --nnodes=3 --node-rank=0 --master-addr=host "
        "--master-port=29500 train_ddp.py"
    )


TEXT = "--tokenizer-name=bpe --vocab-size=300 --num-steps=4 --seq-len=8 --max-position-embeddings=8"


@pytest.fixture
def text_run(tmp_path, monkeypatch, capsys):
    """A finished run on a text: (its snapshot, the text)."""
    monkeypatch.setitem(find_dataset.__kwdefaults__, "cache_dir", tmp_path / "cache")
    text, path = tmp_path / "my text.txt", tmp_path / "run.pt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    flags = [*OWN_TEXT, f"--train-data={text}", *TEXT.split(), f"--checkpoint-path={path}"]
    assert train_minimal.main(flags) == 0
    capsys.readouterr()
    return path, text


def test_a_text_that_was_edited_is_gone_on_with(text_run, capsys):
    """One more line forbids nothing. It is encoded as before, and what changed is said."""
    path, text = text_run
    tokenizer = snapshot(path)["tokenizer"]
    text.write_text(text.read_text() + "zebras quarrel with quiet quetzals, one line more\n" * 9)
    assert resume_alone(path, "--num-steps=6") == 0
    out = capsys.readouterr().out
    said = re.search(r"resume   the data changed, it was .*my text.txt.* 1.76 kB; .*: .*", out)
    assert said and "validation losses of before do not compare" in said[0]
    assert snapshot(path)["step"] == 6 and snapshot(path)["tokenizer"] == tokenizer
    assert "training a BPE" not in out
    assert resume_alone(path, "--num-steps=8") == 0  # and that is its data from now on
    assert "data changed" not in capsys.readouterr().out


@pytest.mark.parametrize("asked", ["--val-ratio=0.3", "--max-tokens=100", "--train-data={other}"])
def test_other_data_is_refused(text_run, tmp_path, capsys, asked):
    path, text = text_run
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + "another one\n")
    assert resume_alone(path, "--num-steps=6", asked.format(other=other)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --train-data: ") and snapshot(path)["step"] == 4
    assert f"({asked.partition('=')[0]}); the data must stay the same" in error


def test_the_data_is_found_from_another_folder(text_run, tmp_path, monkeypatch, capsys):
    """And a text of the same name, which lies there by chance, is not taken for it."""
    path, text = text_run
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        folder.mkdir()
    (here / "t.txt").write_bytes(text.read_bytes())
    monkeypatch.chdir(here)
    words = [*OWN_TEXT, *TEXT.split(), f"--checkpoint-path={path}", "--train-data=t.txt"]
    assert train_minimal.main(words) == 0
    (elsewhere / "t.txt").write_text("something else\n" * 40)
    monkeypatch.chdir(elsewhere)
    assert resume_alone(path, "--num-steps=6") == 0
    assert "data changed" not in capsys.readouterr().out
    assert resume_alone(path, "--num-steps=8", "--train-data=t.txt") == 2
    assert "error: --train-data: " in capsys.readouterr().err


def test_the_same_text_may_have_moved(text_run, tmp_path, capsys):
    path, text = text_run
    other = tmp_path / "other.txt"
    text.rename(other)
    assert resume_alone(path, "--num-steps=6", f"--train-data={other}") == 0
    out = capsys.readouterr().out
    assert f"--train-data {text} -> {other}" in out and "data changed" not in out


def test_another_vocabulary_is_refused(text_run, capsys):
    path, _ = text_run
    assert resume_alone(path, "--num-steps=6", "--vocab-size=290") == 2
    assert "--vocab-size: " in capsys.readouterr().err


def test_the_command_is_as_it_was_typed(monkeypatch):
    monkeypatch.setattr("sys.argv", ["../minigpt/train_minimal.py", "--resume"])
    assert OneProcess(torch.device("cpu")).command == ("python", "../minigpt/train_minimal.py")
    monkeypatch.setattr("sys.argv", ["pytest"])
    assert OneProcess(torch.device("cpu")).command == ("python", "train_minimal.py")

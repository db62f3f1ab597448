"""--resume needs nothing else: the snapshot has the flags; what is typed wins, or is refused.

What a resumed run computes: test_resume.py. That flags come back as they were: test_flags.py.
"""

import math
import re
import shlex
import signal
from types import SimpleNamespace

import pytest
import torch
from harness.runs import TINY, Crash, crash_after, metrics, same, snapshot, train_here

import train_ddp
import train_minimal
from data import find_dataset
from trainer import older
from trainer.flags import build_parser, fill_in, flag
from trainer.process import OneProcess
from trainer.resume import keep_batch, same_batch, take_flags
from trainer.snapshot import Resumed, SnapshotError, peek

OWN_TEXT = [word for word in TINY if word != "--use-toy-data"]
FLAGS = "--use-activation-checkpoint=cheap:1,mlp --grad-accum-steps=2 --lr=0.01"


def resume_alone(path, *flags: str) -> int:
    return train_minimal.main(["--resume", "--checkpoint-path", str(path), *flags])


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
    assert ours == theirs | {"resume": True, "checkpoint_path": str(path)}
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


def taken(before: str | dict, typed: str = ""):
    """The flags of a run of `before` that is resumed with `typed`."""
    parse = build_parser("test", "x.pt").parse_args
    saved = before if isinstance(before, dict) else vars(fill_in(parse(before.split())))
    args = parse(["--resume", *typed.split()])
    state = {"args": saved, "tokenizer": {"name": saved.get("tokenizer_name") or "bpe"}}
    take_flags(args, Resumed(state, args.checkpoint_path))
    return fill_in(args)


FULL = "--use-activation-checkpoint full"
MLP = "--use-activation-checkpoint mlp"
AUTO = "--use-activation-checkpoint auto"


@pytest.mark.parametrize(
    ("before", "typed", "as_if"),
    [
        ("--num-steps 77", "--num-steps 1000", "--num-steps 1000 --warmup-steps 3"),
        ("--num-tokens 7680", "", "--num-tokens 7680"),
        ("--num-tokens 7680", "--num-steps 9", "--num-steps 9"),
        ("--num-steps 9", "--num-tokens 7680", "--num-tokens 7680"),
        ("--num-epochs 2", "--num-tokens 7680", "--num-tokens 7680"),
        ("--model gpt2 --seq-len 64", "", "--model gpt2 --seq-len 64"),
        ("--model gpt2 --seq-len 64", "--model gpt2", "--model gpt2 --seq-len 64"),
        ("--compile --tf32", "--no-compile", "--tf32"),
        ("--lr 0.01", "--lr 0.001", "--lr 0.001"),  # --min-lr was a tenth of the rate, and is
        ("--lr 0.01 --min-lr 0.0005", "--lr 0.001", "--lr 0.001 --min-lr 0.0005"),
        ("--no-amp", "--amp-dtype bfloat16", "--amp-dtype bfloat16"),
        ("--amp-dtype bfloat16", "--no-amp", "--no-amp"),
        (f"{AUTO} --memory-budget 1GiB", MLP, MLP),
        (f"{AUTO} --card this-machine", MLP, MLP),
        (f"{AUTO} --card h100", "", f"{AUTO} --card H100"),
        (f"{FULL}:2+offload", "--use-activation-checkpoint none", ""),
        (f"{FULL}:2,mlp", MLP, MLP),
        # The older flags change what they are about.
        (f"{FULL}:2/2", "--recompute-layers 1 --offload-activations", f"{FULL}:1/2+offload"),
        (f"{FULL}:2,mlp+offload", "--recompute-layers 0 --no-offload-activations", f"{FULL}:0,mlp"),
        (f"{FULL}:2,mlp", "--recompute-rest none", f"{FULL}:2"),
        (f"{FULL}:2,mlp", "--use-activation-checkpoint --recompute-group 2", f"{FULL}/2"),
        # What the run cannot change; the flag that was typed is blamed.
        ("", "--seq-len 128", "error: --seq-len: x.pt was trained with 64, this run has 128"),
        ("", "--model gpt2", "error: --model gpt2, --n-layers: x.pt was trained with 3, this run"),
        ("--model gpt2", "--d-model 96", "error: --d-model: x.pt was trained with 768"),
        ("--seed 4", "--seed 5", "error: --seed: x.pt was trained with 4, this run has 5"),
        ("", "--tokenizer-name byte", "error: --tokenizer-name: x.pt was trained with bpe, this"),
        ("", "--use-toy-data", "error: --use-toy-data: x.pt was trained with text, this run has"),
        ("--use-toy-data --vocab-size 31", "--train-data x.txt",
         "error: --train-data: x.pt was trained with toy data, this run has text"),
    ],
)  # fmt: skip
def test_what_is_typed_wins_or_is_refused(before, typed, as_if):
    if as_if.startswith("error: "):
        with pytest.raises(SnapshotError, match=as_if.removeprefix("error: ")):
            taken(before, typed)
        return
    now, wanted = vars(taken(before, typed)), taken({}, as_if)
    same_in_all = {"typed": wanted.typed}
    assert now | same_in_all == vars(wanted) | same_in_all


@pytest.mark.parametrize(
    "strange",
    [
        {"n_layers": "x"},
        {"lr": {}},
        {"lr": math.nan},
        {"batch_size": 0},
        {"num_steps": True},
        {"lr_scheduler": "steps"},
        {"model": {}},
        {"seq_len": 64.5},
    ],
    ids=str,
)
def test_a_strange_flag_in_a_snapshot(strange):
    """Nothing gets in by a file that the command line would refuse."""
    with pytest.raises(SnapshotError, match="of its flags, " + flag(*strange)):
        taken(strange)


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
    ],
)
def test_accumulation_goes_where_processes_come(typed, world_size, steps):
    args = taken("--grad-accum-steps 2", typed)
    keep_batch(args, {"data": {"sequences_per_step": 24}}, world_size)
    assert args.grad_accum_steps == steps


# ---- what is said, and can be pasted


def test_a_path_with_a_space_can_be_pasted(tmp_path, monkeypatch, capfd):
    """From stopped, next and note, through a shell's eyes; and each goes on where it says."""
    path = tmp_path / "my runs" / "it's.pt"
    real = train_minimal.train_step

    def train_step(run):
        if run.step == 3:
            signal.raise_signal(signal.SIGTERM)
        return real(run)

    def pasted(pattern: str) -> list[str]:
        (command,) = re.findall(pattern, capfd.readouterr().out, re.M)
        return shlex.split(command)

    with monkeypatch.context() as here:
        here.setattr(train_minimal, "train_step", train_step)
        assert train_here(path, "--log-interval=10") == 143
    resume = pasted("^stopped .*with --resume: (.*)")
    named = ["--checkpoint-path", str(path)]
    assert resume == ["python", "train_minimal.py", "--resume", *named]
    assert train_minimal.main(resume[2:]) == 0
    assert pasted("^next     (.*)")[1:] == ["-m", "scripts.generate", *named]
    assert [r["step"] for r in metrics(path)] == [3, 10, 20]

    before = path.read_bytes()
    assert train_minimal.main(resume[2:]) == 0  # nothing is left to do
    assert path.read_bytes() == before
    longer = pasted(r"already at step 20; raise --num-steps to go on: (.*)")
    assert train_here(path, "--num-steps=2") == 0
    older = pasted("to go on with that one: (.*)")
    assert train_minimal.main([*older[2:], *longer[5:]]) == 0
    assert "step 20\n" in capfd.readouterr().out and snapshot(older[-1])["step"] == 40


def test_what_is_said_first(tmp_path, capsys):
    """A jump of the learning rate; and the first step at once, though it is not recorded."""
    path = tmp_path / "run.pt"
    assert train_here(path, "--log-interval=10") == 0
    (line,) = re.findall(r"^first    step +1/20 \| .*loss .*", capsys.readouterr().out, re.M)
    assert "eta" not in line  # the first step warms up: it would be a lie
    assert [r["step"] for r in metrics(path)] == [10, 20]
    assert resume_alone(path, "--num-steps=30", "--log-interval=1") == 0
    before, after = metrics(path)[1:3]
    said = f"was {before['lr']:.2e} at step 20 and is {after['lr']:.2e} at the next"
    assert said in capsys.readouterr().out and after["lr"] > 1.5 * before["lr"]
    assert resume_alone(path, "--num-steps=31", "--lr-scheduler=constant", "--lr=2e-9") == 0
    capsys.readouterr()
    assert resume_alone(path, "--num-steps=32") == 0  # another schedule, but the same rate
    assert "learning rate was" not in capsys.readouterr().out


def test_commands_as_they_were_typed(monkeypatch):
    monkeypatch.setattr("sys.argv", ["../minigpt/train_minimal.py", "--resume"])
    assert OneProcess(torch.device("cpu")).command == ("python", "../minigpt/train_minimal.py")
    monkeypatch.setattr("sys.argv", ["pytest"])
    assert OneProcess(torch.device("cpu")).command == ("python", "train_minimal.py")

    monkeypatch.setattr("trainer.torchrun.end_with_torchrun", lambda: None)
    world = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    world |= {"MASTER_ADDR": "host", "MASTER_PORT": "29500", "MINIGPT_TIMEOUT_S": "9"}
    several = {"WORLD_SIZE": "6", "GROUP_WORLD_SIZE": "3", "GROUP_RANK": "0"}
    where = "--nnodes=3 --node-rank=0 --master-addr=host --master-port=29500"
    for now, words in ((world, ""), (world | several, f"{where} ")):
        for name, value in now.items():
            monkeypatch.setenv(name, value)
        process = train_ddp.DDPProcess(SimpleNamespace(device="cpu"))
        assert shlex.join(process.command) == f"torchrun --nproc-per-node=2 {words}train_ddp.py"


# ---- its data

TEXT = "--tokenizer-name=bpe --vocab-size=300 --num-steps=4 --seq-len=8 --max-position-embeddings=8"


@pytest.fixture
def text_run(tmp_path, monkeypatch, capsys):
    """A finished run, from another folder, on a text: (its snapshot, the text)."""
    monkeypatch.setitem(find_dataset.__kwdefaults__, "cache_dir", tmp_path / "cache")
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        folder.mkdir()
    text, path = here / "my text.txt", tmp_path / "run.pt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    monkeypatch.chdir(here)
    flags = [*OWN_TEXT, *TEXT.split(), f"--checkpoint-path={path}", "--train-data", text.name]
    assert train_minimal.main(flags) == 0
    monkeypatch.chdir(elsewhere)
    capsys.readouterr()
    return path, text


def test_other_data_is_refused(text_run, capsys):
    """A text of the same name, which lies where one goes on, is not taken for it either."""
    path, text = text_run
    for name in ("other.txt", text.name):
        with open(name, "w") as file:
            file.write(text.read_text() + "another one\n")
    before = path.read_bytes()
    must_stay = r"\); the data must stay the same"
    for asked, blamed in {
        "--val-ratio=0.3": rf"--train-data: .* \(--val-ratio{must_stay}",
        "--max-tokens=100": rf"--train-data: .* \(--max-tokens{must_stay}",
        "--train-data=other.txt": rf"--train-data: .* \(--train-data{must_stay}",
        f"--train-data={text.name}": "--train-data: ",
        "--vocab-size=290": "--vocab-size: .*run.pt was trained with 289, this run has 290",
    }.items():
        assert resume_alone(path, "--num-steps=6", asked) == 2
        error = capsys.readouterr().err
        assert re.match(f"error: {blamed}", error) and path.read_bytes() == before, asked


def test_a_text_that_has_moved_or_was_edited_is_gone_on_with(text_run, capsys):
    """One more line forbids nothing. It is encoded as before, and what changed is said."""
    path, text = text_run
    tokenizer = snapshot(path)["tokenizer"]

    def said(*flags: str) -> str:
        assert resume_alone(path, *flags) == 0
        return capsys.readouterr().out

    assert "data changed" not in said("--num-steps=5")  # found where it was
    moved = text.rename(text.with_name("moved.txt"))
    out = said("--num-steps=6", f"--train-data={moved}")
    assert f"--train-data {text} -> {moved}" in out and "data changed" not in out
    moved.write_text(moved.read_text() + "zebras quarrel with quiet quetzals, one line more\n" * 9)
    out = said("--num-steps=7")
    changed = re.search(r"resume   the data changed, it was .*moved.txt.* 1.76 kB; .*: .*", out)
    assert changed and "validation losses of before do not compare" in changed[0]
    assert snapshot(path)["step"] == 7 and snapshot(path)["tokenizer"] == tokenizer
    assert "training a BPE" not in out
    assert "data changed" not in said("--num-steps=8")  # that is its data from now on

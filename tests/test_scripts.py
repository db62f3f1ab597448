"""The scripts work from what a run leaves behind. Their mistakes: test_bad_input.py."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from itertools import islice

import pytest
import torch
from harness.runs import ROOT, TINY, run

from data.tokenizer import ToyTokenizer, load_tokenizer
from model import RECOMPUTE_POLICIES, MiniGPT, MiniGPTConfig
from scripts import generate, kept_tensors
from train_minimal import main as train
from trainer.flags import build_parser


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "run.pt"
    assert train([*TINY, "--checkpoint-path", str(path), "--eval-interval", "5"]) == 0
    return path


def test_generate_needs_the_snapshot_only(trained, tmp_path, capsys, monkeypatch):
    alone = tmp_path / "alone.pt"
    shutil.copy(trained, alone)
    monkeypatch.chdir(tmp_path)
    flags = ["--checkpoint-path", str(alone), "--max-new-tokens", "7", "--prompt", "3 1 2"]
    outputs = []
    for seed in ("1", "1", "2"):
        assert generate.main([*flags, "--seed", seed, "--num-samples", "2"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]
    first, second = outputs[0].removesuffix("\n").split("\n----------------\n")
    assert all(re.fullmatch(r"\d+( \d+){9}", sample) for sample in (first, second))
    assert first.startswith("3 1 2 ") and first != second


class Scripted:
    """A model that writes what it is told to: a column of ids for all samples at a time."""

    config = MiniGPTConfig(max_position_embeddings=4)

    def __init__(self, *samples) -> None:
        self.columns = iter(torch.tensor([list(sample) for sample in samples]).t())

    def stream(self, ids, max_new_tokens, **how):
        return (column[:, None] for column in islice(self.columns, max_new_tokens))


def written(model, *flags: str, tokenizer=None) -> list[str]:
    args = generate.build_parser().parse_args([*flags])
    tokenizer = tokenizer or load_tokenizer("byte")
    pieces = generate.write(args, model, tokenizer, torch.device("cpu"))
    return [piece for piece in pieces if piece]


def test_text_comes_in_whole_characters():
    euro = "a€😀é".encode()
    pieces = written(Scripted(euro), "--max-new-tokens", str(len(euro)), "--prompt", "p")
    assert pieces == ["p", "a", "€", "😀", "é", "\n"]
    # What never becomes a character is shown all the same, and so is half of one at the end.
    pieces = written(Scripted(b"a\xffb\xe2\x82"), "--max-new-tokens", "5")
    assert pieces == ["a", "\ufffdb", "\ufffd", "\n"]


def test_in_parts_or_as_a_whole_it_is_the_same_text():
    letters = random.Random(0)
    for _ in range(300):
        sample = bytes(letters.choices(b"a\xe2\x82\xac\xf0\x9f\x98\x80\xc3\xff\xed\xa0", k=12))
        text = "".join(written(Scripted(sample), "--max-new-tokens", "12"))
        assert text == sample.decode(errors="replace") + "\n"


def test_each_token_is_decoded_once_or_twice():
    """And not the whole sample again for each: that is quadratic."""
    tokenizer, decoded = load_tokenizer("byte"), []
    decode = tokenizer.decode
    tokenizer.decode = lambda ids: decoded.append(len(ids)) or decode(ids)
    text = "a€ é" * 50
    flags = ["--max-new-tokens", str(len(text.encode())), "--num-samples", "2", "--prompt", "pp"]
    pieces = written(Scripted(text.encode(), text.encode()), *flags, tokenizer=tokenizer)
    assert "".join(pieces) == f"pp{text}{generate.SEPARATOR}pp{text}\n"
    assert sum(decoded) <= 2 * 2 * len(f"pp{text}".encode())


def test_a_sample_ends_at_endoftext():
    eot = 256
    first, second = [*b"ab", eot, *b"cd"], [*b"vwxyz"]
    separator = generate.SEPARATOR
    flags = ["--max-new-tokens", "5", "--num-samples", "2"]
    pieces = written(Scripted(first, second), *flags)
    assert pieces == ["a", "b", separator, "vwx", "y", "z", "\n"]
    assert "".join(written(Scripted(second, first), *flags)) == f"vwxyz{separator}ab\n"
    pieces = written(Scripted(first, second), *flags, "--ignore-eot")
    assert "".join(pieces) == f"ab<|endoftext|>cd{separator}vwxyz\n"
    model = Scripted([*b"a", eot, *b"bcd"])
    assert "".join(written(model, "--max-new-tokens", "5")) == "a\n"
    assert len(list(model.columns)) == 3  # nothing is computed that nobody sees
    toy = written(Scripted([1, 0, 2]), "--max-new-tokens", "3", tokenizer=ToyTokenizer(4))
    assert "".join(toy) == "1 0 2\n"  # its numbers are numbers, 0 too


def test_the_samples_are_those_of_one_batch():
    """The same seed has always given the same text, whether it is streamed or not."""
    torch.manual_seed(5)
    tokenizer = load_tokenizer("byte")
    model = MiniGPT(
        MiniGPTConfig(tokenizer.vocab_size, 8, n_layers=1, n_heads=2, d_model=16, d_ff=32)
    )
    flags = ["--num-samples", "3", "--max-new-tokens", "30", "--prompt", "né", "--seed", "7"]
    text = "".join(written(model.eval(), *flags, "--ignore-eot"))
    start = torch.tensor([[256, *"né".encode()]] * 3)
    torch.manual_seed(7)
    rows = model.generate(start, 30, temperature=0.8, top_k=40)
    samples = [tokenizer.decode(row[1:].tolist()) for row in rows]
    assert text == generate.SEPARATOR.join(samples) + "\n"


def test_a_prompt_that_is_cut_is_said(trained, capsys):
    flags = ["--checkpoint-path", str(trained), "--max-new-tokens", "3", "--prompt"]
    assert generate.main([*flags, "1 " * 16]) == 0
    assert capsys.readouterr().err == ""
    assert generate.main([*flags, "1 " * 17]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("note: --prompt has 17 tokens; the model sees the last 16 of them")
    assert len(err.splitlines()) == 1 and len(out.split()) == 20  # shown it is as a whole


@pytest.mark.parametrize("samples", ["1", "2"])
def test_out_of_memory(samples, trained, capsys, monkeypatch):
    """As a CPU says it. It is no bug that comes with a traceback, and the line is a line."""
    real, calls = MiniGPT.forward, []

    def fail(*args, **how):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't "
                               "allocate memory: you tried to allocate 8 bytes.")  # fmt: skip
        return real(*args, **how)

    monkeypatch.setattr(MiniGPT, "forward", fail)
    flags = ["--checkpoint-path", str(trained), "--prompt", "1 2", "--num-samples", samples]
    assert generate.main(flags) == 4
    out, err = capsys.readouterr()
    assert re.fullmatch(r"1 2 \d+ \d+\n", out)  # what was written until then
    words = f"--num-samples {samples} and --max-new-tokens 200"
    assert err == f"error: out of memory with {words}: lower them\n"
    monkeypatch.setattr(generate, "load_model", lambda *_: torch.ones(2) @ torch.ones(3))  # a bug
    with pytest.raises(RuntimeError, match="size"):
        generate.main(flags)


def table(room: str) -> dict[str, list[str]]:
    """What the room's __init__.py lists: command -> the question that it answers, what it takes."""
    docstring = (ROOT / room / "__init__.py").read_text().split('"""')[1]
    _, *rows = docstring.split("\n\n")[1].strip().splitlines()
    return {name: rest for name, *rest in (re.split(r"  +", row) for row in rows)}


def startable(room: str) -> set[str]:
    files = (path for path in (ROOT / room).glob("*.py") if "\nif __name__ ==" in path.read_text())
    return {path.stem for path in files} | {path.name for path in (ROOT / room).glob("*.sh")}


@pytest.mark.parametrize(("room", "most"), [("scripts", 16), ("studies", 13)])
def test_a_rooms_table_is_the_room(room, most):
    listed = table(room)
    assert listed.keys() == startable(room) and len(listed) <= most
    for question, takes in listed.values():
        assert "?" in question and takes


def start(*words: str, cwd=ROOT, **env: str) -> subprocess.CompletedProcess:
    """A Python of its own: no fork of one that has imported all."""
    how = {"capture_output": True, "text": True, "timeout": 120, "env": os.environ | env}
    return subprocess.run([sys.executable, *words], cwd=cwd, **how)


def test_tools_start_by_their_path_too(tmp_path):
    """By the same lines in each, before anything else is imported; they work from any folder."""
    for tool in startable("scripts"):
        if tool.endswith(".sh"):
            continue
        before, _, after = (ROOT / "scripts" / f"{tool}.py").read_text().partition("import sys\n")
        assert before.count('"""') == 2 and "import " not in before.rpartition('"""')[2], tool
        assert after.startswith(f"""
if not __package__:  # python scripts/{tool}.py: the others lie one folder up
    sys.path[0] += "/.."
    import scripts  # noqa: F401
"""), tool
    for tool in ("memory_timeline", "plan_memory"):
        result = start(str(ROOT / f"scripts/{tool}.py"), "--help", cwd=tmp_path)
        assert result.returncode == 0 and result.stderr == "", result.stderr
        assert result.stdout.startswith("usage: ")


@pytest.mark.parametrize("words", [["-m", "studies.ladder"], ["scripts/generate.py"]])
def test_ctrl_c_during_imports(tmp_path, words):
    """A library may make something else of it."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n"
        "    raise ImportError('half of it is missing')\n"
    )
    result = start(*words, PYTHONPATH=str(tmp_path))
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "stopped\n")


def writing(trained) -> subprocess.Popen:
    """generate, for hours, as soon as it writes."""
    flags = ["--checkpoint-path", str(trained), "--max-new-tokens", "1000000", "--prompt", "1 2"]
    command = [sys.executable, "-m", "scripts.generate", *flags]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout.read(4) == "1 2 "
    return process


def test_ctrl_c_is_one_line(trained):
    process = writing(trained)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "stopped\n")


def test_a_reader_may_go(trained):
    process = writing(trained)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 141
    # A few lines leave the buffer at the very end.
    command = f"{sys.executable} -m scripts.generate --help | true"
    result = run(["bash", "-c", command], PYTHONUNBUFFERED="")
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("recipe", "program", "sequences"),
    [("gpt2_small", "python", 480), ("gpt2_small_ddp", "torchrun", 512)],
)
def test_recipes_run_and_know_their_flags(tmp_path, recipe, program, sequences):
    """With a stand-in for python and torchrun that only shows what it was started with."""
    stand_in = tmp_path / program
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = ["bash", f"scripts/{recipe}.sh", "my text.txt", "--lr", "1"]
    result = run(command, PATH=path, GPUS="4")
    words = result.stdout.splitlines()
    args = build_parser("test", "x.pt").parse_args(words[words.index("--train-data") :])
    assert args.train_data == ["my text.txt"] and args.lr == 1
    command[1] = str(ROOT / command[1])
    words = run(command, cwd=tmp_path, PATH=path, GPUS="4").stdout.splitlines()
    assert str(tmp_path / "my text.txt") in words  # it may be started from where the text lies
    processes = 4 if program == "torchrun" else 1
    assert args.batch_size * args.grad_accum_steps * processes == sequences
    assert run(["bash", f"scripts/{recipe}.sh"]).returncode == 2


def test_kept_tensors_lists_every_policy(capsys):
    flags = ["--batch-size", "1", "--seq-len", "64", "--d-model", "48", "--n-heads", "4"]
    assert kept_tensors.main(flags) == 0
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert [table.split(":")[0] for table in tables] == list(RECOMPUTE_POLICIES)
    assert re.search(r"MiB|KiB", tables[0].splitlines()[0])
    gelu = r"bfloat16 1x64x192 +mlp gelu +model.py:\d+ +return self.c_proj\(F.gelu"
    assert re.search(gelu, tables[0])
    assert "gelu" not in tables[1].replace("F.gelu", "")  # cheap: replayed


def test_kept_tensors_of_a_shape_by_name(capsys):
    """And no weights."""
    xl = ["--model", "gpt2-xl"]
    for more, size in (([], "768"), (xl, "1600"), ([*xl, "--d-model", "400"], "400")):
        assert kept_tensors.main(["--policy", "full", *more, "--no-amp"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("full: 1 tensors")
        assert re.findall(r"float32 +2x1024x(\d+)", out) == [size]

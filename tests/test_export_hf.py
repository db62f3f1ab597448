"""scripts/export_hf.py: transformers opens the folder, and finds the same there; and so do we in
one of its own."""

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from harness.gpt2_folder import TOKENIZER
from harness.runs import TINY, same, snapshot

import train_minimal
from data import Tokenizer, find_dataset
from scripts import export_hf, generate
from trainer.hf import read_tensors, their_name, turned
from trainer.pretrained import load_model, open_pretrained

CPU = torch.device("cpu")
TEXT = "def function(x):\n    return x + 1\r\n\n# ünï 😀 <|endoftext|>\n" * 200
FILES = set("README.md config.json generation_config.json model.safetensors".split())
FILES |= set("tokenizer.json tokenizer_config.json vocab.json merges.txt".split())
RUN = TINY[TINY.index("--n-layers") :]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "x.txt").write_text(TEXT, encoding="utf-8")
    path = folder / "run.pt"
    words = [f"--train-data={folder}/x.txt", "--tokenizer-name=bpe", "--vocab-size=290"]
    words += "--num-steps=3 --seq-len=64 --eval-batches=1 --eval-interval=1".split()
    words += ["--lr=0.03", "--dropout=0.2"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(find_dataset.__kwdefaults__, "cache_dir", folder / "cache")
        assert train_minimal.main([*RUN, *words, f"--checkpoint-path={path}"]) == 0
    return path


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """As on a disk that is full: the system refuses what is beyond."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def folder(run) -> Path:
    out = run.with_name("hf")
    assert export_hf.main([f"--checkpoint-path={run}", f"--out={out}"]) == 0
    return out


@pytest.fixture(scope="module")
def theirs(folder):
    transformers = pytest.importorskip("transformers")
    model, about = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(about[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def test_transformers_and_ours_find_the_same_model(run, folder, theirs):
    assert type(theirs).__name__ == "GPT2LMHeadModel"
    model, tokenizer = load_model(folder, CPU)
    assert same(model.state_dict(), snapshot(run)["model"])
    saved = Tokenizer.from_state(snapshot(run)["tokenizer"])
    assert tokenizer.fingerprint == saved.fingerprint and tokenizer.pattern == saved.pattern
    ids = torch.randint(0, model.config.vocab_size, (2, 64))
    logits = model(ids)
    assert (theirs(ids).logits - logits).abs().max() <= 1e-5 * logits.abs().max()
    dropouts = [value for name, value in vars(theirs.config).items() if name.endswith("_pdrop")]
    assert dropouts == [0.2] * 3


def test_logits_loss_and_gradients_are_those_of_transformers(tmp_path):
    """Of a model that transformers has written, in shards, with an MLP of another width."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    shape = {"n_layer": 3, "n_head": 4, "n_embd": 64, "n_positions": 48, "n_inner": 100}
    shape |= dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    config = transformers.GPT2Config(
        **shape,
        vocab_size=257,
        attn_implementation="eager",
        activation_function="gelu_pytorch_tanh",
    )
    theirs = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in theirs.parameters():  # no zero biases and unit gains, which hide mistakes
            parameter += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(TOKENIZER))

    ours, tokenizer = load_model(tmp_path / "hf", CPU)
    assert tokenizer.vocab_size == 257 and not ours.training
    ids = torch.randint(0, 257, (2, 49))
    logits = theirs(ids[:, :-1]).logits
    assert (ours(ids[:, :-1]) - logits).abs().max() <= 1e-5 * logits.abs().max()
    expected = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    expected.backward()
    loss = ours.train()(ids[:, :-1], ids[:, 1:])
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    gradients = {name: p.grad for name, p in theirs.transformer.named_parameters()}
    for name, parameter in ours.named_parameters():
        wanted = turned(name, gradients[their_name(name)])
        assert (parameter.grad - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name


def test_transformers_finds_the_same_tokenizer(run, folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_state(snapshot(run)["tokenizer"])
    for text in (TEXT, "", " ", "a\r\nb  c\t\n", "<|endoftext|>", "naïve 🤗"):
        ids = theirs(text).input_ids
        assert ids == ours.encode(text).tolist()
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == theirs.bos_token_id == ours.eot_id
    assert theirs.model_max_length == 64


def test_greedy_text_is_the_same(folder, theirs, capsys):
    _, tokenizer = load_model(folder, CPU)
    start = torch.tensor([[tokenizer.eot_id, *tokenizer.encode("def ").tolist()]])
    ids = theirs.generate(
        start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=50,
        max_length=None, eos_token_id=None,
    )[0].tolist()  # fmt: skip
    capsys.readouterr()
    words = f"--checkpoint-path={folder} --max-new-tokens=50 --temperature=0 --ignore-eot"
    assert generate.main([*words.split(), "--prompt=def ", "--device=cpu"]) == 0
    assert capsys.readouterr().out == tokenizer.decode(ids[1:]) + "\n"


def test_the_card_tells_what_was_trained(run, folder):
    card = (folder / "README.md").read_text(encoding="utf-8")
    state, source = snapshot(run), open_pretrained(run)
    record = json.loads(run.with_name("run.metrics.jsonl").read_text().splitlines()[-1])
    assert card.startswith("---\nlibrary_name: transformers\n")
    description = state["data"]["description"].replace(f"{run.parent}/", "")
    assert f"from random weights, for {state['step']} steps on: {description}" in card
    assert str(run.parent) not in card and f"--init-from {folder.name}" in card
    for name in ("train_loss", "val_loss"):
        assert f"| {record[name]:.4f} | {math.exp(record[name]):.2f} |" in card

    about = ": 5 documents, 3.1 kB; 1,024 training and 99 validation tokens (byte, 257 ids)"
    state["data"]["description"] = f"man/* and 2 more{about}"
    state["args"]["train_data"] = ["/home/me/man/*", "/home/me/book: 5.txt", "/srv/code"]
    state["args"]["init_from"] = Path("/home/me/gpt2")
    card = export_hf.model_card("x", source, state)
    assert f" on: man/*, book: 5.txt, code{about}." in card and "/me" not in card
    assert f"from the weights of gpt2, for {state['step']} steps" in card
    state["data"]["description"] = "00.bin and 11 more; 1,024 training and 99 validation tokens"
    state["args"]["train_data"] = [f"/srv/{i:02}.bin" for i in range(12)]
    card = export_hf.model_card("x", source, state)
    assert " on: 00.bin, 01.bin, " in card and ", 09.bin and 2 more; 1,024 training" in card


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names are Unicode")
def test_names_that_are_no_text(run, tmp_path):
    state = snapshot(run)
    state["args"]["train_data"] = [os.fsdecode(b"/home/w\xf6rter.txt")]
    state["data"]["description"] = "w and 1 more: 1 document"
    out = Path(os.fsdecode(bytes(tmp_path) + b"/w\xf6rter"))
    export_hf.export(open_pretrained(run), state, out)
    assert "on: w?rter.txt: 1 document." in (out / "README.md").read_text(encoding="utf-8")


def test_the_cards_example(folder, monkeypatch, capsys):
    """It runs as it stands there, and its prompt begins as documents do."""
    transformers = pytest.importorskip("transformers")
    seen = []
    real = transformers.GPT2LMHeadModel.generate

    def generate(self, **options):
        seen.append(options["input_ids"][0].tolist())
        return real(self, **options)

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "generate", generate)
    monkeypatch.chdir(folder.parent)
    code = (folder / "README.md").read_text(encoding="utf-8").split("```python\n")[1]
    exec(code.split("```")[0], {})
    _, tokenizer = load_model(folder, CPU)
    prompt = "Once upon a time"
    assert seen == [[tokenizer.eot_id, *tokenizer.encode(prompt).tolist()]]
    assert capsys.readouterr().out.startswith(f"<|endoftext|>{prompt}")


def test_toy_data_have_no_tokenizer(tmp_path, capsys):
    path = tmp_path / "run.pt"
    assert train_minimal.main([*TINY, "--num-steps=1", f"--checkpoint-path={path}"]) == 0
    capsys.readouterr()
    assert export_hf.main([f"--checkpoint-path={path}", f"--out={tmp_path / 'hf'}"]) == 0
    assert "next" not in capsys.readouterr().out  # --init-from needs a tokenizer
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "there is no tokenizer" in card and not re.search(r"pipeline\(|--init-from", card)
    names = {file.name for file in (tmp_path / "hf").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    assert len(read_tensors(tmp_path / "hf" / "model.safetensors")) == 28


def test_mistakes_cost_one_line(run, folder, tmp_path, capfd):
    before = sorted(run.parent.rglob("*"))
    full = tmp_path / "full"
    full.mkdir()
    (full / "letters.txt").write_text("mine")
    for path, out, says in [
        (run, full / "none" / "..", "is there and not empty; name another folder"),
        (run, full / "letters.txt", "is a file, no folder"),
        (folder, tmp_path / "new", "is a folder, no snapshot"),
        (tmp_path / "none.pt", tmp_path / "new", "no snapshot and no folder"),
    ]:
        try:
            code = export_hf.main([f"--checkpoint-path={path}", f"--out={out}"])
        except SystemExit as stop:
            code = stop.code
        (line,) = capfd.readouterr().err.splitlines()
        assert code == 2 and line.startswith("error: ") and says in line, line
    assert sorted(run.parent.rglob("*")) == before
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "letters.txt"]


@pytest.mark.parametrize("out", ["empty", "none/.."])
def test_an_empty_folder_is_filled(run, out, tmp_path, monkeypatch, capsys):
    """However it is named: it stays the folder that it was, with somebody in it or a mount."""
    folder = tmp_path / "a" / "my model"
    folder.mkdir(parents=True)
    (tmp_path / "a" / "empty").symlink_to(folder)
    monkeypatch.chdir(folder.parent if out == "empty" else folder)
    inode = folder.stat().st_ino
    assert export_hf.main([f"--checkpoint-path={run}", f"--out={out}"]) == 0
    assert folder.stat().st_ino == inode
    assert {path.name for path in folder.iterdir()} == FILES
    assert {path.name for path in folder.parent.iterdir()} == {"my model", "empty"}
    card = (folder / "README.md").read_text()
    assert '"text-generation", "my model")' in card and "--init-from 'my model'" in card
    line = f"next     python train_minimal.py --init-from {shlex.quote(out)}\n"
    assert capsys.readouterr().out.endswith(line)


def test_a_folder_is_filled_or_stays_empty(run, tmp_path, monkeypatch, capfd):
    """And what it is recognized by comes last: a process may be killed between two files."""
    moved: list[str] = []
    rename = Path.rename
    flags = [f"--checkpoint-path={run}", f"--out={tmp_path}"]
    for out in (tmp_path, tmp_path / "hf"):
        with files_of_at_most(20_000):
            assert export_hf.main([flags[0], f"--out={out}"]) == 3
        (line,) = capfd.readouterr().err.splitlines()
        wanted = "error: cannot save .*model.safetensors: disk full .*; it needs 0.0 MB"
        assert re.match(wanted, line) and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(Path, "rename", lambda a, b: moved.append(a.name) or rename(a, b))
    assert export_hf.main(flags) == 0
    assert set(moved) == FILES and moved[-1] == "config.json"

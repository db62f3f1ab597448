"""The pictures show what the planner says, and the planner says what the allocator does."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import train_minimal
from planner.timeline import KINDS
from scripts import memory_timeline as script
from scripts import memory_timeline_frontier as frontier
from scripts import memory_timeline_numbers as numbers
from scripts import memory_timeline_pictures as pictures
from trainer import setup
from trainer.flags import UsageError
from trainer.plan import make_planner

SHAPE = "--n-layers 2 --n-heads 2 --d-model 32 --seq-len 32 --batch-size 8".split()
TINY = [*SHAPE, *"--vocab-size 997 --loss-chunks 2 --device cpu".split()]
BFLOAT16 = ["--amp-dtype", "bfloat16"]
KIB = 2**10  # the tiny model's unit is MiB: finer


@pytest.fixture(scope="module")
def planner():
    return script.prepare(script.parse([*TINY, *BFLOAT16]))


def steps(planner):
    return {name: planner.step(8, **numbers.POLICIES[name]) for name in numbers.PANELS}


def titles(figure):
    return figure.get_suptitle().split("\n")


@pytest.mark.parametrize("name", numbers.POLICIES)
def test_each_phase_is_as_wide_as_its_flops(planner, name):
    step = planner.step(8, **numbers.POLICIES[name])
    at, replayed = numbers.flops_done(step), numbers.relative_flops(step) - 1
    starts = [at[step.phase(phase).start] for phase in numbers.PHASES]
    forward, head, backward = np.diff(starts)
    assert starts[0] == 0 and at[-1] == pytest.approx(1 + replayed + 1 / 50)
    assert (np.diff(at) >= 0).all()
    config = planner.config
    # Per token, multiplied and added: a block's weights, attention's products (half are masked).
    block = 12 * config.d_model**2 + planner.seq_len * config.d_model
    assert head / forward == pytest.approx(3 * 997 * config.d_model / (config.n_layers * block))
    assert backward == pytest.approx(2 * forward + replayed)
    assert (replayed > 0) == (name not in ("plain", "none", "cheap", "selective"))


def test_timeline_stacks_what_the_planner_counts(plt, planner):
    figure = pictures.draw_timeline(plt, planner, 8, {})
    panels = dict(zip(numbers.PANELS, figure.axes, strict=False))  # (the last one: the teeth)
    assert set(pictures.COLORS) == set(KINDS)
    for name, step in steps(planner).items():
        tops = np.zeros(len(step.timeline))
        layers = panels[name].collections[: len(KINDS)]
        for kind, layer in zip(pictures.COLORS, layers, strict=True):
            tops += step.timeline[:, KINDS.index(kind)]
            outline = layer.get_paths()[0].vertices
            assert layer.get_facecolor() == pytest.approx(
                np.array([plt.matplotlib.colors.to_rgba(pictures.COLORS[kind])])
            )
            # All its edges are there, at the right time and height (in KiB: MiB are too coarse).
            drawn = {(round(x, 6), round(y * KIB)) for x, y in outline}
            wanted = zip(numbers.flops_done(step), tops / KIB, strict=True)
            assert {(round(x, 6), round(y)) for x, y in wanted} <= drawn
        assert (tops == step.total).all()
        (marker,) = (line for line in panels[name].lines if line.get_marker() == "v")
        at = numbers.flops_done(step)[step.total.argmax()]
        assert marker.get_xydata().tolist() == [[at, step.peak / 2**20]]
        texts = [text.get_text() for text in panels[name].texts]
        assert f"peak {step.peak / 2**20:.1f} MiB" in texts
        assert {text.strip() for text in texts} >= set(numbers.PHASES)
        assert f"{name}: " in panels[name].get_title(loc="left")
    share = numbers.relative_flops(steps(planner)["full"]) - 1
    assert f"+{100 * share:.0f}% FLOPs" in panels["full"].get_title(loc="left")
    about = "0.06M parameters, batch of 8 x 32 tokens, bfloat16 on a CPU, predicted"
    assert titles(figure)[1] == about
    plt.close(figure)


@pytest.mark.parametrize("n_layers", [2, 3])
def test_teeth_fill_their_panel(plt, monkeypatch, n_layers):
    """However little they are of the memory in use, and each block has one."""
    monkeypatch.setattr(pictures, "TEETH", 2)
    args = script.parse([*TINY, *BFLOAT16, "--n-layers", str(n_layers), "--seq-len", "8"])
    planner = script.prepare(args)
    figure = pictures.draw_timeline(plt, planner, 8, {})
    *_, full, teeth = figure.axes
    step = planner.step(8, **numbers.POLICIES["full"])
    at, total = numbers.flops_done(step), step.total / 2**20
    (left, right), (low, high) = teeth.get_xlim(), teeth.get_ylim()
    shown = total[(left <= at) & (at < right)]
    assert low < shown.min() and shown.max() < high
    assert shown.max() - shown.min() > 0.6 * (high - low)
    shown_blocks = min(n_layers, pictures.TEETH)
    begins = {block: at[operator] for operator, phase, block in reversed(step.places)
              if phase == "backward" and block is not None}  # fmt: skip
    inside = [block for block, x in begins.items() if left <= x < right]
    assert sorted(inside) == list(range(n_layers - shown_blocks, n_layers))
    blocks = "every block" if n_layers == 2 else "the last 2 of 3 blocks"
    assert f"backward of {blocks}" in teeth.get_title(loc="left")
    (frame,) = (patch for patch in full.patches if not patch.get_fill())
    assert (frame.get_x(), frame.get_x() + frame.get_width()) == pytest.approx((left, right))
    plt.close(figure)


def test_phases_too_narrow_for_their_names(plt):
    planner = script.prepare(
        script.parse("--n-layers 1 --d-model 8 --n-heads 1 --seq-len 8".split())
    )
    figure = pictures.draw_timeline(plt, planner, 8, {})
    figure.draw_without_rendering()
    for axis in figure.axes[:4]:
        texts = [text for text in axis.texts if text.get_text().strip() in numbers.PHASES]
        assert {t.get_text().strip(): t.get_rotation() for t in texts} == {
            "forward": 90, "head": 0, "backward": 90, "optimizer": 90}  # fmt: skip
        boxes = [text.get_window_extent() for text in texts]
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    plt.close(figure)


def test_panels_that_are_the_same_say_so(plt):
    args = script.parse([*SHAPE, "--vocab-size", "300", "--loss-chunks", "1", "--device", "cpu"])
    planner = script.prepare(args)
    figure = pictures.draw_timeline(plt, planner, 8, {})
    shown = [axis.get_title(loc="left") for axis in figure.axes]
    assert shown[:2] == ["plain: all logits at once", "none: here the same as plain"]
    assert shown[3].startswith("full: blocks recomputed")
    bars = pictures.draw_made_of(plt, planner, 8)
    assert bars.axes[0].texts[1].get_text().endswith(" MiB, the same")
    plt.close("all")
    assert "plain = none" in frontier.predicted(
        planner, 8, frontier.Choice(None, ""), numbers.relative_flops
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [(900, "0.9 KiB"), (40 * 2**20, "40.0 MiB"), (2**30, "1.00 GiB"), (13 * 10**10, "121.07 GiB")],
)
def test_units_that_a_reader_can_tell_apart(count, text):
    assert pictures.Unit.of(count).text(count) == text


@pytest.mark.parametrize("batch_size", [8, 1])
def test_bars_add_up_to_the_peak(plt, planner, batch_size):
    figure = pictures.draw_made_of(plt, planner, batch_size)
    batches = {8: [2, 8], 1: [1]}[batch_size]
    for axis, sequences in zip(figure.axes, batches, strict=True):
        bars = axis.patches
        for i, name in enumerate(numbers.BARS):
            step = planner.step(sequences, **numbers.POLICIES[name])
            parts = bars[i * len(KINDS) : (i + 1) * len(KINDS)]
            widths = [part.get_width() * 2**20 for part in parts]
            assert widths == pytest.approx([step.at_peak[kind] for kind in pictures.COLORS])
            assert parts[-1].get_x() + parts[-1].get_width() == pytest.approx(step.peak / 2**20)
            assert axis.texts[i].get_text().startswith(f"{step.peak / 2**20:.1f} MiB")
        (state,) = axis.lines
        counters = 4 * len(list(planner.model.parameters()))
        assert state.get_xdata()[0] * 2**20 == 16 * numbers.n_parameters(planner) + counters
    full, plain = (
        planner.step(batch_size, **numbers.POLICIES[name]).peak for name in ("full", "plain")
    )
    assert axis.texts[-1].get_text().endswith(f", {1 - full / plain:.0%} less")
    plt.close(figure)


@pytest.mark.parametrize(
    "precision", [BFLOAT16, ["--no-amp"], [*BFLOAT16, "--grad-accum-steps", "2"]], ids=str
)
def test_a_real_step_is_as_predicted(precision):
    args = script.parse([*TINY, *precision])
    planner = script.prepare(args)
    for step in steps(planner).values():
        at, total = numbers.record_step(planner, step, args)
        assert total.max() == pytest.approx(step.peak, rel=0.02)
        assert total[-1] == pytest.approx(step.total[-1], rel=0.001)  # nothing forgotten
        assert (np.diff(at) >= 0).all() and at[-1] == numbers.flops_done(step)[-1]
        # Stretched to stand over the prediction: like it wherever a part of the step begins.
        for operator, phase, block in step.places[1:]:
            begins = numbers.flops_done(step)[operator]
            recorded = total[max(np.searchsorted(at, begins) - 1, 0)]
            low, high = sorted(step.total[[operator - 1, operator]])
            assert 0.9 * low < recorded < 1.1 * high, (phase, block)


def test_pictures_and_numbers(plt, planner, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "prepare", lambda args: planner)  # which remembers its steps
    planner.steps.clear()
    file, out = tmp_path / "numbers.json", tmp_path / "not" / "there" / "yet"
    flags = [*TINY, *BFLOAT16, "--out", str(out), "--json", str(file), "--measure"]
    assert script.main(flags) == 0
    said = capsys.readouterr().out
    assert "vocabulary 997\ndevice   cpu, bfloat16\n" in said
    for name in ("timeline", "frontier", "made_of"):
        picture = out / f"memory_{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG") and f"wrote {picture}" in said
    content = json.loads(file.read_text())
    assert content["command"] == f"python -m scripts.memory_timeline {' '.join(flags)}"
    rows = content["rows"]
    assert {row["policy"] for row in rows} >= {"none", "cheap", "mlp", "full"}
    assert {row["batch_size"] for row in rows} == {2, 8}
    assert len({(row["name"], row["loss_chunks"], row["batch_size"]) for row in rows}) == len(rows)
    for row in rows:
        assert sum(row["at_peak"].values()) == row["predicted_bytes"]
    for name, recorded in content["recorded_bytes"].items():
        memory = {"loss_chunks": 2} | numbers.POLICIES[name]
        (predicted,) = (
            row["predicted_bytes"]
            for row in rows
            if (row["policy"], row["loss_chunks"]) == (memory["recompute"], memory["loss_chunks"])
            and (row["batch_size"], row["group"], row["layers"]) == (8, 1, None)
        )
        assert recorded == pytest.approx(predicted, rel=0.02)
    assert list(content["recorded_bytes"]) == list(numbers.PANELS)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "words.json"], "--out: words.json is a file"),
        (["--out", "words.json/pictures"], "words.json is a file"),
        (["--json", "nowhere/x.json"], "--json: there is no folder nowhere"),
        (["--n-heads", "3"], "--n-heads"),
        (["--batch-size", "0"], "--batch-size: must be"),
        (["--seq-len", "64", "--max-position-embeddings", "32"], "--seq-len 64"),
        (["--measured", "nowhere.json"], "--measured nowhere.json: No such file"),
        (["--measured", "words.json"], "--measured words.json is not"),
        (["--measured", "list.json"], "--measured list.json is not"),
        (["--measured", "good.json", "--batch-size", "5"], "no row with --batch-size 5"),
    ],
)
def test_mistakes(plt, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    rows = [{"policy": "none", "step_s": 0.5, "peak_bytes": 2**30, "batch_size": 8}]
    good = {"rows": rows, "device": "a card", "torch": "2.x", "date": "today"}
    files = {"words.json": "words", "list.json": "[1]", "good.json": json.dumps(good)}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    try:
        code = script.main([*TINY, *flags])
    except SystemExit as stop:
        code = stop.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and line.startswith("error: ") and message in line, line
    assert {path.name for path in tmp_path.iterdir()} == set(files)


def test_without_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert script.main([*TINY, "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: memory_timeline needs matplotlib: pip install matplotlib"
    assert not list(tmp_path.iterdir())


def test_ctrl_c_is_one_line_and_leaves_nothing(plt, monkeypatch, capsys, tmp_path):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "simulate", interrupted)
    assert script.main([*TINY, "--out", str(tmp_path / "new")]) == 130
    assert capsys.readouterr().err.strip() == "stopped"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("ending", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_formats(plt, planner, monkeypatch, tmp_path, ending, start):
    """The same numbers make the same file."""
    monkeypatch.setattr(script, "prepare", lambda args: planner)
    for name in ("draw_timeline", "draw_frontier", "draw_made_of"):
        monkeypatch.setattr(script, name, lambda plt, *args: plt.figure())
    written = []
    for name in ("one", "two"):
        out = tmp_path / name
        assert script.main([*TINY, "--out", str(out), "--format", ending]) == 0
        assert {path.suffix for path in out.iterdir()} == {f".{ending}"}
        written.append({path.name: path.read_bytes() for path in out.iterdir()})
    plt.close("all")
    assert written[0] == written[1] and len(written[0]) == 3
    assert all(content.startswith(start) for content in written[0].values())


# ---- the trainers' flags mean the same here

LINES = {
    "toy data": "--use-toy-data",
    "its vocabulary": "--use-toy-data --vocab-size 31 --dropout 0.1",
    "text": "--train-data words.txt --tokenizer-name byte",
    "GPT-2's ids": "--train-data words.txt --tokenizer-name gpt2 --grad-accum-steps 2",
    "your own text": "--train-data words.txt",
    "float32": "--train-data words.txt --tokenizer-name byte --no-amp",
    "bfloat16": "--use-toy-data --amp-dtype bfloat16 --loss-chunks 1",
    "by name": "--model gpt2 --train-data words.txt --n-layers 1 --seq-len 16 --batch-size 1",
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_the_trainers_have_the_model_that_is_drawn(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("a few words that can be learned\n" * 200)
    words = [*([] if "--model" in line else SHAPE), "--device", "cpu", *line.split()]
    asked = []

    def stop_there(args, process, config, precision, held):
        asked.append((args, config, process.device, precision))
        raise UsageError("that is all we wanted to know")

    monkeypatch.setattr(setup, "plan_memory", stop_there)
    assert train_minimal.main([*words, "--checkpoint-path", "run.pt"]) == 2
    ((args, config, device, precision),) = asked
    drawn = script.prepare(script.parse(words))
    assert (drawn.config, drawn.precision, drawn.seq_len) == (config, precision, args.seq_len)
    wanted = make_planner(args, config, device, precision)
    assert drawn.step(args.batch_size).peak == wanted.step(args.batch_size).peak


def test_nothing_typed_is_the_demo():
    planner, demo = (
        script.prepare(script.parse([])),
        train_minimal.build_parser("", "").parse_args([]),
    )
    config = planner.config
    assert (config.n_layers, config.d_model) == (demo.n_layers, demo.d_model) == (3, 128)
    assert config.vocab_size == 1024 and numbers.n_parameters(planner) == 734_336


@pytest.mark.skipif(torch.cuda.is_available(), reason="the point is a machine without one")
def test_a_gpu_that_is_not_there_is_planned_for(capsys, plt, monkeypatch):
    planner = script.prepare(script.parse([*SHAPE, "--device", "cuda"]))
    assert not planner.on_cpu and planner.precision == torch.bfloat16
    monkeypatch.delattr(script, "simulate")  # found before anything is
    assert script.main([*SHAPE, "--device", "cuda", "--measure"]) == 2
    assert "error: --device cuda: " in capsys.readouterr().err  # not to be trained on


def test_what_chooses_a_policy_changes_nothing(planner):
    mix = "--use-activation-checkpoint mlp --recompute-layers 1 --recompute-rest cheap"
    for flags in (mix, "--memory-budget 1GiB"):
        config = script.prepare(script.parse([*TINY, *BFLOAT16, *flags.split()])).config
        assert config == replace(planner.config, recompute="none")

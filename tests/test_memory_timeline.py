"""The pictures show what the planner says, and the planner says what the allocator does."""

import json
import sys
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from harness.planned import CARD

import train_minimal
from planner.timeline import KINDS
from scripts.style import COLORS, POLICIES, Unit, n_parameters, relative_flops
from studies import memory_timeline as study
from studies.memory_timeline import Subject, choose, flops_done
from trainer import setup
from trainer.flags import UsageError
from trainer.plan import make_planner

SHAPE = "--n-layers 2 --n-heads 2 --d-model 32 --seq-len 32 --batch-size 8".split()
TINY = [*SHAPE, *"--vocab-size 997 --loss-chunks 2 --device cpu --amp-dtype bfloat16".split()]
KIB = 2**10  # the tiny model's unit is MiB: finer


def subject_of(*flags: str) -> Subject:
    return study.prepare(study.parse([*TINY, *flags]))


@pytest.fixture(scope="module")
def subject():
    return subject_of()


@pytest.fixture(autouse=True)
def closed(plt):
    yield
    plt.close("all")


def test_each_phase_is_as_wide_as_its_flops(subject):
    # Per token, multiplied and added: a block's weights, attention's products (half are masked).
    block = 12 * 32**2 + 32 * 32
    for name in POLICIES:
        step = subject.step(name)
        at, replayed = flops_done(step), relative_flops(step.config, 32) - 1
        starts = [at[step.phase(phase).start] for phase in study.PHASES]
        forward, head, backward = np.diff(starts)
        assert starts[0] == 0 and at[-1] == pytest.approx(1 + replayed + 1 / 50)
        assert (np.diff(at) >= 0).all()
        assert head / forward == pytest.approx(3 * 997 * 32 / (2 * block))
        assert backward == pytest.approx(2 * forward + replayed)
        assert (replayed > 0) == (name not in ("plain", "none", "cheap", "selective"))


def test_timeline_stacks_what_the_planner_counts(plt, subject):
    figure = study.draw_timeline(plt, subject, {})
    panels = dict(zip(study.PANELS, figure.axes, strict=False))  # (the last one: the teeth)
    assert set(COLORS) == set(KINDS)
    for name, axis in panels.items():
        step = subject.step(name)
        tops = np.zeros(len(step.timeline))
        for (kind, color), layer in zip(COLORS.items(), axis.collections, strict=False):
            tops += step.timeline[:, KINDS.index(kind)]
            outline = layer.get_paths()[0].vertices
            rgba = np.array([plt.matplotlib.colors.to_rgba(color)])
            assert layer.get_facecolor() == pytest.approx(rgba)
            # All its edges are there, at the right time and height (in KiB: MiB are too coarse).
            drawn = {(round(x, 6), round(y * KIB)) for x, y in outline}
            wanted = zip(flops_done(step), tops / KIB, strict=True)
            assert {(round(x, 6), round(y)) for x, y in wanted} <= drawn
        assert (tops == step.total).all()
        (marker,) = (line for line in axis.lines if line.get_marker() == "v")
        at = flops_done(step)[step.total.argmax()]
        assert marker.get_xydata().tolist() == [[at, step.peak / 2**20]]
        title = axis.get_title(loc="left")
        assert title.startswith(f"{name}: ") and f"peak {step.peak / 2**20:.1f} MiB" in title
        assert [text.get_text() for text in axis.texts] == list(study.PHASES)
    share = relative_flops(subject.step("full").config, 32) - 1
    assert f"+{100 * share:.0f}% FLOPs" in panels["full"].get_title(loc="left")
    about = "0.06M parameters, batch of 8 x 32 tokens, bfloat16 on a CPU, predicted"
    assert figure.get_suptitle().split("\n")[1] == about


def test_teeth_fill_their_panel(plt):
    """However little they are of the memory in use, and each block has one."""
    subject = subject_of("--seq-len", "8")
    *_, full, teeth = study.draw_timeline(plt, subject, {}).axes
    step = subject.step("full")
    at, total = flops_done(step), step.total / 2**20
    (left, right), (low, high) = teeth.get_xlim(), teeth.get_ylim()
    shown = total[(left <= at) & (at < right)]
    assert low < shown.min() and shown.max() < high
    assert shown.max() - shown.min() > 0.6 * (high - low)
    begins = [at[operator] for operator, phase, _ in step.places if phase == "backward"]
    assert len(begins) >= 2 and all(left <= x < right for x in begins)
    (frame,) = (patch for patch in full.patches if not patch.get_fill())
    assert (frame.get_x(), frame.get_x() + frame.get_width()) == pytest.approx((left, right))


def test_what_is_the_same_says_so(plt):
    subject = subject_of("--vocab-size=300", "--loss-chunks=1")
    shown = [axis.get_title(loc="left") for axis in study.draw_timeline(plt, subject, {}).axes]
    assert shown[0].startswith("plain: all logits at once\n")
    assert shown[1].startswith("none: here the same as plain\n")
    assert shown[3].startswith("full: blocks recomputed\n")
    bars = study.draw_made_of(plt, subject)
    assert bars.axes[0].texts[1].get_text().endswith(" MiB, +0%")


def test_units_that_a_reader_can_tell_apart():
    shown = {900: "0.9 KiB", 40 * 2**20: "40.0 MiB", 2**30: "1.00 GiB", 13 * 10**10: "121.07 GiB"}
    assert {count: Unit.of(count).text(count) for count in shown} == shown


@pytest.mark.parametrize("batch_size", [8, 1])
def test_bars_add_up_to_the_peak(plt, subject, batch_size):
    subject = replace(subject, batch_size=batch_size)
    figure = study.draw_made_of(plt, subject)
    batches = {8: [2, 8], 1: [1]}[batch_size]
    for axis, sequences in zip(figure.axes, batches, strict=True):
        bars = axis.patches
        for i, name in enumerate(study.BARS):
            step = subject.step(name, sequences)
            parts = bars[i :: len(study.BARS)]
            widths = [part.get_width() * 2**20 for part in parts]
            assert widths == pytest.approx([step.at_peak[kind] for kind in COLORS])
            assert parts[-1].get_x() + parts[-1].get_width() == pytest.approx(step.peak / 2**20)
            assert axis.texts[i].get_text().startswith(f"{step.peak / 2**20:.1f} MiB")
        (state,) = axis.lines
        counters = 4 * len(list(subject.planner.model.parameters()))
        assert state.get_xdata()[0] * 2**20 == 16 * n_parameters(subject.planner) + counters
    full, plain = (subject.step(name).peak for name in ("full", "plain"))
    assert axis.texts[-1].get_text().endswith(f", {full / plain - 1:+.0%}")


# ---- the frontier


@pytest.mark.parametrize("card", [None, CARD], ids=["FLOPs", "seconds"])
def test_frontier_has_a_point_for_each_policy(plt, subject, card):
    subject = replace(subject, card=card)
    figure = study.draw_frontier(plt, subject, choose(subject, None))
    (axis,) = figure.axes
    words = "predicted time of a step, against none (small)", "FLOPs of a step, against none"
    assert axis.get_xlabel() == words[card is None]
    points, ring = (line.get_xydata() for line in axis.lines if line.get_marker() == "o")
    steps = [subject.step(name) for name in POLICIES]
    if card is None:
        costs = [relative_flops(step.config, 32) for step in steps]
    else:
        costs = [step.seconds(card) / subject.step("none").seconds(card) for step in steps]
        assert costs[2] > 1  # cheap is not free
    wanted = [(c, step.peak / 2**20) for c, step in zip(costs, steps, strict=True)]
    assert [tuple(point) for point in points] == wanted and tuple(ring[0]) in wanted
    named = {text.get_text(): text.xy for text in axis.texts}
    assert named == dict(zip(POLICIES, wanted, strict=True))
    (mixes,) = (line.get_xydata() for line in axis.lines if line.get_marker() == "None")
    assert tuple(mixes[0]) == named["none"] and (np.diff(mixes, axis=0) * [1, -1] >= 0).all()
    for cost, peak in wanted:  # none is better than all mixes
        assert any(c <= cost * 1.001 and p <= peak * 1.001 for c, p in mixes)


def test_the_best_choice_is_marked(plt, subject):
    """With a budget the planner's pick, else the least memory that costs nothing."""
    none, cheap, selective, full = (
        subject.step(name) for name in ("none", "cheap", "selective", "full")
    )
    free = choose(subject, None)
    name = free.step.config.recompute
    assert name in ("cheap", "selective")
    assert free.words.startswith(" the least memory with no matmul twice")
    assert free.step.peak <= 1.01 * min(cheap.peak, selective.peak)
    budgets = {none.peak * 3: "none", (none.peak + cheap.peak) // 2: ":1"}
    for budget, name in budgets.items():
        choice = choose(subject, budget)
        assert choice.step.peak <= budget and name in choice.name
        (axis,) = study.draw_frontier(plt, subject, choice).axes
        place = subject.cost(choice.step), choice.step.peak / 2**20
        label = f"{choice.name}:\nwhat auto takes in the "
        (ring,) = (line for line in axis.lines if line.get_label().startswith(label))
        assert tuple(ring.get_xydata()[0]) == place
        (bold,) = (text.get_text() for text in axis.texts if text.get_weight() == "bold")
        assert bold == choice.name
        dashed = [line.get_ydata()[0] for line in axis.lines if line.get_linestyle() == "--"]
        assert dashed == ([budget / 2**20] if budget < none.peak else [])  # above it: not in view
    nothing = choose(subject, full.peak // 4)
    assert nothing.step is None and nothing.words.startswith("nothing fits in the ")


def test_frontier_of_a_benchmark(plt, subject, tmp_path):
    """Of what scripts.benchmark writes."""
    rows = [
        {"policy": "none", "step_s": 0.5, "peak_bytes": 2**30, "batch_size": 8},
        {"policy": "full", "name": "full!", "step_s": 0.6, "peak_bytes": 2**29, "batch_size": 8},
        {"policy": "full", "peer": "other", "step_s": 1, "peak_bytes": 2**28, "batch_size": 8},
        {"policy": "full", "step_s": 0.6, "peak_bytes": None, "batch_size": 8},
        {"policy": "full", "step_s": 0.9, "peak_bytes": 2**31, "batch_size": 12},
    ]
    file = tmp_path / "benchmark.json"
    about = {"device": "a card", "torch": "2.x", "date": "today"}
    file.write_text(json.dumps({"rows": rows, **about}))
    measured = study.load_measured(file, 8)
    assert measured[0] == {
        "none": (0.5, 2**30),
        "full!": (0.6, 2**29),
        "other full": (1.0, 2**28),
    }
    figure = study.draw_frontier(plt, subject, None, measured)
    (axis,) = figure.axes
    (points,) = (line.get_xydata().tolist() for line in axis.lines)
    assert points == [[0.5, 1], [0.6, 0.5], [1, 0.25]]
    assert axis.get_xlabel() == "time of a step (s)"
    assert figure.get_suptitle().endswith("measured on a card, torch 2.x, today")


# ---- the command


@pytest.mark.parametrize("more", [[], ["--no-amp", "--amp-dtype=auto"], ["--grad-accum-steps=2"]])
def test_a_real_step_is_as_predicted(more):
    args = study.parse([*TINY, *more])
    subject = study.prepare(args)
    for name in study.PANELS:
        step = subject.step(name)
        at, total = study.record_step(step, args)
        assert total.max() == pytest.approx(step.peak, rel=0.02)
        assert total[-1] == pytest.approx(step.total[-1], rel=0.01)  # nothing forgotten
        assert (np.diff(at) >= 0).all() and at[-1] == flops_done(step)[-1]
        # Stretched to stand over the prediction: like it wherever a part of the step begins.
        for operator, phase, block in step.places[1:]:
            begins = flops_done(step)[operator]
            recorded = total[max(np.searchsorted(at, begins) - 1, 0)]
            low, high = sorted(step.total[[operator - 1, operator]])
            assert 0.9 * low < recorded < 1.1 * high, (phase, block)


def test_pictures_and_numbers(subject, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(study, "prepare", lambda args: subject)  # it remembers its steps
    subject.planner.steps.clear()
    file, out = tmp_path / "numbers.json", tmp_path / "not" / "there" / "yet"
    flags = [*TINY, "--out", str(out), "--json", str(file), "--measure"]
    assert study.main(flags) == 0
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
        assert recorded == pytest.approx(subject.step(name).peak, rel=0.02)
    assert list(content["recorded_bytes"]) == list(study.PANELS)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "words.json"], "--out: words.json is a file"),
        (["--measured", "nowhere.json"], "--measured nowhere.json is not"),
        (["--measured", "words.json"], "--measured words.json is not"),
        (["--measured", "list.json"], "--measured list.json is not"),
        (["--measured", "good.json", "--batch-size", "5"], "no row with --batch-size 5"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    rows = [{"policy": "none", "step_s": 0.5, "peak_bytes": 2**30, "batch_size": 8}]
    good = {"rows": rows, "device": "a card", "torch": "2.x", "date": "today"}
    files = {"words.json": "words", "list.json": "[1]", "good.json": json.dumps(good)}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert study.main([*TINY, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line, line
    assert {path.name for path in tmp_path.iterdir()} == set(files)


def test_what_ends_it_is_one_line_and_leaves_nothing(monkeypatch, capsys, tmp_path):
    full_disk = OSError(28, "No space left on device", "out/x.png")
    for error, code, said in (
        (KeyboardInterrupt(), 130, "stopped"),
        (full_disk, 2, "error: out/x.png: No space"),
    ):
        monkeypatch.setattr(study, "prepare", Mock(side_effect=error))
        assert study.main([*TINY, "--out", str(tmp_path / "new")]) == code
        assert capsys.readouterr().err.strip().startswith(said)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert study.main([*TINY, "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: memory_timeline needs matplotlib: pip install matplotlib"
    assert not list(tmp_path.iterdir())


def test_formats(plt, subject, monkeypatch, tmp_path):
    """The same numbers make the same file."""
    monkeypatch.setattr(study, "prepare", lambda args: subject)
    for name in ("draw_timeline", "draw_frontier", "draw_made_of"):
        monkeypatch.setattr(study, name, lambda plt, *args: plt.figure())
    for ending, start in {"svg": b"<?xml", "pdf": b"%PDF"}.items():
        written = []
        for out in (tmp_path / f"{ending}1", tmp_path / f"{ending}2"):
            assert study.main([*TINY, "--out", str(out), "--format", ending]) == 0
            written.append({path.name: path.read_bytes() for path in out.iterdir()})
        assert written[0] == written[1] and len(written[0]) == 3
        assert all(content.startswith(start) for content in written[0].values())
        assert all(name.endswith(f".{ending}") for name in written[0])


def test_the_trainers_have_the_model_that_is_drawn(tmp_path, monkeypatch):
    """Their flags mean the same here, but for what chooses a policy."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("a few words that can be learned\n" * 200)
    text = "--train-data words.txt --tokenizer-name byte --no-amp --grad-accum-steps 2 --dropout 0"
    words, asked = [*SHAPE, "--device", "cpu", *text.split()], []

    def stop_there(args, process, config, precision, held):
        asked.append((config, args, process.device, precision))
        raise UsageError("that is all we wanted to know")

    monkeypatch.setattr(setup, "plan_memory", stop_there)
    assert train_minimal.main([*words, "--checkpoint-path", "run.pt"]) == 2
    ((config, args, device, precision),) = asked
    wanted = make_planner(args, config, device, precision)
    mix = "--use-activation-checkpoint mlp:1,cheap"
    for policy in ("", mix, "--memory-budget 1GiB"):
        drawn = study.prepare(study.parse([*words, *policy.split()])).planner
        assert (drawn.config, drawn.precision, drawn.seq_len) == (config, precision, args.seq_len)
        assert drawn.step(8).peak == wanted.step(8).peak


@pytest.mark.skipif(torch.cuda.is_available(), reason="the point is a machine without one")
def test_a_gpu_that_is_not_there_is_planned_for(capsys, monkeypatch):
    planner = study.prepare(study.parse([*SHAPE, "--device", "cuda"])).planner
    assert not planner.on_cpu and planner.precision == torch.bfloat16
    monkeypatch.delattr(study, "Subject")  # found before anything is simulated
    assert study.main([*SHAPE, "--device", "cuda", "--measure"]) == 2
    assert "error: --device cuda: " in capsys.readouterr().err  # not to be trained on

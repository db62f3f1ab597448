"""plan_memory --at-peak: what is alive there, whole and by name; and of which step."""

import json
import re
import shlex
from collections import Counter
from dataclasses import replace

import pytest
import torch
from harness.records import each_kind, record
from harness.runs import ROOT
from test_plan_memory import SHAPE, plan

from planner import CARDS, Planner
from planner.record import Record, code_of
from scripts import plan_memory
from scripts.plan_knobs import Setting
from scripts.plan_peak import COLUMNS, LINES, at_peak, format_peak, record_step
from scripts.plan_table import Clock
from trainer.metrics import format_bytes
from trainer.plan import NO_RECOMPUTE


@pytest.fixture(scope="module")
def gpu() -> Record:
    return record()


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


# ---- the list


@pytest.mark.usefixtures("everything_travels")
@each_kind
def test_groups_are_the_peak_to_the_byte(way, setting):
    step = record(way, setting)
    groups = at_peak(step)
    sizes = [group.bytes for group in groups]
    assert sum(sizes) == step.step.peak and sizes == sorted(sizes, reverse=True)
    listed = [storage for group in groups for storage in group.storages]
    assert Counter(map(id, listed)) == Counter(map(id, step.at_peak))
    assert not any(group.why.strip().endswith(" of") for group in groups)
    of_kind = Counter(group.storages[0].kind for group in groups)
    assert all(of_kind[kind] <= 1 for kind in ("parameters", "gradients", "optimizer"))


def test_what_differs_in_its_block_only_is_one_line(gpu):
    groups = {group.what: group for group in at_peak(gpu)}
    for what in ("mlp.c_fc: output", "attn: attention", "ln_1: mean", "add: x + update"):
        group = groups[f"3 x blocks.*.{what}"]
        assert [storage.block for storage in group.storages] == [0, 1, 2]
        assert [storage.name for storage in group.storages] == [
            f"blocks.{i}.{what}" for i in range(3)
        ]
    assert groups["40 x weight"].line == groups["40 x weight"].shape == ""
    assert groups["120 x optimizer state"].why == "what the optimizer keeps from step to step"
    wide = groups["3 x blocks.*.mlp.c_fc: output"]
    storage = wide.storages[0]
    assert wide.shape == f"{storage.shape[0]}x{storage.shape[1]} bf16"
    assert "self.c_fc(x)" in code_of(wide.line)
    assert wide.why == "GELU's backward needs its input"
    stream = groups["3 x add: x + update"]  # two of them wait for the next block, one for ln_f
    assert stream.why == "ln_1's backward needs its input"
    (alone,) = [group for group in groups.values() if group.storages[0].name == "ln_f: mean"]
    assert alone.what == "ln_f: mean"


def test_one_block_alone_has_its_number():
    whats = [group.what for group in at_peak(record("full"))]
    assert "blocks.0.attn.c_attn: output" in whats and not any("*" in what for what in whats)


def test_ten_lines(gpu):
    title, blank, head, *lines = format_peak(gpu).splitlines()
    groups, peak = at_peak(gpu), gpu.step.peak
    assert title == f"alive at the peak of none: {format_bytes(peak)}, {gpu.step.where}"
    assert blank == "" and head.split() == ["bytes", "share", "what", "shape", "line", "why"]
    assert len(lines) == LINES == 10 < len(groups)
    assert max(map(len, (title, head, *lines))) <= COLUMNS == 120
    for group, line in zip(groups, lines[:-1], strict=False):
        size, share, rest = re.fullmatch(r" *([\d.,]+ \S+) +([\d.]+%)  (.*)", line).groups()
        assert size == format_bytes(group.bytes) and share == f"{group.bytes / peak:.1%}"
        assert rest.startswith(group.what[:37]) and group.shape in rest and group.line in rest
    others = groups[LINES - 1 :]
    n, rest = sum(len(group.storages) for group in others), sum(group.bytes for group in others)
    assert lines[-1].split("  ")[-1] == f"and {n} others"
    assert lines[-1].startswith(f"{format_bytes(rest):>{len(lines[0].split('%')[0]) - 7}}")


def test_a_short_list_has_no_others(monkeypatch, gpu):
    groups = at_peak(gpu)
    for n in (len(groups), len(groups) - 1):
        monkeypatch.setattr("scripts.plan_peak.LINES", n)
        lines = format_peak(gpu).splitlines()[3:]
        assert len(lines) == n and ("others" in lines[-1]) == (n < len(groups))


def test_a_wide_terminal_shows_the_code(monkeypatch, gpu):
    def lines(columns: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        return format_peak(gpu).splitlines()[1:]

    code = code_of(next(g for g in at_peak(gpu) if "c_fc: output" in g.what).line)
    (line,) = [line for line in lines(250) if "c_fc: output" in line]
    assert code in line and "GELU's backward needs its input" in line
    for columns in (60, 100, 120, 140):
        assert max(map(len, lines(columns))) <= columns
    for line in lines(120)[2:-1]:
        assert code not in line and "model.py" not in line or re.search(r"model.py:\d+ +\w+", line)


def test_a_long_name_leaves_room_for_the_rest(gpu):
    """The head's logits in float32: the name alone is half of a line."""
    largest = replace(gpu, storages=[s for s in gpu.storages if s.kind != "temporaries"])
    lines = [line for line in format_peak(largest).splitlines() if "copy of head" in line]
    assert lines and all("..." in line and "memory/head.py:" in line for line in lines)
    assert all(re.search(r"memory/head.py:\d+  \S.{15}", line) for line in lines)


# ---- of which step


def listed(flags: str, table=(), settings=()) -> Record:
    """What --at-peak would list below that table, or below what --all-knobs found."""
    asked = plan_memory.aim([*SHAPE, "--at-peak", *flags.split()])
    return record_step(asked.args, asked.plans, list(table), list(settings))


def test_the_document_shows_what_is_listed(monkeypatch):
    page = (ROOT / "docs" / "seeing.md").read_text()
    flags = re.search(r"scripts\.plan_memory (.*) --at-peak\n", page)
    monkeypatch.setattr("test_plan_peak.SHAPE", [])
    assert flags and format_peak(listed(flags[1])) in page


@pytest.mark.parametrize(
    ("flags", "of"),
    [
        ("", "none"),
        ("--use-activation-checkpoint auto", "none"),
        ("--use-activation-checkpoint", "full"),
        ("--use-activation-checkpoint full --offload-activations", "full, offloaded"),
        ("--use-activation-checkpoint full --recompute-group 2", "full in groups of 2"),
        ("--use-activation-checkpoint mlp --recompute-layers 1 --recompute-rest cheap",
         "mlp in 1 of 2 blocks, cheap in the rest"),
        ("--use-activation-checkpoint sdpa --memory-budget 8GiB", "sdpa"),
    ],
)  # fmt: skip
def test_typed_flags_say_which_step(flags, of):
    found = format_peak(listed(flags))
    assert found.startswith(f"alive at the peak of {of}: ")


@pytest.mark.parametrize(
    "flags", ["--device=cuda --grad-accum-steps=2", "--card=H100 --nproc-per-node=2 --fsdp"]
)
def test_the_list_is_of_what_is_recommended(tmp_path, capsys, flags):
    """And adds up to its peak in the table."""
    path, shape = (
        tmp_path / "plan.json",
        [word for word in SHAPE if word not in ("--device", "cpu")],
    )
    argv = [*shape, *flags.split()]
    asked = plan_memory.aim(argv)
    planner = asked.plans.planner(asked.args)
    none, full = (planner.step(8, recompute=policy).peak for policy in ("none", "full"))
    argv += ["--at-peak", f"--memory-budget={(none + full) / 2 / 0.75:.0f}b"]
    assert plan_memory.main([*argv, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    (taken,) = [row for row in result["rows"] if row["name"] == result["takes"]]
    assert result["alive_at_peak_of"] == result["takes"] != "none"
    assert sum(group["bytes"] for group in result["alive_at_peak"]) == taken["peak_bytes"]
    _, table, title, lines, verdict = capsys.readouterr().out.split("\n\n")
    assert re.search(rf"^>  {re.escape(result['takes'])}  ", table, re.M)
    assert title.startswith(f"alive at the peak of {result['takes']}: ")
    assert len(lines.splitlines()) == 1 + LINES
    assert verdict.strip().endswith(shlex.join(taken["flags"])) and "--at-peak" not in verdict


def test_json_has_all_of_it(tmp_path, capsys):
    result = plan(tmp_path, "--at-peak", "--use-activation-checkpoint", "cheap")
    (row,) = [row for row in result["rows"] if row["name"] == "cheap"]
    found = result["alive_at_peak"]
    assert len(found) > LINES and result["alive_at_peak_of"] == "cheap"
    assert sum(group["bytes"] for group in found) == row["peak_bytes"]
    assert sum(g["bytes"] for g in found if g["kind"] == "head") == row["at_peak"]["head"]
    wide = next(group for group in found if group["name"] == "blocks.*.mlp.c_fc: output")
    assert (wide["kind"], wide["count"], wide["shape"]) == ("activations", 2, [256, 64])
    assert wide["bytes"] == 2 * 256 * 64 * getattr(torch, wide["dtype"]).itemsize
    assert "c_fc(" in wide["code"] and wide["line"].split(":")[0] == "memory/policies.py"
    assert "alive at the peak of cheap" in capsys.readouterr().out


def test_nothing_changes_without_the_flag(tmp_path, capsys, monkeypatch):
    """What the table is about is left out of it, right or wrong; and it costs one more step."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run, runs = Planner.run, []
    monkeypatch.setattr(Planner, "run", lambda self, *args: runs.append(1) or run(self, *args))
    plain = plan(tmp_path, "--device=cuda", "--recompute-layers=1")
    n, plain_out = len(runs), capsys.readouterr().out
    more = plan(tmp_path, "--device=cuda", "--at-peak")
    assert plain["alive_at_peak"] is plain["alive_at_peak_of"] is None
    assert len(runs) == 2 * n + 1 and "alive at" not in plain_out
    assert plain["rows"] == more["rows"]


def test_with_all_knobs_it_is_the_fastest_setting():
    """Its micro-batch, length and policy."""
    flags = "--card=H100 --device=cuda --batch-size=4 --grad-accum-steps=2"
    flags = flags.replace("--device=cuda", "--device cuda")
    plan = listed(flags)
    assert (plan.step.batch_size, plan.step.config.recompute) == (4, "none")
    clock = Clock(CARDS["H100"], False, 8, 1)
    asked = plan_memory.aim([*SHAPE, *flags.split()])
    step = asked.plans.planner(asked.args).step(1, **NO_RECOMPUTE | {"recompute": "full"})
    found = listed(flags, settings=[Setting(step, clock)]).step
    assert (found.batch_size, found.peak) == (1, step.peak)
    longer = listed(flags, settings=[Setting(replace(step, seq_len=64), clock)]).step
    assert longer.seq_len == longer.config.max_position_embeddings == 64
    accumulated = sum(
        storage.bytes
        for storage in listed(flags, settings=[Setting(step, clock)]).alive(0)
        if storage.kind == "gradients"
    )
    assert accumulated > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--recompute-layers 1", "--recompute-layers 1 needs --use-activation-checkpoint"),
        ("--recompute-group 2", "--recompute-group"),
        ("--offload-activations", "--offload-activations"),
        ("--use-activation-checkpoint mlp --recompute-group 2", "--recompute-group"),
    ],
)
def test_bad_input_gets_one_line(flags, message, capsys, tmp_path):
    path = tmp_path / "plan.json"
    argv = [*SHAPE, "--json", str(path), *flags.split()]
    assert plan_memory.main([*argv, "--at-peak"]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith(f"error: {message}") and out == "" and not path.exists()
    assert plan_memory.aim(argv)  # without it those flags are left out

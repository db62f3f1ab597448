"""A page of scripts.memory_page, made for tests, and opened in Chromium."""

import re
from functools import cache
from unittest.mock import patch

import torch

from planner.choose import describe_recompute, pick_recompute
from planner.record import Record
from scripts import memory_page
from scripts.style import COLORS, POLICIES
from trainer.plan import NO_RECOMPUTE, make_planner

FLAGS = ["--n-layers", "4", "--n-heads", "4", "--d-model", "64", "--seq-len", "64",
         "--vocab-size", "512", "--batch-size", "4", "--device", "cuda"]  # fmt: skip
STACK = [*COLORS]  # kinds, bottom up


class Made:
    """A page, and what the planner says about the same flags."""

    def __init__(self, flags: list[str], folder):
        self.file = folder / "page.html"
        args = memory_page.parse(flags)
        config = memory_page.model_config(args, memory_page.vocabulary(args))
        kind, precision, _ = memory_page.target(args)
        self.planner = make_planner(args, config, torch.device(kind), precision)
        self.batch_size = args.batch_size
        record = cache(self.planner.record)  # the page's are those that are compared with it
        with (
            patch.object(self.planner, "record", record),
            patch.object(memory_page, "make_planner", lambda *_: self.planner),
        ):
            assert memory_page.main([*flags, "--out", str(self.file)]) == 0
        self.records: dict[str, Record] = {
            name: record(args.batch_size, **NO_RECOMPUTE | memory)
            for name, memory in POLICIES.items()
        }


class opened:
    """A page in Chromium, 1,400 x 900; in the end nothing was complained of, nothing was asked."""

    def __init__(self, chromium, file, **how):
        how = {"viewport": {"width": 1400, "height": 900}, "reduced_motion": "reduce"} | how
        self.context, self.url = chromium.new_context(**how), file.as_uri()
        self.complaints: list[str] = []
        self.asked: list[str] = []

    def __enter__(self):
        page = self.context.new_page()
        page.on("console", lambda message: self.complain(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.set_default_timeout(20_000)
        page.goto(self.url)
        return page

    def complain(self, text: str) -> None:
        if not text.startswith("Canvas2D: Multiple readback"):  # which only tests do
            self.complaints.append(text)

    def __exit__(self, kind, *_):
        self.context.close()
        if kind is None:
            assert self.complaints == []
            assert [url for url in self.asked if not url.startswith("data:")] == [self.url]


def stacked(record: Record, at: int) -> list:
    """What is alive, bottom up: by kind, and within a kind in the order of birth."""
    return sorted(record.alive(at), key=lambda s: STACK.index(s.kind))


def grouped(record: Record, at: int) -> dict[tuple[str, str], list[int]]:
    """(kind, name but for the block) -> the bytes of each that is alive."""
    found: dict[tuple[str, str], list[int]] = {}
    for storage in record.alive(at):
        name = re.sub(r"\bblocks\.\d+", "blocks.*", storage.name)
        state = {"parameters": "weight", "optimizer": "optimizer state", "gradients": "gradient"}
        name = state.get(storage.kind, name)
        found.setdefault((storage.kind, name), []).append(storage.bytes)
    return found


def details(page) -> dict[str, str]:
    terms = page.locator("#storage dt").all_inner_texts()
    words = page.locator("#storage dd").all_inner_texts()
    title = page.locator("#storage-title").inner_text()
    return dict(zip(terms, words, strict=True)) | {"name": title}


def choose(page, name: str) -> None:
    page.get_by_role("radio").filter(has=page.get_by_text(name, exact=True)).click()


def frame(page) -> dict[str, float]:
    """The picture's inside, on the screen."""
    box, inside = page.locator("#chart").bounding_box(), page.evaluate("chart.frame")
    return {
        "x": box["x"] + inside["left"],
        "y": box["y"] + inside["top"],
        "width": inside["width"],
        "height": inside["height"],
    }


def verdict_on(made: Made, budget: float) -> str:
    """How the page's verdict begins: with what `auto` takes."""
    step = pick_recompute(made.planner, made.batch_size, int(budget))
    if step.peak > budget:
        return "nothing fits"
    return f"cheapest that fits: {describe_recompute(step.config)} ("

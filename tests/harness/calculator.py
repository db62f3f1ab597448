"""Draw random states of docs/calculator.html, and call the functions of docs/calculator.js."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from harness.runs import ROOT

from memory import POLICY_NAMES
from trainer.settings import SHAPE_BY_MODEL

PAGE, SCRIPT = ROOT / "docs/calculator.html", ROOT / "docs/calculator.js"


def evaluate(expression: str, x: Any, request: pytest.FixtureRequest) -> Any:
    """Return the value, in Chromium, of the JavaScript `expression`, which may call the functions
    of docs/calculator.js and contain `x`. Without Chromium the test is skipped."""
    page = request.getfixturevalue("chromium").new_page()
    page.add_script_tag(path=SCRIPT)
    found = page.evaluate(f"(x) => {expression}", x)
    page.close()
    return found


def random_states(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return n random states of the controls in docs/calculator.html. (Only every tenth state may
    have more than 8 blocks. More blocks would test little, because blocks with the same policy are
    equal, except the last of them.)"""
    draw = random.Random(seed)
    pick: Callable[..., Any] = lambda *values: draw.choice(values)  # noqa: E731
    found = []
    for i in range(n):
        heads, layers = draw.randint(1, 25), draw.randint(1, 8 if i % 10 else 48)
        width = heads * pick(16, 32, 40, 64, 64, 128)
        if i % 10 == 1:
            layers, heads, width = SHAPE_BY_MODEL[pick("gpt2", "gpt2-medium")].values()
        policy, processes = pick(*POLICY_NAMES), pick(1, 1, draw.randint(2, 16))
        found.append(
            {
                "layers": layers,
                "width": width,
                "heads": heads,
                "mlp": pick(4 * width, 4 * width, 2 * width, 3 * width + 8, width),
                "length": pick(16, 64, 100, 512, 1024, 4096),
                "batch": draw.randint(1, 64),
                "vocabulary": pick(257, 1024, 5001, 32000, 50257, 200_000),
                "policy": policy,
                "blocks": layers if policy == "none" else pick(layers, draw.randint(0, layers)),
                "precision": pick("bfloat16", "float16", "float32"),
                "optimizer": pick("adamw", "muon"),
                "moments": pick("float32", "bfloat16"),
                "dropout": pick("off", "on"),
                "head": pick("chunks", "chunks", "once"),
                "processes": processes,
                "trainer": "ddp" if processes == 1 else pick("ddp", "fsdp"),
                "card": pick("RTX 3060 12GB", "A100 40GB", "H100 PCIe"),
            }
        )
    return found

"""Call the functions of docs/calculator.js with node or Chromium, and draw random models as input
for these functions."""

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.runs import ROOT

from memory import POLICY_NAMES, recompute_plan_of_config
from model import MiniGPTConfig

PAGE, SCRIPT = ROOT / "docs/calculator.html", ROOT / "docs/calculator.js"
# field of MiniGPTConfig -> name of the same number on the page
LETTERS = {
    "vocab_size": "V", "max_position_embeddings": "positions", "n_layers": "L", "n_heads": "H",
    "d_model": "C", "d_ff": "F", "loss_chunks": "chunks",
}  # fmt: skip


def evaluate(expression: str, x: Any, request: pytest.FixtureRequest) -> Any:
    """Return the value of the JavaScript `expression`, which may call the functions of
    docs/calculator.js and contain `x`. node evaluates the expression. Without node, Chromium does.
    Without both, the test is skipped."""
    body = f"{SCRIPT.read_text()}\n;((x) => {expression})({json.dumps(x)})"
    node = shutil.which("node") or shutil.which("nodejs")
    if node is None:
        page = request.getfixturevalue("chromium").new_page()
        try:
            return page.evaluate(f"() => eval({json.dumps(body)})")
        finally:
            page.close()
    program = f"console.log(JSON.stringify(eval({json.dumps(body)})))"
    result = subprocess.run([node, "-"], input=program, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def random_shapes(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return n random models, each as a dict of a planner's arguments. (Only every tenth model may
    have more than 8 blocks. More blocks would test little, because blocks with the same policy are
    equal, except the last of them.)"""
    draw = random.Random(seed)
    pick: Callable[..., Any] = lambda *values: draw.choice(values)  # noqa: E731
    found = []
    for i in range(n):
        heads, layers = draw.randint(1, 25), draw.randint(1, 8 if i % 10 else 48)
        width = heads * pick(8, 32, 40, 64, 64, 128)
        seq_len, policy = pick(7, 64, 100, 512, 1024, 4096), pick(*POLICY_NAMES)
        some = None if policy == "none" else pick(None, draw.randint(0, layers))
        config = MiniGPTConfig(
            vocab_size=pick(61, 257, 1024, 5001, 32000, 50257, 200_000),
            max_position_embeddings=max(seq_len, pick(seq_len, 1024)),
            n_layers=layers,
            n_heads=heads,
            d_model=width,
            d_ff=pick(4 * width, 4 * width, 2 * width, 3 * width + 8, width),
            dropout=pick(0.0, 0.1),
            recompute=policy if some is None else f"{policy}:{some}",
            loss_chunks=pick(0, 0, 1, 4),
        )
        processes = pick({}, {}, {"ddp": True}, {"shard_degree": draw.randint(2, 16)})
        found.append(
            {
                "config": config,
                "batch_size": draw.randint(1, 64),
                "seq_len": seq_len,
                "precision": pick(torch.bfloat16, torch.float16, torch.float32),
                "optimizer": pick("adamw", "muon"),
                "moments": pick(torch.float32, torch.bfloat16),
                **processes,
            }
        )
    return found


def as_page(shape: dict[str, Any]) -> dict[str, Any]:
    """Return a result of `random_shapes` with the names that the page's functions use."""
    config, policies = shape["config"], recompute_plan_of_config(shape["config"]).policies
    same = {LETTERS[name]: getattr(config, name) for name in LETTERS}
    same |= {"B": shape["batch_size"], "T": shape["seq_len"], "dropout": config.dropout > 0}
    same |= {name: str(shape[name]).removeprefix("torch.") for name in ("precision", "moments")}
    # The policy of the first blocks, and the number of blocks that have this policy.
    same |= {
        "policy": policies[0],
        "layers": policies.count(policies[0]),
    }
    same |= {"optimizer": shape["optimizer"]}
    return same | {"ddp": shape.get("ddp", False), "shards": shape.get("shard_degree", 1)}

"""model.py with a change, as users make them, in the place of it: in this process, or in others.

`python changed.py "rotary, two_tables" PROGRAM WORDS...` runs a program on the changed model.
"""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
TABLE = """
        self.position_embedding = nn.Embedding(config.max_position_embeddings, config.d_model)"""
SUM = "self.token_embedding(input_ids) + self.position_embedding(positions)"
# {a change: [(lines of model.py, what stands there instead)]}
CHANGES: dict[str, list[tuple[str, str]]] = {
    "relu": [('F.gelu(wide, approximate="tanh")', "F.relu(wide)")],
    "exact_gelu": [('F.gelu(wide, approximate="tanh")', "F.gelu(wide)")],
    "scale": [("is_causal=T > 1)", "is_causal=T > 1, scale=0.1)")],
    "other_words": [  # the same to the last bits
        (
            "self.c_proj(self.attend(self.c_attn(x)))",
            "self.c_proj(self.attend(x @ self.c_attn.weight.T + self.c_attn.bias))",
        ),
    ],
    "asks_a_number": [  # which fake tensors do not have
        ("x = self.dropout(x)\n", "x = self.dropout(x) if x.sum() < 1e9 else x\n"),
    ],
    "rms_norm": [("nn.LayerNorm(", "nn.RMSNorm(")],
    "gate": [
        (
            "        self.c_proj = nn.Linear(config.d_ff, config.d_model)\n",
            "        self.c_proj = nn.Linear(config.d_ff, config.d_model)\n"
            "        self.c_gate = nn.Linear(config.d_model, config.d_ff, bias=False)\n",
        ),
        (
            'self.c_proj(F.gelu(wide, approximate="tanh"))',
            "self.c_proj(F.silu(self.c_gate(x)) * wide)",
        ),
    ],
    "wide_positions": [
        (
            "nn.Embedding(config.max_position_embeddings,",
            "nn.Embedding(2 * config.max_position_embeddings,",
        )
    ],
    "rotary": [
        (TABLE, ""),
        (SUM, "self.token_embedding(input_ids)"),
        (
            "        if self.past:\n",
            "        before = self.past.n_tokens if self.past else 0\n"
            "        q, k = rotated(q, before), rotated(k, before)\n"
            "        if self.past:\n",
        ),
        (
            "class MLP(",
            "def rotated(x: Tensor, before: int) -> Tensor:\n"
            '    """(B, H, T, D), each pair of channels turned by its position."""\n'
            "    T, D = x.shape[2:]\n"
            "    speed = 10000.0 ** (-torch.arange(0, D, 2, device=x.device) / D)\n"
            "    angle = torch.arange(before, before + T, device=x.device)[:, None] * speed\n"
            "    a, b = x.unflatten(-1, (2, -1)).unbind(-2)\n"
            "    turned = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()\n"
            "    return torch.cat(turned, -1).type_as(x)\n\n\n"
            "class MLP(",
        ),
    ],
    "two_tables": [  # of positions, and of what precedes each token
        (TABLE, TABLE + "\n        self.pair_embedding = nn.Embedding(7, config.d_model)"),
        (SUM, SUM + " + self.pair_embedding(input_ids % 7)"),
    ],
}


def changed_model(*names: str) -> ModuleType:
    """model.py with these CHANGES."""
    source = (ROOT / "model.py").read_text("utf-8")
    for name in names:
        for before, after in CHANGES[name]:
            assert before in source, f"{name}: model.py has no {before!r} any more"
            source = source.replace(before, after)
    module = ModuleType("model")
    exec(compile(source, ROOT / "model.py", "exec"), vars(module))
    return module


def put_in(*names: str, setattr: Callable[[ModuleType, str, type], None] = setattr) -> None:
    """All that have imported the model have the changed one; and who imports it later."""
    import model

    there, changed = model.MiniGPT, changed_model(*names).MiniGPT
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("MiniGPT") is there:
            setattr(module, "MiniGPT", changed)


if __name__ == "__main__":
    _, changes, *words = sys.argv
    sys.path[0] = str(ROOT)
    put_in(*changes.split(","))
    sys.argv, sys.path[:0] = words, [str((ROOT / words[0]).parent)]
    runpy.run_path(words[0], run_name="__main__")

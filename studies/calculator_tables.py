"""Write the tables of docs/calculator.js: python -m studies.calculator_tables

The tables are copies of constants in this project. Run this again after a constant has changed.
"""

import json
from pathlib import Path

from memory import head
from memory.policies import POLICIES
from planner.cards import CARDS, GIB, device_type
from trainer import optimizer
from trainer.flags import SHAPE_BY_MODEL

SCRIPT = Path(__file__).parent.parent / "docs/calculator.js"
BEGIN, END = "// ---- Tables", "// ---- What"


def tables() -> str:
    """Return the part of the script from BEGIN to END."""
    constants = {
        "CHUNK": head.LOGITS_CHUNK_BYTES,
        "SLICE": head.SOFTMAX_SLICE_ELEMENTS,
        "PAD": head.VOCAB_MULTIPLE,
        "ROWS": head.SLICE_ROWS_MULTIPLE,
        "AT_A_TIME": optimizer.UPDATE_CHUNK_ELEMENTS,
    }
    memory = {
        card.name: round(card.memory / GIB, 2)
        for card in CARDS.values()
        if device_type(card) == "cuda"
    }
    recompute = {
        name: [p.saved_tensor_names, p.recomputed_matmul_names, p.needs_fused_attention]
        for name, p in POLICIES.items()
    }
    return f"""{BEGIN}, written by `python -m studies.calculator_tables`
const {", ".join(f"{name} = {value}" for name, value in constants.items())};
const RECOMPUTE = {{ // policy: what it keeps beside a mask, multiplies twice; by operator?
{entries(recompute, 1)}
}};
const POLICIES = Object.keys(RECOMPUTE), words = (text) => text.match(/\\w+/g) ?? [];
const kept = (p) => words(RECOMPUTE[p][0]), twice = (p) => words(RECOMPUTE[p][1]);
const SHAPES = {{
{entries(SHAPE_BY_MODEL, 1)}
}};
const CARDS = {{ // GiB. (Not Apple's: no formula here has the scores that attention keeps there.)
{entries(memory, 5)}
}};

"""


def entries(table: dict, in_a_line: int) -> str:
    each = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in table.items()]
    lines = (each[i : i + in_a_line] for i in range(0, len(each), in_a_line))
    return ",\n".join("  " + ", ".join(line) for line in lines)


def main() -> None:
    script = SCRIPT.read_text()
    begin, end = script.index(BEGIN), script.index(END)
    SCRIPT.write_text(script[:begin] + tables() + script[end:])


if __name__ == "__main__":
    main()

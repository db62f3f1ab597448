"""Write the tables of docs/calculator.js: python -m studies.calculator_tables

The tables are copies of constants in this project. Run this again after a constant has changed.
"""

import json
from pathlib import Path

from memory import head
from memory.policies import POLICIES
from planner.cards import CARDS, GIB
from trainer import optimizer
from trainer.settings import SHAPE_BY_MODEL

SCRIPT = Path(__file__).parent.parent / "docs/calculator.js"
BEGIN, END = "// ---- Tables", "// ---- What"
# Cards that the page offers: a few for each size of memory.
OFFERED = (
    "RTX 2080 Ti|RTX 3060 12GB|RTX 3070|RTX 3080 10GB|RTX 3090|RTX 4060|RTX 4060 Ti 16GB|RTX 4070|"
    "RTX 4070 Ti|RTX 4080|RTX 4090|RTX 5060 Ti 16GB|RTX 5070|RTX 5080|RTX 5090|V100 16GB|V100 32GB|"
    "T4|L4|A10G|RTX A6000|RTX 6000 Ada|L40S|A100 40GB|A100|A100 PCIe|H100|H100 PCIe|H200|B200"
).split("|")


def tables() -> str:
    """Return the part of the script from BEGIN to END."""
    constants = {
        "CHUNK": head.LOGITS_CHUNK_BYTES,
        "SLICE": head.SOFTMAX_SLICE_ELEMENTS,
        "PAD": head.VOCAB_MULTIPLE,
        "ROWS": head.SLICE_ROWS_MULTIPLE,
        "AT_A_TIME": optimizer.UPDATE_CHUNK_ELEMENTS,
    }
    memory = {name: round(CARDS[name].memory / GIB, 2) for name in OFFERED}
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
    SCRIPT.write_text(script[: script.index(BEGIN)] + tables() + script[script.index(END) :])


if __name__ == "__main__":
    main()

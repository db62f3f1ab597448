"""How recompute was spelled before the policy string: four more flags, four more fields.

They are translated where they come in, on a command line (flags.py) or with a snapshot, and nothing
else sees them.
"""

import argparse
import re
from collections.abc import Mapping
from typing import Any

# Of a flag, as of a field: how the policy string says it, and the value that needs no word.
OLDER: dict[str, tuple[str, object]] = {
    "recompute_layers": (":{}", None),
    "recompute_rest": (",{}", "none"),
    "recompute_group": ("/{}", 1),
    "offload_activations": ("+offload", False),
}
PARTS = re.compile(r"([^:,/+]*)(:[^,/+]*)?(,[^/+]*)?(/[^+]*(?:\+nested)?)?(\+.*)?")


def join(policy: str, older: Mapping[str, object]) -> str:
    """The policy string, with what `older` has in the place of what it says itself of that."""
    match = PARTS.match(policy)
    assert match  # (any string does)
    first, *parts = match.groups("")
    for i, (name, (form, default)) in enumerate(OLDER.items()):
        if name in older:
            value = older[name]
            parts[i] = "" if value is None or str(value) == str(default) else form.format(value)
    return first + "".join(parts)


def translate(state: dict[str, Any]) -> dict[str, Any]:
    """A snapshot, its `config` and `args` spelled as they are spelled now."""
    for fields, name in (("config", "recompute"), ("args", "use_activation_checkpoint")):
        older = {field: state[fields].pop(field) for field in OLDER if field in state[fields]}
        if older:
            state[fields][name] = join(str(state[fields].get(name)), older)
    return state


def add_flags(parser: Any) -> None:
    """They still work; --help has them no more."""
    for name in OLDER:
        kind: dict[str, Any] = {"default": None, "help": argparse.SUPPRESS}
        kind |= {"action": argparse.BooleanOptionalAction} if name.startswith("off") else {}
        parser.add_argument("--" + name.replace("_", "-"), **kind)

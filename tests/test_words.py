"""The rules of words in CONTRIBUTING.md, as far as a machine can hold them."""

import ast
import io
import re
import tokenize
from collections import defaultdict

import pytest
from harness.runs import ROOT

CORE = ["model.py", *sorted(path.name for path in ROOT.glob("train_*.py"))]
ROOMS = ("memory", "planner", "trainer", "data", "scripts", "studies", "tests/harness")
FILES = CORE + [
    str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).glob("*.py")
]
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
# These words meant several things once. Each is now the name of one thing, in one room.
RESERVED = "gather exchange join part blocks record room".split()


def definitions(name: str) -> list[ast.AST]:
    return [
        node
        for node in ast.walk(ast.parse((ROOT / name).read_text("utf-8")))
        if isinstance(node, (*DEFINITIONS, ast.Module))
    ]


@pytest.mark.parametrize("name", FILES)
def test_docstrings_and_comments_are_plain(name):
    source = (ROOT / name).read_text("utf-8")
    docstrings = [ast.get_docstring(node) or "" for node in definitions(name)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    assert not [text for text in docstrings if re.match(r"(What|Of|As|The same)\b", text)]
    nobody = re.compile(r"\b(who|nobody|somebody|whoever)\b", re.I)
    assert not [text for text in docstrings + comments if nobody.search(text)]


@pytest.mark.parametrize("name", [name for name in FILES if name in CORE or name[0] in "mp"])
def test_public_functions_have_docstrings(name):
    """Of model.py, train_*.py, memory/ and planner/. Methods may leave it to the class."""
    tree = ast.parse((ROOT / name).read_text("utf-8"))
    public = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert not [node.name for node in public if not ast.get_docstring(node)]


def test_a_name_is_one_thing():
    """A function or class of the core has a name of its own; a reserved word is one thing."""
    found = defaultdict(list)
    for name in FILES:
        if not name.startswith(("scripts", "studies", "tests")):
            for node in ast.parse((ROOT / name).read_text("utf-8")).body:
                if isinstance(node, DEFINITIONS) and node.name != "main":  # (one per program)
                    found[node.name].append(name)
    twice = {name: where for name, where in found.items() if len(where) > 1}
    assert not twice
    for word in RESERVED:
        where = [
            name
            for name in FILES
            for node in definitions(name)
            if getattr(node, "name", "") == word and not name.startswith("tests")
        ]
        assert len(where) <= 1, f"{word}: {where}"

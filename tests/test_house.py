"""Each line in its room: the layout that CONTRIBUTING.md promises, read from the files."""

import ast
import inspect
import re
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path
from textwrap import dedent

import pytest
from harness.runs import ROOT

from model import MiniGPT

# From the ground up; a room may import those below it. `data` stands beside all of them.
FLOORS = "model memory planner trainer train_minimal train_ddp train_fsdp train_sp"
FLOORS += " scripts studies tests"
FLOOR = {room: height for height, room in enumerate(FLOORS.split())}
FLOOR["data"] = FLOOR["planner"]
# Statements of a whole room, without imports and docstrings. A name, a comment, a docstring and a
# wrapped call cost nothing, so no limit ever shortens a word. A limit of a file would make files
# split; one of a room makes them simpler.
ROOMS = {
    "the root": 399,
    "memory": 527,
    "planner": 1_110,
    "trainer": 2_165,
    "data": 639,
    "scripts": 1_366,
    "studies": 69,
    "all without tests": 6_275,
    "tests": 6_359,
}
FILES_IN = {"trainer": 20, "scripts": 16}
# Of a file: what is read from top to bottom, and pages.
FILES_READ = {
    "README.md": 160,
    "README.zh-CN.md": 150,
    "model.py": 286,
    "train_minimal.py": 286,
    "train_ddp.py": 115,
    "train_fsdp.py": 157,
    "train_sp.py": 132,
    "docs/change.md": 120,
    "docs/planning.md": 260,
    "docs/evidence.md": 250,
}
PAGE = 1_350  # JavaScript, HTML and CSS of scripts/page/
LISTED = ("memory", "planner", "trainer", "data")  # rooms whose __init__ lists their files


FILES = [str(path.relative_to(ROOT)) for path in ROOT.glob("*.py")]
for folder in ROOMS.keys() - {"the root", "all without tests"}:
    FILES += [str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")]
MODULES = {
    name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): name for name in FILES
}


def room(name: str) -> str:
    return Path(name).parts[0].removesuffix(".py")


def tree(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text("utf-8"))


def imports(name: str) -> set[str]:
    """The files that a file imports anywhere in it, also for the type checker alone."""
    found = set()
    for node in ast.walk(tree(name)):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = Path(name).parent.parts
            base = list(parts[: len(parts) + 1 - node.level]) if node.level else []
            base += [node.module] if node.module else []
            modules = [".".join(base)] + [".".join([*base, alias.name]) for alias in node.names]
        found |= {MODULES[module] for module in modules if module in MODULES}
    return found - {name}


def test_imports_point_down():
    for name in FILES:
        for other in imports(name):
            down = FLOOR[room(other)] < FLOOR[room(name)]
            beside = room(other) == "data" and FLOOR[room(name)] > FLOOR["data"]
            assert room(other) == room(name) or down or beside, f"{name} imports {other}"
    assert "data/tokens.py" in imports("data/batches.py")  # this test can see imports


def test_no_circles():
    """File by file; a package's own __init__ may import all of it, and is imported by none."""
    TopologicalSorter({name: imports(name) for name in FILES}).prepare()


def test_the_root_is_the_tutorial():
    tutorial = {"model.py", "train_minimal.py", "train_ddp.py", "train_fsdp.py", "train_sp.py"}
    assert {path.name for path in ROOT.glob("*.py")} == tutorial


def lines(file: Path) -> int:
    return len(file.read_text("utf-8").splitlines())


def statements(name: str) -> int:
    """Without imports and docstrings."""
    nodes = [node for node in ast.walk(tree(name)) if isinstance(node, ast.stmt)]
    docstrings = [
        node
        for node in nodes
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return len(nodes) - len(docstrings) - len(imports)


def test_a_room_stays_small():
    rooms: dict[str, int] = {}
    for name in FILES:
        where = name.split("/")[0] if "/" in name else "the root"
        rooms[where] = rooms.get(where, 0) + statements(name)
    rooms["all without tests"] = sum(rooms.values()) - rooms["tests"]
    assert rooms.keys() == ROOMS.keys()
    assert not {room: n for room, n in rooms.items() if n > ROOMS[room]}
    files = Counter(map(room, FILES))
    assert all(files[room] <= n for room, n in FILES_IN.items())
    assert sum(map(lines, (ROOT / "scripts/page").glob("*.*"))) <= PAGE


@pytest.mark.parametrize("name", FILES_READ)
def test_a_file_is_read_in_one_sitting(name):
    assert lines(ROOT / name) <= FILES_READ[name]


@pytest.mark.parametrize("folder", LISTED)
def test_a_room_lists_its_files(folder):
    """Its __init__ names each of them, and none that is not there."""
    described = ast.get_docstring(tree(f"{folder}/__init__.py"))
    names = {Path(name).name for name in FILES if room(name) == folder} - {"__init__.py"}
    assert set(re.findall(r"^(\w+\.py) ", described or "", re.M)) == names


def test_the_tests_that_are_run_twice_are_there():
    figures = (ROOT / ".ci/run").read_text("utf-8").split('figures="')[1].split('"')[0].split()
    assert {f"tests/test_{name}.py" for name in figures} <= set(FILES)


def test_functions_fit_on_a_screen():
    """Docstrings left out."""
    for name in FILES:
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.FunctionDef):
                described = len((ast.get_docstring(node, clean=False) or "").splitlines())
                length = (node.end_lineno or 0) - node.lineno + 1 - described
                assert length <= 60, f"{name}: {node.name}"


def test_the_arithmetic_of_a_block_stands_in_the_model_alone():
    """Policies call the parts of a block: whoever changes model.py changes it under all of them."""
    parts = {"c_attn", "c_fc", "gelu", "scaled_dot_product_attention", "dropout_p"}
    named = {
        getattr(node, "attr", getattr(node, "id", ""))
        for name in FILES
        if room(name) == "memory"
        for node in ast.walk(tree(name))
    }
    assert not named & parts and "attend" in named


def test_the_models_forward():
    """One loop, and no plumbing. (The activation checkpoint in it is the README's excerpt.)"""
    code = dedent(inspect.getsource(MiniGPT.forward))
    assert len(code.splitlines()) <= 30
    (loop,) = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.For | ast.While))
    assert not re.search("group|offload|slice|chunk|compile", ast.unparse(loop))


def test_the_loop_is_seen_at_a_glance():
    """A training step and the bar; all else is one call."""
    (loop,) = (node for node in ast.walk(tree("train_minimal.py")) if isinstance(node, ast.While))
    assert (loop.end_lineno or 0) - loop.lineno <= 10

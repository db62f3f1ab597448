"""Each line in its room: the layout that CONTRIBUTING.md promises, read from the files."""

import ast
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

from harness.runs import ROOT

# From the ground up; a room may import those below it. `data` stands beside all of them.
FLOORS = "model memory planner trainer train_minimal train_ddp train_fsdp train_sp"
FLOORS += " scripts studies tests"
FLOOR = {room: height for height, room in enumerate(FLOORS.split())}
FLOOR["data"] = FLOOR["planner"]
# Statements of a whole room, without imports and docstrings. A name, a comment, a docstring and a
# wrapped call cost nothing, so no limit ever shortens a word. A limit of a file would make files
# split; one of a room makes them simpler.
ROOMS = {
    "the root": 405,
    "memory": 560,
    "planner": 1_220,
    "trainer": 1_840,
    "data": 490,
    "scripts": 1_490,
    "studies": 66,
    "all without tests": 6_025,
    "tests": 5_795,
}
FILES_IN = {"trainer": 20, "scripts": 17}
# Of a file: what is read from top to bottom, and pages.
FILES_READ = {
    "README.md": 110,
    "README.zh-CN.md": 110,
    "model.py": 295,
    "train_minimal.py": 286,
    "train_ddp.py": 110,
    "train_fsdp.py": 150,
    "train_sp.py": 105,
    "docs/change.md": 120,
    "docs/planning.md": 200,
    "docs/evidence.md": 140,
}
PAGE = 1_332  # JavaScript, HTML and CSS of scripts/page/

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


def lines(name: str) -> int:
    return len((ROOT / name).read_text("utf-8").splitlines())


def statements(name: str) -> int:
    """Without imports and docstrings."""
    nodes = [node for node in ast.walk(tree(name)) if isinstance(node, ast.stmt)]
    values = [node.value for node in nodes if isinstance(node, ast.Expr)]
    docstrings = [v for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return len(nodes) - len(docstrings) - len(imports)


def test_a_room_stays_small():
    rooms = Counter[str]()
    for name in FILES:
        rooms[name.split("/")[0] if "/" in name else "the root"] += statements(name)
    rooms["all without tests"] = rooms.total() - rooms["tests"]
    assert rooms.keys() == ROOMS.keys()
    assert not {room: n - ROOMS[room] for room, n in rooms.items() if n > ROOMS[room]}
    files = Counter(map(room, FILES))
    assert not {room: files[room] - n for room, n in FILES_IN.items() if files[room] > n}
    page = (ROOT / "scripts/page").glob("*.*")
    assert sum(lines(str(path.relative_to(ROOT))) for path in page) <= PAGE


def test_a_file_is_read_in_one_sitting():
    assert not {name: lines(name) - n for name, n in FILES_READ.items() if lines(name) > n}

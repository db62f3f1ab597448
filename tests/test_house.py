"""Each line in its room: the layout that CONTRIBUTING.md promises, read from the files."""

import ast
import subprocess
from pathlib import Path

import pytest
from harness.runs import ROOT

# From the top floor down; a room may import those below it. `data` stands beside all of them.
FLOORS = [
    {"tests"},
    {"studies"},
    {"scripts"},
    {"train_fsdp"},
    {"train_ddp"},
    {"train_minimal"},
    {"trainer"},
    {"planner", "data"},
    {"model"},
    {"memory"},
]
FLOOR = {room: height for height, rooms in enumerate(reversed(FLOORS)) for room in rooms}
LIMITS = {"model.py": 280, "train_minimal.py": 260, "README.md": 230}
LIMITS |= dict.fromkeys(("train_ddp.py", "train_fsdp.py"), 130)


def tracked(*patterns: str) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode:  # a copy without its history
        paths = (path for pattern in patterns for path in ROOT.rglob(pattern))
        return [str(path.relative_to(ROOT)) for path in paths if ".venv" not in path.parts]
    return [name for name in found.stdout.splitlines() if (ROOT / name).exists()]


FILES = tracked("*.py")
MODULES = {
    name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): name for name in FILES
}


def room(name: str) -> str:
    return Path(name).parts[0].removesuffix(".py")


def imports(name: str) -> set[str]:
    """The files that a file imports anywhere in it, also for the type checker alone."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
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
    assert "data/tokenizer.py" in imports("data/batches.py")  # this test can see imports


def test_no_circles():
    """File by file; a package's own __init__ may import all of it, and is imported by none."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in imports(name):
                visit(other, (*path, name))
            done.add(name)

    for name in FILES:
        visit(name, ())


def test_the_root_is_the_tutorial():
    assert {name for name in FILES if "/" not in name} == {
        "model.py",
        "train_minimal.py",
        "train_ddp.py",
        "train_fsdp.py",
    }


@pytest.mark.parametrize("name", [*FILES, *tracked("*.js", "*.html", "*.css"), "README.md"])
def test_a_file_is_read_in_one_sitting(name):
    lines = (ROOT / name).read_text().splitlines()
    assert len(lines) <= LIMITS.get(name, 400)


def functions(name: str) -> list[ast.FunctionDef]:
    tree = ast.parse((ROOT / name).read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def test_functions_fit_on_a_screen():
    """Docstrings left out; and but for one table, the flags."""

    def length(node: ast.FunctionDef) -> int:
        described = len((ast.get_docstring(node, clean=False) or "").splitlines())
        return (node.end_lineno or 0) - node.lineno + 1 - described

    long = {f"{name}: {f.name}" for name in FILES for f in functions(name) if length(f) > 60}
    assert long <= {"trainer/flags.py: build_parser"}


def test_the_models_forward():
    """One loop, the activation checkpoint in it, and no plumbing."""
    tree = ast.parse((ROOT / "model.py").read_text())
    (model,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "MiniGPT")
    (forward,) = (n for n in model.body if isinstance(n, ast.FunctionDef) and n.name == "forward")
    assert (forward.end_lineno or 0) - forward.lineno + 1 <= 30
    (loop,) = (node for node in ast.walk(forward) if isinstance(node, ast.For | ast.While))
    calls = [
        n.func.id
        for n in ast.walk(loop)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    ]
    assert "checkpoint" in calls
    body = "\n".join(map(ast.unparse, loop.body))
    for word in ("group", "offload", "slice", "chunk", "compile"):
        assert word not in body

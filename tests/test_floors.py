"""Imports point down only, and each dependency has one door (docs/decisions/0001-floors.md)."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "blockdiff"
FLOORS = {"core": 0, "records": 0, "model": 1, "data": 1, "sampling": 2, "training": 2, "evaluation": 3}
ROOF = 4
DOORS = {
    "lightning": ("training/", "build.py"),
    "hydra": ("composition.py", "cli.py"),
    "omegaconf": ("composition.py", "cli.py"),
    "datasets": ("data/",),
    "tokenizers": ("data/",),
    "flash_attn": ("model/attention.py",),
    "transformers": ("model/pretrained.py",),
    "peft": ("model/pretrained.py",),
    "lm_eval": ("harness.py",),
}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def floor(part: str) -> int:
    return FLOORS.get(part, ROOF)


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    for name in imports(path):
        if not name.startswith("blockdiff."):
            continue
        below = name.split(".")[1]
        same = below == part_of(path)
        preview = path.name == "preview.py" and below == "sampling"
        assert same or preview or floor(below) < floor(part_of(path)) or floor(part_of(path)) == ROOF, (
            f"{path.name} (floor {floor(part_of(path))}) imports {name} (floor {floor(below)})"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_each_dependency_has_one_door(path):
    where = path.relative_to(PACKAGE).as_posix()
    for name in imports(path):
        top = name.split(".")[0]
        if top in DOORS:
            assert where.startswith(DOORS[top]), f"{where} imports {top}, whose doors are {DOORS[top]}"
        assert top != "wandb", f"{where} imports wandb: it is used through Lightning's logger only"


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").glob("*.py")), ids=lambda p: p.name)
def test_core_knows_nothing_but_torch(path):
    allowed = {"torch", "blockdiff", "__future__"} | sys.stdlib_module_names
    assert {name.split(".")[0] for name in imports(path)} <= allowed


def test_no_file_is_long():
    sizes = {path.name: len(path.read_text().splitlines()) for path in FILES}
    assert {name: size for name, size in sizes.items() if size > 400} == {}
    assert not [path for path in FILES if path.name == "utils.py"]


def test_no_function_is_long():
    long = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60:
                long.append(f"{path.name}:{node.name}")
    assert long == []

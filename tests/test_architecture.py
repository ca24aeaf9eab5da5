"""Which room may import which, and how large its parts may get."""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

import shardopt

SRC = Path(shardopt.__file__).parent
FILES = sorted(SRC.rglob("*.py"))
FRAMEWORKS = ("torch", "tensorplay")

MAY_IMPORT = {
    "errors": set(),
    "sharding": set(),
    "partition": set(),
    "collectives": {"errors"},
    "buffers": {"partition", "errors"},
    "step": {"partition", "collectives", "buffers", "errors"},
    "checkpoint": {"partition", "collectives", "buffers", "errors"},
    "join": set(),
    "frameworks": {"buffers", "collectives", "join"},
    "param_groups": {"frameworks", "partition"},
    "shards": {
        "buffers",
        "collectives",
        "frameworks",
        "param_groups",
        "partition",
        "sharding",
        "step",
    },
    "optimizer": {
        "buffers",
        "checkpoint",
        "collectives",
        "errors",
        "frameworks",
        "join",
        "param_groups",
        "partition",
        "sharding",
        "shards",
        "step",
    },
    "torch": {"frameworks", "optimizer", "sharding"},
    "tensorplay": {"frameworks", "optimizer", "sharding"},
    "ddp_zero_hook": {"step", "torch"},
    "testing": set(),
    "shardopt": {"errors", "sharding"},
}
"""Every room, with the rooms whose names it may import when it runs; ``shardopt`` is the package's own ``__init__``."""

MAY_IMPORT_FRAMEWORK = {
    "frameworks/torch.py": {"torch"},
    "torch.py": {"torch"},
    "ddp_zero_hook.py": {"torch"},
    "frameworks/tensorplay.py": {"tensorplay"},
    "tensorplay.py": {"tensorplay"},
    "testing/ranks.py": {"torch", "tensorplay"},
}

LAZY = {("__init__.py", "torch"), ("__init__.py", "shardopt.torch")}
"""What the package loads when its optimizer is asked for."""

MAX_FILE_LINES = 400
MAX_CLASS_LINES = 300
KNOWN_LARGE_CLASSES = {"ShardedOptimizer": 360}
"""Classes above the bound, with the lines that they may have until they are split."""


@dataclass(frozen=True)
class Import:
    """One imported module, as it would be spelled absolutely."""

    module: str
    is_lazy: bool
    is_for_types: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


def label(path):
    return path.relative_to(SRC).as_posix()


def room_of(path):
    """The room that a file belongs to."""
    first = path.relative_to(SRC).parts[0].removesuffix(".py")
    return "shardopt" if first == "__init__" else first


def package_of(path):
    return ["shardopt", *path.relative_to(SRC).parts[:-1]]


def imports_of(path, source=None):
    """All imports of a file, in its functions too."""
    found = []

    def visit(node, is_lazy, is_for_types):
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, is_lazy, is_for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package_of(path)[: len(package_of(path)) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [alias.name for alias in node.names]
            parts = [f"{module}.{name}" for name in names] if module == "shardopt" else [module]
            found.extend(Import(part, is_lazy, is_for_types) for part in parts)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                visit(child, is_lazy, True)
            for child in node.orelse:
                visit(child, is_lazy, is_for_types)
            return
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, is_lazy or is_function, is_for_types)

    visit(ast.parse(path.read_text() if source is None else source), False, False)
    return found


def imports_at_run_time(path):
    return [
        one
        for one in imports_of(path)
        if not one.is_for_types and not (one.is_lazy and (label(path), one.module) in LAZY)
    ]


per_file = pytest.mark.parametrize("path", FILES, ids=label)


# --- the reader of imports ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("import torch.distributed as dist", ["torch.distributed"]),
        ("from shardopt.step import agree, exchange", ["shardopt.step"]),
        ("from shardopt import errors, Sharding", ["shardopt.errors", "shardopt.Sharding"]),
        ("from . import layout", ["shardopt.partition"]),
        ("from ..errors import ShardoptError", ["shardopt.errors"]),
        ("def f():\n    import torch", ["torch"]),
        ("try:\n    import torch\nexcept ImportError:\n    pass", ["torch"]),
    ],
)
def test_imports_of_every_form_are_read(source, modules):
    assert [one.module for one in imports_of(SRC / "partition" / "spec.py", source)] == modules


def test_imports_for_types_are_told_from_those_of_the_other_branch():
    source = "if TYPE_CHECKING:\n    import torch\nelse:\n    import numpy"
    found = imports_of(SRC / "errors.py", source)
    assert [(one.module, one.is_for_types) for one in found] == [("torch", True), ("numpy", False)]


# --- rooms ----------------------------------------------------------------------------------------


def test_there_are_files_to_check():
    assert len(FILES) > 30


@per_file
def test_every_file_belongs_to_a_room_of_the_table(path):
    assert room_of(path) in MAY_IMPORT


@per_file
def test_a_room_imports_only_the_rooms_it_may(path):
    allowed = MAY_IMPORT[room_of(path)] | {room_of(path)}
    ours = [one for one in imports_at_run_time(path) if one.top == "shardopt"]
    rooms = [one.module.split(".")[1] for one in ours]
    assert [room for room in rooms if room not in allowed] == []


def test_the_table_has_no_circle():
    remaining = dict(MAY_IMPORT)
    while leaves := [room for room, others in remaining.items() if not others & set(remaining)]:
        for room in leaves:
            del remaining[room]
    assert remaining == {}


@per_file
def test_types_are_imported_from_rooms_of_the_table(path):
    modules = [one.module for one in imports_of(path) if one.is_for_types]
    ours = [module.split(".")[1] for module in modules if module.startswith("shardopt.")]
    assert set(ours) <= set(MAY_IMPORT)


@per_file
def test_a_framework_is_imported_only_by_its_adapter_and_its_front(path):
    allowed = MAY_IMPORT_FRAMEWORK.get(label(path), set())
    modules = [one.top for one in imports_at_run_time(path) if one.top in FRAMEWORKS]
    assert set(modules) <= allowed


@per_file
def test_nothing_but_the_standard_library_is_imported_besides(path):
    import sys

    allowed = {*sys.stdlib_module_names, "shardopt", *FRAMEWORKS}
    if room_of(path) == "testing":
        allowed.add("pytest")
    assert {one.top for one in imports_of(path)} <= allowed


@per_file
def test_rooms_are_entered_by_their_door(path):
    rooms = {room_of(p) for p in FILES if p.name == "__init__.py" and p.parent != SRC}
    rooms -= {"frameworks"}  # its adapters are loaded one by one
    inside = [
        one.module
        for one in imports_of(path)
        if one.module.count(".") > 1
        and one.module.split(".")[1] in rooms - {room_of(path)}
        and one.top == "shardopt"
    ]
    assert inside == []


# --- parts ----------------------------------------------------------------------------------------


@per_file
def test_a_file_is_not_above_its_bound(path):
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@per_file
def test_a_class_is_not_above_its_bound(path):
    classes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef)]
    large = [
        node.name
        for node in classes
        if node.end_lineno - node.lineno + 1 > KNOWN_LARGE_CLASSES.get(node.name, MAX_CLASS_LINES)
    ]
    assert large == []


def test_classes_known_to_be_large_still_are():
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text()))]
    large = [
        node.name
        for node in nodes
        if isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno + 1 > MAX_CLASS_LINES
    ]
    assert large == list(KNOWN_LARGE_CLASSES)


@per_file
def test_library_code_does_not_print(path):
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    assert [call.lineno for call in calls if ast.unparse(call.func) == "print"] == []


@per_file
def test_torch_internals_for_testing_are_not_used(path):
    assert "torch.testing._internal" not in path.read_text()


@per_file
def test_every_file_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", [p for p in FILES if p.name == "__init__.py"], ids=label)
def test_every_room_says_what_it_owns(path):
    assert len(ast.get_docstring(ast.parse(path.read_text())) or "") > 60


@per_file
def test_only_buffers_rebind_the_data_of_a_parameter(path):
    assigned = [
        target
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and target.attr == "data"
    ]
    assert not assigned or room_of(path) == "buffers"


@pytest.mark.parametrize("path", [p for p in FILES if room_of(p) == "partition"], ids=label)
def test_planning_uses_no_set_and_no_identity(path):
    names = {n.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name)}
    assert names & {"set", "frozenset", "id", "hash"} == set()

"""Which room may import which, and how large its parts may get."""

import ast
import sys
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
    "buffers": {"errors", "partition"},
    "frameworks": {"buffers", "collectives", "errors", "partition"},
    "arguments": {"frameworks", "partition", "sharding"},
    "shards": {
        "arguments",
        "buffers",
        "collectives",
        "errors",
        "frameworks",
        "partition",
        "sharding",
    },
    "gradients": {"buffers", "collectives", "errors", "frameworks", "partition", "shards"},
    "step": {"buffers", "collectives", "errors", "gradients", "partition", "shards"},
    "files": {"errors", "partition"},
    "checkpoint": {
        "buffers",
        "collectives",
        "errors",
        "files",
        "frameworks",
        "partition",
        "shards",
    },
    "optimizer": {
        "arguments",
        "checkpoint",
        "collectives",
        "errors",
        "frameworks",
        "gradients",
        "sharding",
        "shards",
        "step",
    },
    "torch": {"frameworks", "optimizer"},
    "tensorplay": {"collectives", "frameworks", "optimizer", "step"},
    "ddp_zero_hook": {"step", "torch"},
    "testing": set(),
    "cli": {"checkpoint", "errors", "files", "frameworks"},
    "shardopt": {"errors", "partition", "sharding"},
}
"""Every room, with the rooms whose names it may import when it runs; ``shardopt`` is the package's own ``__init__``."""

MAY_IMPORT_FRAMEWORK = {
    "frameworks/torch.py": {"torch"},
    "frameworks/dcp.py": {"torch"},
    "frameworks/sharded_gradient.py": {"torch"},
    "torch.py": {"torch"},
    "ddp_zero_hook.py": {"torch"},
    "frameworks/tensorplay.py": {"tensorplay"},
    "tensorplay/__init__.py": {"tensorplay"},
    "tensorplay/ddp_zero_hook.py": {"tensorplay"},
    "testing/ranks.py": {"torch", "tensorplay"},
}

LAZY = {
    ("__init__.py", "torch"),
    ("__init__.py", "shardopt.torch"),
    ("cli/convert.py", "torch"),
}
"""What the package loads when its optimizer is asked for, and the command line to write a file of ``torch.save``."""

MAX_FILE_LINES = 400
MAX_CLASS_LINES = 300


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


def violations(rule, files=FILES):
    """What ``rule`` finds wrong in each file, by file; files without fault are left out."""
    found = {label(path): rule(path) for path in files}
    return {name: wrong for name, wrong in found.items() if wrong}


def tree_of(path):
    return ast.parse(path.read_text())


def num_lines(node):
    return node.end_lineno - node.lineno + 1


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


def test_every_file_belongs_to_a_room_of_the_table():
    assert violations(lambda path: room_of(path) not in MAY_IMPORT) == {}


def test_a_room_imports_only_the_rooms_it_may():
    def forbidden(path):
        allowed = MAY_IMPORT[room_of(path)] | {room_of(path)}
        ours = [one for one in imports_at_run_time(path) if one.top == "shardopt"]
        rooms = [one.module.split(".")[1] for one in ours]
        return [room for room in rooms if room not in allowed]

    assert violations(forbidden) == {}


def test_every_room_of_the_table_is_there_and_imports_what_it_may():
    used = {room: set() for room in {room_of(path) for path in FILES}}
    for path in FILES:
        ours = [one for one in imports_at_run_time(path) if one.top == "shardopt"]
        used[room_of(path)] |= {one.module.split(".")[1] for one in ours} - {room_of(path)}
    assert {room: allowed - used.get(room, set()) for room, allowed in MAY_IMPORT.items()} == {
        room: set() for room in used
    }


def test_the_table_has_no_circle():
    remaining = dict(MAY_IMPORT)
    while leaves := [room for room, others in remaining.items() if not others & set(remaining)]:
        for room in leaves:
            del remaining[room]
    assert remaining == {}


def test_types_are_imported_from_rooms_of_the_table():
    def unknown(path):
        modules = [one.module for one in imports_of(path) if one.is_for_types]
        ours = [module.split(".")[1] for module in modules if module.startswith("shardopt.")]
        return set(ours) - set(MAY_IMPORT)

    assert violations(unknown) == {}


def test_a_framework_is_imported_only_by_its_adapter_and_its_front():
    def forbidden(path):
        modules = [one.top for one in imports_at_run_time(path) if one.top in FRAMEWORKS]
        return set(modules) - MAY_IMPORT_FRAMEWORK.get(label(path), set())

    assert violations(forbidden) == {}


def test_a_file_of_one_framework_imports_no_other():
    def both(path):
        tops = {one.top for one in imports_at_run_time(path)} & set(FRAMEWORKS)
        return tops if len(tops) > 1 else None

    assert violations(both) == {}


def test_nothing_but_the_standard_library_is_imported_besides():
    def foreign(path):
        allowed = {*sys.stdlib_module_names, "shardopt", *FRAMEWORKS}
        if room_of(path) == "testing":
            allowed.add("pytest")
        if room_of(path) == "cli":
            allowed.add("rich")
        return {one.top for one in imports_of(path)} - allowed

    assert violations(foreign) == {}


def test_rooms_are_entered_by_their_door():
    rooms = {room_of(p) for p in FILES if p.name == "__init__.py" and p.parent != SRC}
    rooms -= {"frameworks"}  # its adapters are loaded one by one

    def inside(path):
        return [
            one.module
            for one in imports_of(path)
            if one.module.count(".") > 1
            and one.module.split(".")[1] in rooms - {room_of(path)}
            and one.top == "shardopt"
        ]

    assert violations(inside) == {}


# --- parts ----------------------------------------------------------------------------------------


def test_no_file_is_above_its_bound():
    def too_long(path):
        count = len(path.read_text().splitlines())
        return count if count > MAX_FILE_LINES else None

    assert violations(too_long) == {}


def test_no_class_is_above_its_bound():
    def too_large(path):
        return [
            node.name
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.ClassDef) and num_lines(node) > MAX_CLASS_LINES
        ]

    assert violations(too_large) == {}


def test_library_code_does_not_print():
    def prints(path):
        calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
        return [call.lineno for call in calls if ast.unparse(call.func) == "print"]

    assert violations(prints) == {}


def test_torch_internals_for_testing_are_not_used():
    assert violations(lambda path: "torch.testing._internal" in path.read_text()) == {}


def test_every_file_says_what_it_is_for():
    assert violations(lambda path: not ast.get_docstring(tree_of(path))) == {}


def test_every_room_says_what_it_owns():
    doors = [path for path in FILES if path.name == "__init__.py"]
    assert violations(lambda path: len(ast.get_docstring(tree_of(path)) or "") <= 60, doors) == {}


def test_only_buffers_rebind_the_data_of_a_parameter():
    def rebound(path):
        return [
            node.lineno
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Assign)
            and any(isinstance(t, ast.Attribute) and t.attr == "data" for t in node.targets)
        ]

    assert violations(rebound, [path for path in FILES if room_of(path) != "buffers"]) == {}


def test_planning_uses_no_set_and_no_identity():
    def used(path):
        names = {node.id for node in ast.walk(tree_of(path)) if isinstance(node, ast.Name)}
        return names & {"set", "frozenset", "id", "hash"}

    assert violations(used, [path for path in FILES if room_of(path) == "partition"]) == {}


def test_sizes_are_divided_in_the_planning_room_only():
    """But for groups, which count peers and members, and flags, which are packed into ints."""
    allowed = {"collectives/hybrid.py", "collectives/rank_group.py", "collectives/flags.py"}

    def divided(path):
        return [
            node.lineno
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.BinOp)
            and isinstance(node.op, (ast.FloorDiv, ast.Mod))
            and not isinstance(node.left, ast.Constant)
        ]

    others = [path for path in FILES if room_of(path) != "partition"]
    assert set(violations(divided, others)) == allowed

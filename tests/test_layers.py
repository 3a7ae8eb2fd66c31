"""The table of layers, held as data: who may import whom inside stretto, and where torch may be.

The checker reads the source, so it sees imports inside functions and under TYPE_CHECKING too.
It is itself tested at the end, with planted violations.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "stretto"

LAYER_0 = frozenset({"errors", "ir"})
LAYER_1 = frozenset({"schedules", "passes", "verify", "simulate"})
LAYER_2 = frozenset({"plan", "view"})
LAYER_3 = frozenset({"runtime", "models", "profile"})
BELOW_4 = LAYER_0 | LAYER_1 | LAYER_2 | LAYER_3
ROOT = "stretto"  # stretto/__init__.py: the package itself, with its version and its lazy names
EVERYTHING = BELOW_4 | {"train", "cli", "testing", "compat", ROOT}

# package or module → what it may import of stretto, besides itself
MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "ir": frozenset({"errors"}),
    "schedules": LAYER_0,
    "passes": LAYER_0,
    "verify": LAYER_0 | {"passes"},
    "simulate": LAYER_0,
    "plan": LAYER_0 | LAYER_1,
    "view": LAYER_0,
    "runtime": LAYER_0 | {"verify", "passes"},
    "models": LAYER_0,
    "profile": LAYER_0 | {"runtime"},
    "train": BELOW_4 | {ROOT},
    "cli": EVERYTHING,
    "testing": BELOW_4 | {"train", ROOT},
    "compat": BELOW_4 | {"train", ROOT},
    "__main__": frozenset({"cli"}),
    ROOT: EVERYTHING,
}

STANDARD_LIBRARY_ONLY = LAYER_0 | LAYER_1 | {"view", ROOT}
TORCH_ANYWHERE = frozenset({"runtime", "models", "profile", "train", "compat"})
TORCH_INSIDE_FUNCTIONS = frozenset({"cli", "testing"})


@dataclass(frozen=True)
class Import:
    """One imported module, with where it stands."""

    target: str
    """Absolute dotted name; `from a import b` gives `a.b`, where b may be a module or a name."""
    line: int
    deferred: bool
    """Inside a function or under TYPE_CHECKING: importing the file does not run it."""


def is_type_checking(node: ast.AST) -> bool:
    """Whether the node is `if TYPE_CHECKING:` or `if typing.TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def imports(node: ast.AST, package: list[str], deferred: bool = False) -> Iterator[Import]:
    """Every import below the node; `package` is the dotted name that a leading dot stands for."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, deferred)
    elif isinstance(node, ast.ImportFrom):
        above = package[: len(package) - node.level + 1] if node.level else []
        source = [*above, *([node.module] if node.module else [])]
        for alias in node.names:
            yield Import(".".join([*source, alias.name]), node.lineno, deferred)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        if node.args and isinstance(name := node.args[0], ast.Constant):
            yield Import(str(name.value), node.lineno, deferred)
    elif is_type_checking(node):
        assert isinstance(node, ast.If)
        for child in node.body:
            yield from imports(child, package, deferred=True)
        for child in node.orelse:
            yield from imports(child, package, deferred)
        return
    inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield from imports(child, package, deferred or inside)


def owner(target: str) -> str:
    """The row of the table that a dotted name in stretto belongs to."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else ROOT


def violations(path: str, text: str) -> list[str]:
    """What a file does against the table, one sentence each.

    Args:
        path: The file's path below `src/stretto`, with forward slashes.
        text: Its source.
    """
    parts = path.removesuffix(".py").split("/")
    row = ROOT if parts == ["__init__"] else parts[0]
    if row not in MAY_IMPORT:
        return [f"{path}: {row} is not in the table of layers"]
    found: list[str] = []
    for item in imports(ast.parse(text), [ROOT, *parts[:-1]]):
        where, top = f"{path}:{item.line}", item.target.split(".")[0]
        if top == ROOT:
            other = owner(item.target)
            named = item.target.split(".")
            if other == ROOT and len(named) > 2:
                found.append(f"{where}: {named[1]} is not in the table of layers")
            elif other != row and other not in MAY_IMPORT[row]:
                found.append(f"{where}: {row} may not import {other}")
        elif "torch" in item.target.split("."):
            if row in TORCH_INSIDE_FUNCTIONS:
                if not item.deferred:
                    found.append(f"{where}: {row} may import torch only inside a function")
            elif row not in TORCH_ANYWHERE:
                found.append(f"{where}: {row} may not import torch")
        elif row in STANDARD_LIBRARY_ONLY and top not in sys.stdlib_module_names:
            found.append(f"{where}: {row} may import only the standard library, not {top}")
    return found


FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES)
def test_file_obeys_the_table(path: str) -> None:
    """Each file imports only what its row allows."""
    assert violations(path, (SOURCE / path).read_text(encoding="utf-8")) == []


def test_pure_layers_are_all_read() -> None:
    """The walk over the source found the packages that exist from the first release on."""
    assert {path.split("/")[0] for path in FILES} >= LAYER_1 | {"errors.py", "ir", "runtime"}


def test_table_has_no_cycle() -> None:
    """Imports point down only: no two rows may reach each other, the package itself aside."""
    done: set[str] = {ROOT}
    rows = {row: allowed - {ROOT, row} for row, allowed in MAY_IMPORT.items()}
    while ready := {row for row, allowed in rows.items() if row not in done and allowed <= done}:
        done |= ready
    assert done >= rows.keys()


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        # against the table, in every way an import can be written
        ("ir/action.py", "from stretto.passes import lower", "ir may not import passes"),
        ("ir/action.py", "import stretto.passes.lower as low", "ir may not import passes"),
        ("ir/action.py", "from stretto import errors, verify", "ir may not import verify"),
        ("ir/action.py", "from .. import verify", "ir may not import verify"),
        ("ir/action.py", "from ..verify import verify", "ir may not import verify"),
        ("ir/__init__.py", "from ..verify import verify", "ir may not import verify"),
        ("runtime/wire/gloo.py", "from ...simulate import x", "runtime may not import simulate"),
        ("errors.py", "from .ir import Action", "errors may not import ir"),
        ("errors.py", "from stretto import ir", "errors may not import ir"),
        ("verify/a.py", "def f():\n    import stretto.simulate", "verify may not import simulate"),
        ("models/a.py", "class A:\n    from stretto.runtime import x", "models may not import ru"),
        ("view/text.py", "from stretto.simulate import simulate", "view may not import simulate"),
        ("view/text.py", "if TYPE_CHECKING:\n    from stretto.plan import P", "view may not impo"),
        ("simulate/a.py", "import_module('stretto.verify')", "simulate may not import verify"),
        ("simulate/a.py", "from stretto import __version__", "simulate may not import stretto"),
        ("simulate/a.py", "import stretto", "simulate may not import stretto"),
        ("train/loop.py", "from stretto.cli import main", "train may not import cli"),
        ("testing.py", "from stretto.compat import x", "testing may not import compat"),
        # torch
        ("ir/a.py", "import torch", "ir may not import torch"),
        ("passes/a.py", "def f():\n    import torch.nn as nn", "passes may not import torch"),
        ("plan/a.py", "from torch import Tensor", "plan may not import torch"),
        ("plan/a.py", "from safetensors.torch import load", "plan may not import torch"),
        ("view/a.py", "if TYPE_CHECKING:\n    import torch", "view may not import torch"),
        ("__init__.py", "def f():\n    import torch", "stretto may not import torch"),
        ("cli/show.py", "import torch", "cli may import torch only inside a function"),
        ("testing.py", "try:\n    import torch\nfinally: pass", "testing may import torch only"),
        ("testing.py", "if TYPE_CHECKING: pass\nelse:\n    import torch", "testing may import to"),
        # other libraries
        ("ir/a.py", "import numpy as np", "ir may import only the standard library, not numpy"),
        ("view/a.py", "def f():\n    from rich import print", "standard library, not rich"),
        # unknown packages
        ("extras/a.py", "x = 1", "extras is not in the table of layers"),
        ("helpers.py", "x = 1", "helpers is not in the table of layers"),
        ("cli/a.py", "from stretto.extras.a import x", "extras is not in the table of layers"),
    ],
)
def test_planted_violation_is_found(path: str, text: str, complaint: str) -> None:
    """Each planted violation gives exactly one sentence, the right one."""
    found = violations(path, text)
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("ir/text.py", "import re\nfrom collections import abc\nfrom . import action"),
        ("ir/text.py", "from stretto.errors import StrettoError\nfrom stretto.ir.action import A"),
        ("verify/a.py", "from stretto.passes import lower\nfrom ..ir import Schedule"),
        ("runtime/wire/gloo.py", "import torch\nfrom ..tree import x\nfrom ...ir import Action"),
        ("train/loop.py", "from stretto import __version__\nimport torch, numpy"),
        ("plan/a.py", "import numpy"),
        ("cli/train.py", "def train():\n    import torch\n    from stretto.train import run"),
        ("testing.py", "if TYPE_CHECKING:\n    import torch\ndef f():\n    from torch import nn"),
        (
            "__init__.py",
            "from stretto import ir\nif TYPE_CHECKING:\n    from stretto import runtime",
        ),
    ],
)
def test_allowed_import_passes(path: str, text: str) -> None:
    """What the table allows is not complained about."""
    assert violations(path, text) == []

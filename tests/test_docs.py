"""What the README, the docs and the examples show is what happens."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def consoles() -> list[tuple[str, str, str]]:
    """Page, command and printed output of every console block."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```console\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            for part in block.split("$ ")[1:]:
                command, _, output = part.partition("\n")
                found.append((page.name, command, output))
    return found


@pytest.mark.parametrize(("page", "command", "output"), consoles())
def test_shown_commands_print_what_is_shown(page: str, command: str, output: str) -> None:
    """Every console block of the docs, run."""
    words = shlex.split(command)
    assert words[0] == "stretto", page
    answer = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert answer.stdout == output, (page, answer.stderr)


def test_there_are_shown_commands() -> None:
    """The README shows at least one."""
    assert any(page == "README.md" for page, _, _ in consoles())


def test_commands_named_in_the_docs_can_be_run() -> None:
    """Indented `stretto simulate` and `stretto show` lines end well."""
    lines = {
        line.strip()
        for page in PAGES
        for line in page.read_text("utf-8").splitlines()
        if line.startswith("    stretto ") and "FILE" not in line and "CONFIG" not in line
    }
    assert len(lines) > 5
    from stretto.cli.main import run

    for line in sorted(lines):
        assert run(shlex.split(line)[1:]) == 0, line


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short_and_run(path: Path) -> None:
    """Under 100 lines, a question on top, and no error."""
    text = path.read_text("utf-8")
    assert len(text.splitlines()) < 100
    assert "?" in (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
    answer = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=100
    )
    assert answer.returncode == 0, answer.stderr
    assert "False" not in answer.stdout


def test_named_tests_exist() -> None:
    """Every `tests/...::test_name` in the docs is a test."""
    named = {
        match
        for page in PAGES
        for match in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text("utf-8"))
    }
    assert len(named) > 20
    for file, test in sorted(named):
        path = ROOT / file
        assert path.exists(), file
        assert not test or f"def {test}(" in path.read_text("utf-8"), f"{file}::{test}"


def test_links_between_pages_lead_somewhere() -> None:
    """Relative links name files that exist."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"

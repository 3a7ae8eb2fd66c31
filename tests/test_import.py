"""What an import may load: the pure layers and the command line start without torch and numpy."""

import subprocess
import sys

import pytest

LIGHT = (
    "stretto",
    "stretto.ir",
    "stretto.schedules",
    "stretto.passes",
    "stretto.verify",
    "stretto.simulate",
    "stretto.view",
    "stretto.cli",
)


@pytest.mark.parametrize("module", LIGHT)
def test_import_loads_neither_torch_nor_numpy(module: str) -> None:
    """A fresh interpreter that imports the module has loaded none of the heavy libraries."""
    program = f"import sys, {module}; print(*sorted({{'torch', 'numpy'}} & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()
    assert loaded == []


def test_heavy_names_load_on_first_use() -> None:
    """`stretto.Engine` and `stretto.split` are there, and torch loads when they are asked for."""
    program = (
        "import sys, stretto\n"
        "assert 'torch' not in sys.modules\n"
        "print(stretto.Engine.__name__, stretto.split.__name__, 'torch' in sys.modules)\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()
    assert printed == ["Engine", "split", "True"]


def test_unknown_name_is_an_attribute_error() -> None:
    """The lazy lookup does not hide a misspelt name."""
    import stretto

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = stretto.no_such_name

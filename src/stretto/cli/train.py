"""`stretto train`: train a small GPT on local ranks, or join those that torchrun started."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from stretto.errors import InputError
from stretto.ir import Timeline


def gather_settings(words: Sequence[str]) -> list[str]:
    """Turn `--section.key value` (or `=value`) into `--set section.key=value`.

    Raises:
        InputError: a key has no value.
    """
    gathered: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name = word.partition("=")[0]
        if not name.startswith("--") or "." not in name:
            gathered.append(word)
        elif "=" in word:
            gathered.append(f"--set={word[2:]}")
        elif rest:
            gathered.append(f"--set={word[2:]}={rest.pop(0)}")
        else:
            raise InputError(f"{word} needs a value")
    return gathered


def train(
    config: str,
    *,
    ranks: int | None = None,
    settings: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
) -> None:
    """Train a small GPT as a TOML file says. Any setting: --section.key value.

    Parameters
    ----------
    config
        The file; examples/shakespeare.toml is one.
    ranks
        Number of ranks, instead of the file's.
    settings
        section.key=value, as --section.key value also says; wins over the file.
    """
    pairs = [setting.partition("=") for setting in settings]
    overrides = {name: value for name, _, value in pairs}
    if ranks is not None:
        overrides["schedule.num_ranks"] = str(ranks)
    from stretto.train.config_file import load_config

    loaded = load_config(config, overrides)
    from stretto.train.run import train as run
    from stretto.view import draw_overlay

    def draw(planned: Timeline, measured: Timeline) -> str:
        return draw_overlay(planned, measured, colour=sys.stdout.isatty())

    run(loaded, draw=draw)

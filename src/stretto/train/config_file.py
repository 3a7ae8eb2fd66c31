"""Reading settings from a TOML file and from the command line, and writing them back."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

from stretto.errors import InputError
from stretto.train.config import SECTIONS, TrainConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    # Installed only where the standard library has no reader.
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

_KINDS: dict[Any, tuple[type, str]] = {
    int: (int, "a whole number"),
    float: (float, "a number"),
    str: (str, "a text"),
    int | None: (int, "a whole number"),
    str | tuple[int, ...]: (str, "a text or a list of whole numbers"),
}
"""Type of a key → type of its value in a file, and what it is called in errors."""


def load_config(path: str | Path, overrides: Mapping[str, str] | None = None) -> TrainConfig:
    """Read a run's settings from a TOML file; what it leaves out has its default.

    Args:
        path: The file.
        overrides: `"section.key"` → value as text, as given on the command line; they win.

    Raises:
        InputError: no such file, no TOML, an unknown section or key, or a value that does not do.
    """
    try:
        body = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}") from None
    return make_config(body, overrides or {})


def make_config(body: Mapping[str, Any], overrides: Mapping[str, str]) -> TrainConfig:
    """Settings from sections of values, as TOML gives them, and from texts that win over them."""
    types = {section: _types_of(section) for section in SECTIONS}
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for section, settings in body.items():
        _known(section, SECTIONS, "section")
        if not isinstance(settings, Mapping):
            raise InputError(f"{section} is {settings!r}; it must be a section: [{section}]")
        for key, value in settings.items():
            name = f"{section}.{key}"
            _known(name, [f"{section}.{each}" for each in types[section]], "key")
            values[section][key] = _checked(name, value, types[section][key])
    all_keys = [f"{section}.{key}" for section in SECTIONS for key in types[section]]
    for name, text in overrides.items():
        _known(name, all_keys, "key")
        section, key = name.split(".")
        values[section][key] = _parsed(name, text, types[section][key])
    section_types = get_type_hints(TrainConfig)
    return TrainConfig(**{each: section_types[each](**values[each]) for each in SECTIONS})


def config_to_toml(config: TrainConfig) -> str:
    """The settings as TOML that `load_config` reads; what is None is left out."""
    lines: list[str] = []
    for section in SECTIONS:
        settings = getattr(config, section)
        lines += ["", f"[{section}]"]
        for each in fields(settings):
            value = getattr(settings, each.name)
            if value is not None:
                plain = list(value) if isinstance(value, tuple) else value
                lines.append(f"{each.name} = {json.dumps(plain, ensure_ascii=False)}")
    return "\n".join(lines[1:]) + "\n"


def _types_of(section: str) -> dict[str, Any]:
    return get_type_hints(get_type_hints(TrainConfig)[section])


def _known(name: str, known: list[str] | tuple[str, ...], what: str) -> None:
    if name in known:
        return
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    raise InputError(f"unknown {what} {name} in the configuration; {hint}")


def _checked(name: str, value: Any, kind: Any) -> Any:
    """A value of a TOML file, if it is of the kind that the key has."""
    if type(value) is _KINDS[kind][0]:
        return value
    if kind is float and type(value) is int:
        return float(value)
    is_list = isinstance(value, list) and all(type(each) is int for each in value)
    if is_list and kind == str | tuple[int, ...]:
        return tuple(value)
    raise InputError(f"{name} is {value!r}; it must be {_KINDS[kind][1]}")


def _parsed(name: str, text: str, kind: Any) -> Any:
    """A value of the command line: `3`, `0.5`, `some text`, `1,2,2`."""
    if kind is str:
        return text
    try:
        if kind == str | tuple[int, ...]:
            pieces = text.strip("[]").split(",")
            is_list = all(each.strip().lstrip("-").isdigit() for each in pieces)
            return tuple(map(int, pieces)) if is_list else text
        return float(text) if kind is float else int(text)
    except ValueError:
        raise InputError(f"{name} is {text!r}; it must be {_KINDS[kind][1]}") from None

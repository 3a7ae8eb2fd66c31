"""Options that several verbs share: which schedule, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stretto.errors import InputError
from stretto.ir import Costs, Schedule, parse_number, uniform_costs
from stretto.ir.files import costs_from_json, schedule_from_json
from stretto.ir.text import from_csv

SUFFIXES = (".csv", ".json")


def is_file(name: str) -> bool:
    """Whether a word names a schedule file and not a generator."""
    return name.endswith(SUFFIXES) or "/" in name


def read_schedule(path: str) -> Schedule:
    """The schedule in a .csv or .json file.

    Raises:
        InputError: there is no such file, or it holds no schedule.
    """
    text = read_text(path)
    return schedule_from_json(text) if path.endswith(".json") else from_csv(text)


def read_text(path: str) -> str:
    """A file's text.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InputError(f"cannot read {path}: {reason}") from error


def make_schedule(
    name: str, ranks: int | None, microbatches: int | None, stages_per_rank: int | None
) -> Schedule:
    """The schedule of a generator's name, or of a file.

    Raises:
        InputError: a size is missing or does not suit, or sizes were given besides a file.
    """
    sizes = {"ranks": ranks, "microbatches": microbatches, "stages-per-rank": stages_per_rank}
    if is_file(name):
        given = [f"--{option}" for option, value in sizes.items() if value is not None]
        if given:
            raise InputError(f"{name} is a file and has its sizes; leave out {' '.join(given)}")
        return read_schedule(name)
    from stretto.schedules import build

    missing = [f"--{option}" for option in ("ranks", "microbatches") if sizes[option] is None]
    options = {} if stages_per_rank is None else {"stages_per_rank": stages_per_rank}
    if missing:
        # an unknown name is the first thing to say
        build(name, num_ranks=2, num_microbatches=2, **(options or _smallest(name)))
        raise InputError(f"{name} needs {' and '.join(missing)}, whole numbers of at least 1")
    assert ranks is not None and microbatches is not None
    return build(name, num_ranks=ranks, num_microbatches=microbatches, **options)


def _smallest(name: str) -> dict[str, int]:
    import inspect

    from stretto.schedules import GENERATORS

    generator = GENERATORS.get(name)
    takes = () if generator is None else inspect.signature(generator).parameters
    return {"stages_per_rank": 2} if "stages_per_rank" in takes else {}


def make_costs(
    num_stages: int, unit_costs: str | None, costs: str | None, latency: str | None
) -> Costs:
    """Costs from `F,I,W`, from a file, or unit costs; with a latency for every hop.

    Raises:
        InputError: both were given, or one cannot be read.
    """
    if unit_costs is not None and costs is not None:
        raise InputError("--unit-costs and --costs exclude each other; give one")
    if costs is not None:
        made = costs_from_json(read_text(costs))
    else:
        words = "1,1,1" if unit_costs is None else unit_costs
        numbers = [parse_number(word) for word in words.split(",")]
        if len(numbers) != 3:
            raise InputError(f"--unit-costs is {words!r}; it must be three numbers: F,I,W")
        made = uniform_costs(
            num_stages, forward_s=numbers[0], input_s=numbers[1], weight_s=numbers[2]
        )
    return made if latency is None else replace(made, latency_s=parse_number(latency))

"""Options that several verbs share: which schedule, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from cyclopts import Parameter

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


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which schedule, and what it costs: the options of every verb that takes a schedule.

    Parameters
    ----------
    ranks
        Number of ranks.
    microbatches
        Number of microbatches.
    stages_per_rank
        Stages on each rank, for generators that take it.
    unit_costs
        Costs of every stage as F,I,W; 1,1,1 if not given, so B is 2.
    costs
        A file of costs.
    latency
        Time of every hop between ranks.
    """

    ranks: int | None = None
    microbatches: int | None = None
    stages_per_rank: int | None = None
    unit_costs: str | None = None
    costs: str | None = None
    latency: str | None = None

    def schedule(self, name: str) -> Schedule:
        """The schedule of a generator's name, or of a file.

        Raises:
            InputError: a size is missing or does not suit, or sizes were given besides a file.
        """
        sizes = {
            "--ranks": self.ranks,
            "--microbatches": self.microbatches,
            "--stages-per-rank": self.stages_per_rank,
        }
        given = [option for option, value in sizes.items() if value is not None]
        if is_file(name):
            if given:
                raise InputError(f"{name} is a file and has its sizes; leave out {' '.join(given)}")
            return read_schedule(name)
        from stretto.schedules import build

        options = {}
        if self.stages_per_rank is not None:
            options["stages_per_rank"] = self.stages_per_rank
        if self.ranks is None or self.microbatches is None:
            # an unknown name is the first thing to say
            build(name, num_ranks=2, num_microbatches=2, **(options or _smallest(name)))
            missing = [one for one in ("--ranks", "--microbatches") if one not in given]
            raise InputError(f"{name} needs {' and '.join(missing)}, whole numbers of at least 1")
        return build(name, num_ranks=self.ranks, num_microbatches=self.microbatches, **options)

    def costs_of(self, schedule: Schedule) -> Costs:
        """Costs from `F,I,W`, from a file, or unit costs; with a latency for every hop.

        Raises:
            InputError: both were given, or one cannot be read.
        """
        if self.unit_costs is not None and self.costs is not None:
            raise InputError("--unit-costs and --costs exclude each other; give one")
        if self.costs is not None:
            made = costs_from_json(read_text(self.costs))
        else:
            words = "1,1,1" if self.unit_costs is None else self.unit_costs
            numbers = [parse_number(word) for word in words.split(",")]
            if len(numbers) != 3:
                raise InputError(f"--unit-costs is {words!r}; it must be three numbers: F,I,W")
            f, i, w = numbers
            made = uniform_costs(schedule.num_stages, forward_s=f, input_s=i, weight_s=w)
        return made if self.latency is None else replace(made, latency_s=parse_number(self.latency))


def _smallest(name: str) -> dict[str, int]:
    import inspect

    from stretto.schedules import GENERATORS

    generator = GENERATORS.get(name)
    takes = () if generator is None else inspect.signature(generator).parameters
    return {"stages_per_rank": 2} if "stages_per_rank" in takes else {}

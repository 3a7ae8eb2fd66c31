"""Schedules, costs and timelines as JSON texts, each with a format name and a version.

Readers refuse other formats, unknown versions and unknown keys by name. Exact fractions are
written as texts ("3/2"), other numbers as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Any, cast

from stretto.errors import FormatError, InputError
from stretto.ir.action import Action, StageAction, parse_action
from stretto.ir.costs import PER_STAGE_FIELDS, Costs, Link, Number, parse_number
from stretto.ir.placement import Placement
from stretto.ir.schedule import Schedule, Skip
from stretto.ir.timeline import MemoryPoint, Span, Timeline

VERSION = 1


def schedule_to_json(schedule: Schedule) -> str:
    """The schedule as JSON, with its placement."""
    body: dict[str, Any] = {
        "num_ranks": schedule.num_ranks,
        "num_microbatches": schedule.num_microbatches,
        "rank_of_stage": [list(ranks) for ranks in schedule.placement.replicas],
        "replica_of_microbatch": list(schedule.replica_of_microbatch),
        "skips": [[skip.source, *skip.targets] for skip in schedule.skips],
        "ranks": [" ".join(str(item) for item in order) for order in schedule.ranks],
    }
    return _write("stretto-schedule", body)


def schedule_from_json(text: str) -> Schedule:
    """Read a schedule written by `schedule_to_json`.

    Raises:
        FormatError: another format, a version this release does not know, a missing or unknown
            key, or a value of the wrong type.
        InputError: the values do not make a schedule.
    """
    body = _read(text, "stretto-schedule")
    keys = ("num_ranks", "num_microbatches", "rank_of_stage", "replica_of_microbatch", "ranks")
    _check_keys(body, "stretto-schedule", required=keys, optional={"skips"})
    with _TypesChecked("stretto-schedule"):
        placement = Placement(
            num_ranks=_int(body["num_ranks"]),
            replicas=tuple(tuple(map(_int, ranks)) for ranks in body["rank_of_stage"]),
        )
        return Schedule(
            placement=placement,
            num_microbatches=_int(body["num_microbatches"]),
            ranks=tuple(
                tuple(parse_action(word) for word in order.split()) for order in body["ranks"]
            ),
            replica_of_microbatch=tuple(map(_int, body["replica_of_microbatch"])),
            skips=tuple(
                Skip(source=_int(source), targets=tuple(map(_int, targets)))
                for source, *targets in body.get("skips", [])
            ),
        )


def costs_to_json(costs: Costs) -> str:
    """The costs as JSON; empty fields are left out."""
    body: dict[str, Any] = {
        name: [_plain(value) for value in getattr(costs, name)]
        for name in PER_STAGE_FIELDS
        if getattr(costs, name)
    }
    body["latency_s"] = _plain(costs.latency_s)
    body["bandwidth_bytes_per_s"] = _plain(costs.bandwidth_bytes_per_s)
    body["links"] = [
        {one.name: _plain(getattr(link, one.name)) for one in fields(Link)} for link in costs.links
    ]
    return _write("stretto-costs", body)


def costs_from_json(text: str) -> Costs:
    """Read costs written by `costs_to_json`, or by hand.

    Only `forward_s`, `input_s` and `weight_s` are needed.

    Raises:
        FormatError: another format, version, a missing or unknown key, a value of a wrong type.
        InputError: the values do not make costs.
    """
    body = _read(text, "stretto-costs")
    known = {one.name for one in fields(Costs) if one.init}
    needed = ("forward_s", "input_s", "weight_s")
    _check_keys(body, "stretto-costs", required=needed, optional=known - set(needed))
    with _TypesChecked("stretto-costs"):
        values: dict[str, Any] = {
            name: tuple(_number(value) for value in body[name])
            for name in PER_STAGE_FIELDS
            if name in body
        }
        return Costs(
            **values,
            latency_s=_number(body.get("latency_s", 0)),
            bandwidth_bytes_per_s=_optional_number(body.get("bandwidth_bytes_per_s")),
            links=tuple(_link(one) for one in body.get("links", [])),
        )


def timeline_to_json(timeline: Timeline) -> str:
    """The timeline as JSON: spans as [rank, action, start_s, end_s]."""
    body: dict[str, Any] = {
        "num_ranks": timeline.num_ranks,
        "spans": [
            [span.rank, str(span.action), _plain(span.start_s), _plain(span.end_s)]
            for span in timeline.spans
        ],
        "memory": [
            [point.rank, _plain(point.time_s), _plain(point.amount)] for point in timeline.memory
        ],
    }
    return _write("stretto-timeline", body)


def timeline_from_json(text: str) -> Timeline:
    """Read a timeline written by `timeline_to_json`.

    Raises:
        FormatError: another format, version, a missing or unknown key, a value of a wrong type.
    """
    body = _read(text, "stretto-timeline")
    _check_keys(body, "stretto-timeline", required=("num_ranks", "spans", "memory"))
    with _TypesChecked("stretto-timeline"):
        return Timeline(
            num_ranks=_int(body["num_ranks"]),
            spans=tuple(
                Span(_int(rank), _single(word), _number(start), _number(end))
                for rank, word, start, end in body["spans"]
            ),
            memory=tuple(
                MemoryPoint(_int(rank), _number(time), _number(amount))
                for rank, time, amount in body["memory"]
            ),
        )


class _TypesChecked:
    """Turns a value of the wrong type inside a file into a FormatError."""

    def __init__(self, format_name: str) -> None:
        self.format_name = format_name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        wrong_type = isinstance(error, TypeError | AttributeError | KeyError)
        if wrong_type or (isinstance(error, ValueError) and not isinstance(error, InputError)):
            raise FormatError(f"{self.format_name}: a value has the wrong type: {error}") from error


def _write(format_name: str, body: Mapping[str, Any]) -> str:
    return json.dumps({"format": format_name, "version": VERSION, **body}, indent=1) + "\n"


def _read(text: str, format_name: str) -> dict[str, Any]:
    try:
        read: Any = json.loads(text)
    except ValueError as error:
        raise FormatError(f"{format_name}: this is not JSON: {error}") from error
    body: dict[str, Any] = cast("dict[str, Any]", read) if isinstance(read, dict) else {}
    if body.get("format") != format_name:
        found = body.get("format", "nothing")
        raise FormatError(f"expected a {format_name} file, found format {found!r}")
    version = body.get("version")
    if version != VERSION:
        raise FormatError(
            f"{format_name}: version {version!r} is not known to this release, which reads "
            f"version {VERSION}; use the release that wrote the file, or write it again"
        )
    return {key: value for key, value in body.items() if key not in ("format", "version")}


def _check_keys(
    body: Mapping[str, Any],
    format_name: str,
    *,
    required: tuple[str, ...],
    optional: set[str] | frozenset[str] = frozenset(),
) -> None:
    missing = [key for key in required if key not in body]
    unknown = sorted(set(body) - set(required) - set(optional))
    if missing:
        raise FormatError(f"{format_name}: keys {missing} are missing")
    if unknown:
        raise FormatError(f"{format_name}: unknown keys {unknown}")


def _plain(value: Number | None) -> int | float | str | None:
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else str(value)
    return value


def _number(value: object) -> Number:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{value!r} is not a number")
    return parse_number(value) if isinstance(value, str) else value


def _optional_number(value: object) -> Number | None:
    return None if value is None else _number(value)


def _int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _link(body: Mapping[str, Any]) -> Link:
    known = tuple(one.name for one in fields(Link))
    _check_keys(body, "stretto-costs, links", required=known[:2], optional=set(known[2:]))
    return Link(
        source=_int(body["source"]),
        target=_int(body["target"]),
        latency_s=_number(body.get("latency_s", 0)),
        bandwidth_bytes_per_s=_optional_number(body.get("bandwidth_bytes_per_s")),
    )


def _single(word: str) -> Action | StageAction:
    action = parse_action(word)
    if not isinstance(action, Action | StageAction):
        raise TypeError(f"{word} is a pair; a span is of one half")
    return action

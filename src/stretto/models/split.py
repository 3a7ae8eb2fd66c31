"""Splitting a model: which layers each stage gets, and building those of one rank.

How many layers a stage gets is `partition.py`'s matter, which rank owns a stage the placement's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import nn

from stretto.errors import InputError
from stretto.ir import Placement, Schedule
from stretto.ir.seeding import mixed_seed
from stretto.models.partition import By, layers_per_stage
from stretto.models.seeding import seeded
from stretto.models.specs import Layer, LayerSpec, Model, SharedSpec, class_name, named_layers
from stretto.models.stage import Stage


@dataclass(frozen=True, slots=True)
class Partition:
    """Layers per stage.

    Args:
        counts: For each stage its number of layers; stages are consecutive slices.
    """

    counts: tuple[int, ...]

    def layers_of(self, stage: int) -> range:
        """The layers a stage holds."""
        if not 0 <= stage < len(self.counts):
            raise InputError(f"stage {stage} is not in 0..{len(self.counts) - 1}")
        first = sum(self.counts[:stage])
        return range(first, first + self.counts[stage])

    def which_stage(self, layer: int) -> int:
        """The stage that holds a layer."""
        for stage, end in enumerate(accumulate(self.counts)):
            if 0 <= layer < end:
                return stage
        raise InputError(f"layer {layer} is not in 0..{sum(self.counts) - 1}")


def partition(layers: Model, num_stages: int, by: By = "even") -> Partition:
    """Decide which layers each stage gets, without building any.

    Args:
        layers: A list of layers, an `nn.Sequential` or an `nn.ModuleList`.
        num_stages: Number of stages, over all ranks.
        by: `"even"`, `"uniform_late"`, `"class:PATTERN"`, layers per stage, or a rule such as
            `by_starts([0, 3])`, `by_class("Block")`, `by_weights([1, 1, 4])`.

    Raises:
        InputError: the split does not fit, or one layer would lie in two stages.
    """
    named = named_layers(layers)
    names = [class_name(layer) for _, layer in named]
    parts = Partition(layers_per_stage(by, names, num_stages))
    _refuse_sharing_across_stages(named, parts)
    return parts


def split(
    layers: Model, schedule: Schedule | Placement, *, rank: int, by: By = "even", seed: int = 0
) -> dict[int, Stage]:
    """Build one rank's stages, and nothing of the others'.

    A layer's initial weights depend on the seed and on its index in the whole model only, not on
    the split. Modules that are already built are taken as they are.

    Args:
        layers: A list of layers, an `nn.Sequential` or an `nn.ModuleList`.
        schedule: The schedule the stages are for (or its placement).
        rank: The rank, from 0.
        by: The way of splitting; see `partition`.
        seed: Seed of the initial weights.

    Returns:
        Stage number → stage, ascending, for the stages of this rank.

    Raises:
        InputError: the rank is not in the placement, or the split does not fit.
    """
    placement = schedule.placement if isinstance(schedule, Schedule) else schedule
    if not 0 <= rank < placement.num_ranks:
        raise InputError(f"rank {rank} is not in 0..{placement.num_ranks - 1}")
    parts = partition(layers, placement.num_stages, by)
    named = named_layers(layers)
    return {
        stage: _build_stage(named, parts.layers_of(stage), stage, seed)
        for stage in placement.stages_of(rank)
    }


def build(layers: Model, seed: int = 0) -> Stage:
    """Build the whole model as one stage, with the weights that `split` gives its parts."""
    named = named_layers(layers)
    return _build_stage(named, range(len(named)), 0, seed)


def describe_split(layers: Model, schedule: Schedule | Placement, by: By = "even") -> str:
    """A table of the split: for each stage its rank, its layers and their classes.

    Example:
        >>> from stretto.ir.placement import v
        >>> print(describe_split([LayerSpec(nn.Linear, 4, 4)] * 5, v(num_ranks=2)))
        stage  rank  layers  what
            0     0  0       Linear
            1     1  1       Linear
            2     1  2-3     2 x Linear
            3     0  4       Linear
    """
    placement = schedule.placement if isinstance(schedule, Schedule) else schedule
    parts = partition(layers, placement.num_stages, by)
    names = [class_name(layer) for _, layer in named_layers(layers)]
    rows = ["stage  rank  layers  what"]
    for stage in range(placement.num_stages):
        owners = ",".join(str(ranks[stage]) for ranks in placement.replicas)
        held = parts.layers_of(stage)
        span = f"{held[0]}-{held[-1]}" if len(held) > 1 else "".join(map(str, held)) or "none"
        rows.append(f"{stage:5}  {owners:>4}  {span:6}  {_runs(names[i] for i in held)}".rstrip())
    return "\n".join(rows)


def _build_stage(named: Sequence[tuple[str, Layer]], held: range, stage: int, seed: int) -> Stage:
    shared: dict[str, Any] = {}
    layers = {named[index][0]: _build_layer(named[index][1], index, seed, shared) for index in held}
    return Stage(layers, index=stage, first_layer=held.start)


def _build_layer(layer: Layer, index: int, seed: int, shared: dict[str, Any]) -> Any:
    """Build a layer under its own seed; a shared one at its first use."""
    if isinstance(layer, SharedSpec):
        if layer.key not in shared:
            shared[layer.key] = _build_layer(layer.spec, index, seed, shared)
        return shared[layer.key]
    if isinstance(layer, LayerSpec):
        with seeded(mixed_seed("layer", seed, index)):
            return layer.build()
    return layer


def _refuse_sharing_across_stages(named: Sequence[tuple[str, Layer]], parts: Partition) -> None:
    """One weight in two stages would need its gradients added across them."""
    first_use: dict[object, tuple[int, str, object]] = {}
    for index, (_, layer) in enumerate(named):
        for identity, what, spec in _what_may_be_shared(layer):
            earlier, _, earlier_spec = first_use.setdefault(identity, (index, what, spec))
            if earlier_spec is not spec:
                raise InputError(
                    f"layers {earlier} and {index} share {what} but describe it differently; "
                    "give both the same LayerSpec object"
                )
            stages = parts.which_stage(earlier), parts.which_stage(index)
            if stages[0] != stages[1]:
                raise InputError(
                    f"layers {earlier} and {index} share {what} but lie in stages {stages[0]} "
                    f"and {stages[1]}; sharing across stages is not available yet: keep them in "
                    "one stage"
                )


def _what_may_be_shared(layer: Layer) -> Iterable[tuple[object, str, object]]:
    """Identity and name of each thing in a layer that another layer may hold as well."""
    if isinstance(layer, SharedSpec):
        yield ("key", layer.key), f"the key {layer.key!r}", layer.spec
    elif isinstance(layer, nn.Module):
        for name, parameter in layer.named_parameters():
            yield ("parameter", id(parameter)), f"the parameter {name!r}", None


def _runs(names: Iterable[str]) -> str:
    """Names with repeats counted: `Embedding, 2 x Block`."""
    runs: list[list[Any]] = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1][1] += 1
        else:
            runs.append([name, 1])
    return ", ".join(name if times == 1 else f"{times} x {name}" for name, times in runs) or "-"

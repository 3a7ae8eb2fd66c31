"""One module that holds the whole model and is told which of its layers to run.

Some models keep their layers in one module whose forward takes care of the rest (embeddings,
rotary tables, the head). Such a module runs a stage if its forward takes `layer_range`: the
layers of that stage. Layers outside a rank's ranges need not be on its device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from stretto.errors import InputError
from stretto.ir import Placement, Schedule
from stretto.ir.calling import gather, parameters_of
from stretto.models.partition import By, layers_per_stage
from stretto.models.split import Partition

LAYER_RANGE = "layer_range"
"""The keyword a whole module gets: a `range` of layer indices."""

BEFORE_LAYER = "before_layer"
"""A keyword it may take: a function to call with each layer's index in front of it, or None.

The engine then seeds random numbers by layer, so that dropout does not depend on the split.
"""


class LayerRange(nn.Module):
    """A whole module, told to run some of its layers.

    All stages of a rank share the module. Its parameters keep their names and their order, so
    norms and checkpoints see the whole model.

    Args:
        module: The whole module.
        layers: The layers this stage runs.
        stage: Index of the stage.
    """

    parameter_stage = 0
    """All stages count their parameters in the order of the one module."""

    def __init__(self, module: nn.Module, layers: range, *, stage: int) -> None:
        super().__init__()
        self.module = module
        self.layers = layers
        self.stage = stage
        self._accepts = parameters_of(module)
        if BEFORE_LAYER in (self._accepts.keywords or ()):
            self.before_layer: Callable[[int], None] | None = None

    def forward(
        self, *args: Any, stage_extras: Mapping[str, Any] | None = None, **keywords: Any
    ) -> Any:
        """Call the module with the stage's layer range, and with those extras that it names."""
        told: dict[str, Any] = {LAYER_RANGE: self.layers}
        if BEFORE_LAYER in self.__dict__:
            told[BEFORE_LAYER] = self.before_layer
        if stage_extras is not None:
            args, keywords = self._accepts.arguments(gather(args, keywords), stage_extras)
        return self.module(*args, **{**keywords, **told})


def whole_model(
    module: nn.Module,
    schedule: Schedule | Placement,
    *,
    rank: int,
    num_layers: int,
    by: By = "even",
) -> dict[int, LayerRange]:
    """A rank's stages of a model that is one module.

    Args:
        module: Its forward takes the keyword `layer_range`, and what the stage before returned;
            it may take `before_layer`, so that dropout does not depend on the split.
        schedule: The schedule the stages are for (or its placement).
        rank: The rank, from 0.
        num_layers: Number of layers the ranges count.
        by: The way of splitting: `"even"`, `"uniform_late"` or layers per stage.

    Returns:
        Stage number → stage, ascending, for the stages of this rank.

    Raises:
        InputError: the module takes no `layer_range`, or the split does not fit.
    """
    accepted = parameters_of(module).keywords
    if accepted is not None and LAYER_RANGE not in accepted:
        raise InputError(
            f"{type(module).__name__}.forward takes no {LAYER_RANGE!r}; a whole model needs it to "
            "be told which layers to run"
        )
    placement = schedule.placement if isinstance(schedule, Schedule) else schedule
    names: Sequence[str] = [f"layer {index}" for index in range(num_layers)]
    parts = Partition(layers_per_stage(by, names, placement.num_stages))
    return {
        stage: LayerRange(module, parts.layers_of(stage), stage=stage)
        for stage in placement.stages_of(rank)
    }

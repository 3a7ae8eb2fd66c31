"""A stage: consecutive layers of a model, as one module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from stretto.errors import InputError
from stretto.ir.calling import WithSkips, gather, parameters_of
from stretto.models.calling import call_layer


class Stage(nn.Module):
    """Layers called one after the other.

    Layers keep their name in the whole model (their index, from 0), so parameters are called as
    in the unsplit `nn.Sequential`: `"3.weight"`. A stage without layers returns what it is given.

    Args:
        layers: Name of each layer in the whole model → module or function, in order.
        index: The stage's number, from 0.
        first_layer: Index of its first layer in the whole model, from 0.

    Raises:
        InputError: a layer cannot be called.
    """

    def __init__(
        self, layers: Mapping[str, Callable[..., Any]], *, index: int = 0, first_layer: int = 0
    ) -> None:
        super().__init__()
        self.index = index
        self.first_layer = first_layer
        self.before_layer: Callable[[int], None] | None = None
        """Called with each layer's index in the whole model, in front of it; set by an engine."""
        self.layer_names = tuple(layers)
        self._functions: dict[str, Callable[..., Any]] = {}
        for name, layer in layers.items():
            if isinstance(layer, nn.Module):
                self.add_module(name, layer)
            elif callable(layer):
                self._functions[name] = layer
            else:
                raise InputError(f"layer {name} was built as {layer!r}, which cannot be called")
        self._accepts = {name: parameters_of(layer) for name, layer in layers.items()}
        self.skip_outputs, self.skip_inputs = _declared_skips(layers.values())

    def forward(
        self, *args: Any, stage_extras: Mapping[str, Any] | None = None, **keywords: Any
    ) -> Any:
        """Run the layers on what the previous stage returned.

        Args:
            args: Positional arguments of the first layer.
            stage_extras: Values every layer may read, by name; each layer gets those it names.
            keywords: Keyword arguments of the first layer. Without `stage_extras` they are taken
                for extras: every layer gets those it names.
        """
        value = gather(args, keywords)
        if stage_extras is None:
            stage_extras = keywords
            value = gather(args, {}) if self.layer_names else value
        made: dict[str, Any] = {}
        for offset, name in enumerate(self.layer_names):
            if self.before_layer is not None:
                self.before_layer(self.first_layer + offset)
            known = {**stage_extras, **made} if made else stage_extras
            value = call_layer(self.layer(name), self._accepts[name], value, known)
            if isinstance(value, WithSkips):
                made |= value.skips
                value = value.output
        return WithSkips(value, made) if made else value

    def layer(self, name: str) -> Callable[..., Any]:
        """The layer of this name: a module or a function."""
        found = self._modules.get(name, self._functions.get(name))
        if found is None:
            listing = ", ".join(self.layer_names) or "none"
            raise InputError(f"stage {self.index} has no layer {name!r}; its layers: {listing}")
        return found

    def extra_repr(self) -> str:
        """Number and first layer, for printing."""
        return f"index={self.index}, first_layer={self.first_layer}"


def _declared_skips(layers: Iterable[Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names layers make for later ones, and those they use from earlier stages."""
    made: dict[str, None] = {}
    used: dict[str, None] = {}
    for layer in layers:
        used.update(dict.fromkeys(n for n in getattr(layer, "skip_inputs", ()) if n not in made))
        made.update(dict.fromkeys(getattr(layer, "skip_outputs", ())))
    return tuple(made), tuple(used)

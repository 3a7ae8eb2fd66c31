"""Layer descriptions: what a layer will be, before it takes any memory.

A model is a list of layers. A layer may be a module, a `LayerSpec`, a `SharedSpec` or a plain
function; this module says what each is called and how it is built, not where it goes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from stretto.errors import InputError


class LayerSpec:
    """A layer that is built later, and only on the rank that owns it.

    Args:
        factory: A module class, or a function that returns a module.
        args: Positional arguments for it.
        keywords: Keyword arguments for it.

    Example:
        >>> LayerSpec(nn.Linear, 4, 8, bias=False).build()
        Linear(in_features=4, out_features=8, bias=False)
    """

    __slots__ = ("args", "factory", "keywords")

    def __init__(self, factory: Callable[..., Any], *args: Any, **keywords: Any) -> None:
        if not callable(factory):
            raise InputError(f"LayerSpec needs a class or function, not {factory!r}")
        self.factory = factory
        self.args = args
        self.keywords = keywords

    def build(self) -> Any:
        """Make the layer; two calls make two layers."""
        return self.factory(*self.args, **self.keywords)

    def __repr__(self) -> str:
        given = [repr(each) for each in self.args]
        given += [f"{name}={each!r}" for name, each in self.keywords.items()]
        return f"LayerSpec({', '.join([name_of_callable(self.factory), *given])})"


class SharedSpec:
    """One use of a layer that several places of the list share.

    All uses of a key must lie in one stage, and there they are one module.

    Args:
        key: What the uses have in common.
        spec: How the layer is built; the same object for all uses of the key.
    """

    __slots__ = ("key", "spec")

    def __init__(self, key: str, spec: LayerSpec) -> None:
        if not isinstance(spec, LayerSpec):
            raise InputError(f"SharedSpec {key!r} needs a LayerSpec, not {spec!r}")
        self.key = key
        self.spec = spec

    def __repr__(self) -> str:
        return f"SharedSpec({self.key!r}, {self.spec!r})"


Layer = nn.Module | LayerSpec | SharedSpec | Callable[..., Any]
Model = nn.Sequential | nn.ModuleList | Sequence[Layer]


_PLAIN_FORWARD = nn.Sequential.forward


def named_layers(model: Model) -> list[tuple[str, Layer]]:
    """The layers of a model in order, each with its name: its index, or its name in the model.

    Raises:
        InputError: the model is not a list of layers, or something in it is not a layer.
    """
    if isinstance(model, nn.Sequential | nn.ModuleList):
        if getattr(type(model), "forward", None) not in (_PLAIN_FORWARD, nn.Module.forward, None):
            raise InputError(
                f"{type(model).__name__} has a forward of its own, which a split into its layers "
                "would not run; give list(model) if calling one layer after the other is all it "
                "does, or the whole module with its layer ranges"
            )
        return [(name, layer) for name, layer in model._modules.items() if layer is not None]
    if isinstance(model, nn.Module) or not isinstance(model, Sequence):
        raise InputError(
            f"cannot split a {type(model).__name__}: give a list of layers, an nn.Sequential "
            "or an nn.ModuleList"
        )
    for index, layer in enumerate(model):
        if inspect.isclass(layer):
            raise InputError(
                f"layer {index} is the class {layer.__name__}; "
                f"give a module or LayerSpec({layer.__name__}, ...)"
            )
        if not isinstance(layer, LayerSpec | SharedSpec) and not callable(layer):
            raise InputError(
                f"layer {index} is {layer!r}; a layer is a module, a LayerSpec, a SharedSpec "
                "or a function"
            )
    return [(str(index), layer) for index, layer in enumerate(model)]


def class_name(layer: Layer) -> str:
    """The name of a layer's class, or of the function it is (or is made by)."""
    if isinstance(layer, SharedSpec):
        return class_name(layer.spec)
    if isinstance(layer, LayerSpec):
        return name_of_callable(layer.factory)
    return type(layer).__name__ if isinstance(layer, nn.Module) else name_of_callable(layer)


def name_of_callable(function: Callable[..., Any]) -> str:
    """The name of a class or function; of a partial, that of its function."""
    function = getattr(function, "func", function)
    return getattr(function, "__name__", type(function).__name__)

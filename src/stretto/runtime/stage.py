"""One stage at work: forward and backward of one microbatch.

A forward detaches what it is given, so that every stage has a graph of its own. Of its outputs
only the edges of the graph are kept (`GradientEdge`), never the data: an output is freed by
dropping it, whether it is a view, was saved by the last operation, or is still being sent. A
backward hands the edges and the gradients that came back to autograd in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from stretto.errors import InputError
from stretto.ir.calling import parameters_of
from stretto.runtime.tree import flatten, unflatten
from stretto.runtime.wire.message import Message, make_message


@dataclass(slots=True)
class _Graph:
    """What a forward leaves for its backward: where gradients enter and where they come out."""

    inputs: list[torch.Tensor | None] | None
    roots: list[GradientEdge | None]


@dataclass(frozen=True, slots=True)
class LossTerm:
    """What a loss function returned for one microbatch, and what entered the gradient."""

    value: torch.Tensor
    scaled: torch.Tensor


class StageRunner:
    """Runs one stage; holds the graphs of the microbatches whose backward is still to come.

    Args:
        index: Index of the stage.
        module: The module, called with the previous stage's value (a tuple as positional
            arguments, a dict as keywords, anything else as one argument).
        is_first: Whether its input is the batch itself.
        device: Where received tensors are put.
    """

    def __init__(
        self, index: int, module: torch.nn.Module, *, is_first: bool, device: torch.device
    ) -> None:
        self.index = index
        self.module = module
        self.is_first = is_first
        self.device = device
        self._accepts = parameters_of(module)
        self._graphs: dict[int, _Graph] = {}

    @property
    def live(self) -> int:
        """How many microbatches have their activations held by this stage."""
        return len(self._graphs)

    def forget(self) -> None:
        """Drop every graph, after a step that failed."""
        self._graphs.clear()

    def forward(
        self, microbatch: int, given: object, extras: Mapping[str, Any], *, train: bool
    ) -> Any:
        """Run the module on one microbatch of the batch (first stage) or on a message.

        Args:
            microbatch: Index of the microbatch.
            given: A piece of the batch, or the previous stage's `Message`.
            extras: Keyword values; the stage gets those that its signature names.
            train: Whether a backward will follow.

        Returns:
            The module's output, as it is.
        """
        value, graph = self._enter(given, train)
        args, keywords = self._accepts.arguments(value, extras)
        with torch.set_grad_enabled(train):
            output = self.module(*args, **keywords)
        if train:
            self._graphs[microbatch] = graph
        return output

    def _enter(self, given: object, train: bool) -> tuple[Any, _Graph]:
        if not isinstance(given, Message):
            return given, _Graph(None, [])
        tensors = [tensor.detach().to(self.device) for tensor in given.tensors]
        wanted = [train and layout.requires_grad for layout in given.layout.tensors]
        for tensor, flag in zip(tensors, wanted, strict=True):
            tensor.requires_grad_(flag)
        inputs = [tensor if flag else None for tensor, flag in zip(tensors, wanted, strict=True)]
        return unflatten(given.layout.spec, tensors), _Graph(list(inputs), [])

    def leave(self, microbatch: int, output: object, *, train: bool) -> Message:
        """Cut the output off the graph, keep the edges, and make the message for the next stage."""
        tensors, spec = flatten(output, where=f"the output of stage {self.index}")
        flags = [train and tensor.requires_grad for tensor in tensors]
        if train:
            self._graphs[microbatch].roots = [
                get_gradient_edge(tensor) if flag else None
                for tensor, flag in zip(tensors, flags, strict=True)
            ]
        return make_message(tensors, spec, flags)

    def loss(
        self,
        microbatch: int,
        output: object,
        target: object,
        loss_fn: Callable[..., Any] | None,
        divisor: float,
        *,
        train: bool,
    ) -> LossTerm:
        """Apply the loss function and divide; the result is where the backward will start.

        Raises:
            InputError: the loss is not one number that a gradient can start from.
        """
        with torch.set_grad_enabled(train):
            value = output if loss_fn is None else loss_fn(output, target)
            if isinstance(value, tuple) and len(value) == 1:
                value = value[0]
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                kind = type(value).__name__
                shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
                raise InputError(
                    f"the loss of microbatch {microbatch} is a {kind}{shape}; it must be a tensor "
                    "with one element"
                )
            value = value.reshape(()) if value.ndim else value
            scaled = value / divisor
        if train and scaled.requires_grad:
            self._graphs[microbatch].roots = [get_gradient_edge(scaled)]
        return LossTerm(value.detach(), scaled.detach())

    def backward(self, microbatch: int, gradient: Message | None) -> Message | None:
        """Run the whole backward of one microbatch and drop its graph.

        Args:
            microbatch: Index of the microbatch.
            gradient: From the next stage, one entry (or None) per output tensor; None on the
                last stage, where the backward starts from the loss.

        Returns:
            The gradients of the stage's inputs, in the structure of the inputs; None on the
            first stage.
        """
        graph = self._graphs.pop(microbatch)
        starts = self._starts(graph, gradient)
        if starts:
            torch.autograd.backward([edge for edge, _ in starts], [grad for _, grad in starts])
        if graph.inputs is None:
            return None
        return self._input_gradients(graph.inputs)

    def _starts(
        self, graph: _Graph, gradient: Message | None
    ) -> list[tuple[GradientEdge, torch.Tensor | None]]:
        if gradient is None:
            return [(edge, None) for edge in graph.roots if edge is not None]
        gradients = self._by_output(gradient, len(graph.roots))
        return [
            (edge, grad)
            for edge, grad in zip(graph.roots, gradients, strict=True)
            if edge is not None and grad is not None
        ]

    def _by_output(self, gradient: Message, count: int) -> Sequence[torch.Tensor | None]:
        tensors = [tensor.to(self.device) for tensor in gradient.tensors]
        values = unflatten(gradient.layout.spec, tensors)
        if not isinstance(values, list) or len(values) != count:
            raise InputError(
                f"stage {self.index} made {count} output tensors, the next stage returned "
                f"gradients for {values if not isinstance(values, list) else len(values)}"
            )
        return values

    def _input_gradients(self, inputs: Sequence[torch.Tensor | None]) -> Message:
        gradients = [None if tensor is None else tensor.grad for tensor in inputs]
        tensors, spec = flatten(gradients, where=f"the gradients of stage {self.index}'s inputs")
        return make_message(tensors, spec, [False] * len(tensors))

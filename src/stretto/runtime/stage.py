"""One stage at work: forward and backward of one microbatch.

A forward detaches what it is given, so that every stage has a graph of its own. Of its outputs
only the edges of the graph are kept (`GradientEdge`), never the data: an output is freed by
dropping it, whether it is a view, was saved by the last operation, or is still being sent. A
backward hands the edges and the gradients that came back to autograd in one call.

What a stage is given enters its graph through `_Entry`, so that modules may change it in place as
they may in the unsplit model, and its gradient is taken there as it comes, in its own strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from stretto.errors import InputError
from stretto.ir.calling import WithSkips, parameters_of
from stretto.runtime.inner_loss import collect_losses
from stretto.runtime.sharing import find_shared, storages_of
from stretto.runtime.skips import SkipTable
from stretto.runtime.tree import flatten, unflatten
from stretto.runtime.wire.message import Message, make_message


class _Slot:
    """Where the gradient of one entering tensor is left."""

    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient: torch.Tensor | None = None


class _Entry(torch.autograd.Function):
    """The identity, without a copy; its backward leaves the gradient in a slot.

    Its result needs a gradient since the anchor does, which is an empty tensor. Were the tensor
    itself the leaf, the graph would hold its data even where no operation needs it.

    The result shares memory and version with what it was given, so an in-place change of a value
    that the stage before still needs is an error in that stage's backward, as in a plain run.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor, slot: _Slot) -> torch.Tensor:
        ctx.slot = slot
        ctx.set_materialize_grads(False)  # no gradient is none for the stage before, either
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch declares it for any number of arguments
        ctx.slot.gradient = gradients[0]
        return None, None, None


@dataclass(frozen=True, slots=True)
class _Entered:
    """A tensor that entered with a gradient: where that is left, and the place in the graph.

    The slot must not hold the edge: the graph holds the slot, and the circle would keep both, and
    all the graph needs, until Python's collector runs.
    """

    slot: _Slot
    edge: GradientEdge


@dataclass(frozen=True, slots=True)
class _Shared:
    """A tensor that entered and shares memory with others, and its number of changes by then."""

    tensor: torch.Tensor
    version: int
    where: str
    with_what: str

    def check_unchanged(self) -> None:
        """Refuse a change in place.

        Raises:
            InputError: there was one.
        """
        if self.tensor._version != self.version:
            raise InputError(
                f"{self.where} was changed in place; it shares memory with {self.with_what}: "
                "clone it first"
            )


@dataclass(slots=True)
class _Graph:
    """What a forward leaves for its backward: where gradients enter and where they come out.

    Args:
        inputs: One per tensor that entered; None for one without a gradient.
        roots: One edge per tensor of the output; on the last stage, the loss.
        used: Skip name → what entered.
        made: Skip name → edges of what was made for later stages.
        inner: Edges of losses added inside the stage.
    """

    inputs: list[_Entered | None] = field(default_factory=list["_Entered | None"])
    roots: list[GradientEdge | None] = field(default_factory=list["GradientEdge | None"])
    used: dict[str, list[_Entered | None]] = field(
        default_factory=dict[str, "list[_Entered | None]"]
    )
    made: dict[str, list[GradientEdge | None]] = field(
        default_factory=dict[str, "list[GradientEdge | None]"]
    )
    inner: list[GradientEdge] = field(default_factory=list[GradientEdge])


@dataclass(frozen=True, slots=True)
class LossTerm:
    """What a loss function returned for one microbatch, and what entered the sum."""

    value: torch.Tensor
    scaled: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What surrounds one forward.

    Args:
        microbatch: Index of the microbatch.
        train: Whether a backward will follow.
        extras: Keyword values that the stage may name.
        row_divisor: What a mean over the microbatch's rows is divided by.
        loss_scale: What everything that enters the backward is multiplied by.
    """

    microbatch: int
    train: bool
    extras: Mapping[str, Any]
    row_divisor: float
    loss_scale: float


class StageRunner:
    """Runs one stage; holds the graphs of the microbatches whose backward is still to come.

    Args:
        index: Index of the stage.
        module: The module, called with the previous stage's value (a tuple as positional
            arguments, a dict as keywords, anything else as one argument).
        device: Where tensors are put before they enter.
        skips: The model's skip connections.
    """

    def __init__(
        self, index: int, module: torch.nn.Module, *, device: torch.device, skips: SkipTable
    ) -> None:
        self.index = index
        self.module = module
        self.device = device
        self._skips = skips
        self._accepts = parameters_of(module)
        self._graphs: dict[int, _Graph] = {}
        self._kept: frozenset[int] = frozenset()
        """Storages of what the present forward was given and others hold as well."""
        self._anchor = torch.empty(0, requires_grad=True)
        self.wants_input_gradients = False
        """Whether gradients of the batch's own tensors are asked for, in this step."""

    @property
    def live(self) -> int:
        """How many microbatches have their activations held by this stage."""
        return len(self._graphs)

    def forget(self) -> None:
        """Drop every graph, after a step that failed."""
        self._graphs.clear()

    def forward(
        self, work: Work, given: Any, skipped: Mapping[int, Message]
    ) -> tuple[Any, list[tuple[str, LossTerm]]]:
        """Run the module on one microbatch.

        Args:
            work: What surrounds the forward.
            given: A piece of the batch (first stage), or the previous stage's `Message`.
            skipped: Stage → its message of skip values for this one.

        Returns:
            The module's output as it is, and the terms of losses added inside.
        """
        graph = _Graph()
        shared: list[_Shared] = []
        value = self._enter(given, graph, work.train, shared)
        extras = {**work.extras, **self._enter_skips(skipped, graph, work.train, shared)}
        args, keywords = self._accepts.arguments(value, extras)
        shared += self._of_all_stages(work.extras)
        self._kept = storages_of([one.tensor for one in shared])
        if self.index == 0:
            self._kept |= storages_of(flatten(value, keep_objects=True)[0])
        with torch.set_grad_enabled(work.train), collect_losses() as added:
            output = self.module(*args, **keywords)
            for one in shared:
                one.check_unchanged()
            terms = [
                (name, LossTerm(value.detach(), self._add_root(graph, value, work)))
                for name, value in added
            ]
        if isinstance(output, WithSkips) and not self._skip_targets():
            output = output.output  # what its own layers made and used, and nobody else
        if work.train:
            self._graphs[work.microbatch] = graph
        return output, terms

    def _of_all_stages(self, extras: Mapping[str, Any]) -> list[_Shared]:
        """The tensors of extras: other stages have copies, which a change would not reach."""
        return [
            _Shared(
                tensor,
                tensor._version,
                f"stage {self.index}: {name}",
                "what other stages are given",
            )
            for name, value in extras.items()
            for tensor in flatten(value, where=name, keep_objects=True)[0]
            if not tensor.is_inference()
        ]

    def _skip_targets(self) -> list[int]:
        """The stages that use skip values of this one, ascending."""
        routes = self._skips.routes.values()
        return sorted({target for made, used in routes if made == self.index for target in used})

    def _add_root(self, graph: _Graph, value: torch.Tensor, work: Work) -> torch.Tensor:
        scaled = value / work.row_divisor
        if work.train and scaled.requires_grad:
            graph.inner.append(get_gradient_edge(_multiplied(scaled, work.loss_scale)))
        return scaled.detach()

    def _enter(self, given: Any, graph: _Graph, train: bool, shared: list[_Shared]) -> Any:
        if isinstance(given, Message):
            value, graph.inputs = self._open(given, train, shared)
            return value
        if self.device.type == "cpu" and not self.wants_input_gradients:
            return given
        leaves, spec = flatten(given, where="inputs", keep_objects=True)
        tensors, graph.inputs = self._let_in(leaves, [leaf.requires_grad for leaf in leaves], train)
        return unflatten(spec, tensors)

    def _enter_skips(
        self,
        skipped: Mapping[int, Message],
        graph: _Graph,
        train: bool,
        shared: list[_Shared],
    ) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for source, message in skipped.items():
            opened, entered = self._open(message, train, shared)
            values |= opened
            waiting = iter(entered)
            for name in self._skips.sent(source, self.index):
                leaves, _ = flatten(opened[name])
                graph.used[name] = [next(waiting) for _ in leaves]
        return values

    def _open(
        self, message: Message, train: bool, shared: list[_Shared]
    ) -> tuple[Any, list[_Entered | None]]:
        message.check_unchanged()
        layouts = message.layout.tensors
        tensors, entered = self._let_in(
            message.tensors, [layout.requires_grad for layout in layouts], train
        )
        shared += [
            _Shared(
                tensor,
                tensor._version,
                f"stage {self.index}: tensor {index} of what it was given",
                "a parameter, a buffer, the batch or another value that its maker returned",
            )
            for index, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True))
            if layout.is_shared and not tensor.is_inference()
        ]
        return unflatten(message.layout.spec, tensors), entered

    def _let_in(
        self, tensors: Sequence[torch.Tensor], wanted: Sequence[bool], train: bool
    ) -> tuple[list[torch.Tensor], list[_Entered | None]]:
        insides: list[torch.Tensor] = []
        entered: list[_Entered | None] = []
        for tensor, want in zip(tensors, wanted, strict=True):
            inside = tensor.detach().to(self.device)
            one = None
            if train and want:
                slot = _Slot()
                inside = _Entry.apply(self._anchor, inside, slot)
                one = _Entered(slot, get_gradient_edge(inside))
            insides.append(inside)
            entered.append(one)
        return insides, entered

    def leave(self, work: Work, output: Any) -> tuple[Message, dict[int, Message]]:
        """Cut the output off the graph, keep the edges, and make the messages for later stages.

        Returns:
            The message for the next stage, and one for each stage that skip values go to.

        Raises:
            InputError: a part cannot travel, or a declared skip value was not returned.
        """
        made = output.skips if isinstance(output, WithSkips) else {}
        plain = output.output if isinstance(output, WithSkips) else output
        graph = self._graphs[work.microbatch] if work.train else _Graph()
        where = f"the output of stage {self.index}"
        targets = self._skip_targets()
        shared = self._shared(plain, made, where, targets)
        message, graph.roots = _leave(plain, where, work.train, shared, once=True)
        messages: dict[int, Message] = {}
        for target in targets:
            names = self._skips.sent(self.index, target)
            missing = [name for name in names if name not in made]
            if missing:
                raise InputError(
                    f"stage {self.index} declares the skip values {missing} and did not return "
                    "them; return WithSkips(output, {name: value})"
                )
            for name in names:
                _, graph.made[name] = _leave(made[name], f"skip value {name!r}", work.train, shared)
            values = {name: made[name] for name in names}
            messages[target], _ = _leave(
                values, f"the skip values of stage {self.index}", work.train, shared
            )
        return message, messages

    def _shared(
        self, output: Any, made: Mapping[str, Any], where: str, targets: Sequence[int]
    ) -> frozenset[int]:
        """The identities of tensors that share memory, over all that leaves."""
        tensors, _ = flatten(output, where=where, once=True)
        for target in targets:
            for name in self._skips.sent(self.index, target):
                tensors = [*tensors, *flatten(made.get(name), where=f"skip value {name!r}")[0]]
        kept = self._kept
        if not all(tensor.requires_grad for tensor in tensors):
            kept = kept | storages_of(self.module.buffers())
        flags = find_shared(tensors, kept)
        return frozenset(id(one) for one, flag in zip(tensors, flags, strict=True) if flag)

    def loss(
        self,
        work: Work,
        output: Any,
        target: Any,
        loss_fn: Callable[..., Any] | None,
        divisor: float,
    ) -> LossTerm:
        """Apply the loss function and divide; the result is where the backward will start.

        Raises:
            InputError: the loss is not one number that a gradient can start from.
        """
        with torch.set_grad_enabled(work.train):
            value = output if loss_fn is None else loss_fn(output, target)
            value = check_loss(value, work.microbatch)
            scaled = value / divisor
            root = _multiplied(scaled, work.loss_scale)
        if work.train and root.requires_grad:
            self._graphs[work.microbatch].roots = [get_gradient_edge(root)]
        return LossTerm(value.detach(), scaled.detach())

    def backward(
        self, microbatch: int, gradient: Message | None, chained: Mapping[int, Message]
    ) -> tuple[Message, dict[int, Message]]:
        """Run the whole backward of one microbatch and drop its graph.

        Args:
            microbatch: Index of the microbatch.
            gradient: From the next stage, one entry (or None) per output tensor; None on the
                last stage, where the backward starts from the loss.
            chained: Stage → its message of gradients of skip values.

        Returns:
            The gradients of the stage's inputs, one entry (or None) per tensor that entered, and
            for each earlier stage of a skip's chain the gradients that go to it.
        """
        graph = self._graphs.pop(microbatch)
        starts = [*self._main_starts(graph, gradient), *self._skip_starts(graph, chained)]
        starts += [(edge, None) for edge in graph.inner]
        if starts:
            torch.autograd.backward([edge for edge, _ in starts], [grad for _, grad in starts])
        earlier = {
            made if index == 0 else used[index - 1]
            for made, used in self._skips.routes.values()
            for index, stage in enumerate(used)
            if stage == self.index
        }
        returned = {
            low: _gradients_of(
                {name: graph.used[name] for name in self._skips.returned(self.index, low)}
            )
            for low in sorted(earlier)
        }
        return _gradients_of(graph.inputs), returned

    def _main_starts(
        self, graph: _Graph, gradient: Message | None
    ) -> list[tuple[GradientEdge, torch.Tensor | None]]:
        if gradient is None:
            return [(edge, None) for edge in graph.roots if edge is not None]
        return self._starts(graph.roots, self._values(gradient))

    def _skip_starts(
        self, graph: _Graph, chained: Mapping[int, Message]
    ) -> list[tuple[GradientEdge, torch.Tensor | None]]:
        starts: list[tuple[GradientEdge, torch.Tensor | None]] = []
        for message in chained.values():
            for name, gradients in self._values(message).items():
                if name in graph.made:
                    edges = graph.made[name]
                else:
                    edges = [one and one.edge for one in graph.used[name]]
                starts += self._starts(edges, gradients)
        return starts

    def _values(self, message: Message) -> Any:
        message.check_unchanged()
        tensors = [tensor.to(self.device) for tensor in message.tensors]
        return unflatten(message.layout.spec, tensors)

    def _starts(
        self, edges: Sequence[GradientEdge | None], gradients: Sequence[torch.Tensor | None]
    ) -> list[tuple[GradientEdge, torch.Tensor | None]]:
        if len(edges) != len(gradients):
            raise InputError(
                f"stage {self.index} made {len(edges)} tensors and got {len(gradients)} gradients"
            )
        return [
            (edge, gradient)
            for edge, gradient in zip(edges, gradients, strict=True)
            if edge is not None and gradient is not None
        ]


def check_loss(value: Any, microbatch: int) -> torch.Tensor:
    """A loss as a tensor without dimensions; a tuple of one is that one.

    Raises:
        InputError: it is not one tensor with one element.
    """
    if isinstance(value, tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        kind = type(value).__name__
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise InputError(
            f"the loss of microbatch {microbatch} is a {kind}{shape}; it must be a tensor with one "
            "element"
        )
    return value.reshape(()) if value.ndim else value


def _multiplied(value: torch.Tensor, scale: float) -> torch.Tensor:
    return value if scale == 1 else value * scale


def _leave(
    value: Any, where: str, train: bool, shared: frozenset[int], *, once: bool = False
) -> tuple[Message, list[GradientEdge | None]]:
    tensors, spec = flatten(value, where=where, once=once)
    flags = [train and tensor.requires_grad for tensor in tensors]
    edges = [
        get_gradient_edge(tensor) if flag else None
        for tensor, flag in zip(tensors, flags, strict=True)
    ]
    is_shared = [id(tensor) in shared for tensor in tensors]
    return make_message(tensors, spec, flags, what=where, is_shared=is_shared), edges


def _gradients_of(entered: Any) -> Message:
    """A message of the gradients of what entered: a list of them, or a dict of lists."""
    if isinstance(entered, dict):
        value: Any = {
            name: [one and one.slot.gradient for one in some] for name, some in entered.items()
        }
    else:
        value = [one and one.slot.gradient for one in entered]
    tensors, spec = flatten(value, where="gradients")
    return make_message(tensors, spec, [False] * len(tensors), what="a gradient")

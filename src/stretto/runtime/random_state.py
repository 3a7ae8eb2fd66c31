"""Random numbers as a function of seed, step, microbatch and layer.

The global random stream of a process depends on which stages it holds and in which order it runs
them, so dropout would depend on the split. Instead the default generator is seeded anew in front
of every layer (the smallest unit that is never cut) of every microbatch, and left as it was after
every action. The generator keeps 32 bits of a seed only, so the four numbers are hashed.

A recomputation puts back the state it found in the forward. What a backward draws by itself depends
on the stage, not on its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stretto.ir.seeding import GENERATOR_LOCK, mixed_seed


def layer_seed(seed: int, step: int, microbatch: int, layer: int, *, train: bool = True) -> int:
    """The seed in front of one layer: 32 well mixed bits.

    Args:
        seed: The engine's seed.
        step: Number of the training step, from 0.
        microbatch: Index of the microbatch.
        layer: Index of the layer in the whole model (or of the stage, if it has no layers).
        train: Evaluations have streams of their own.
    """
    return mixed_seed("train" if train else "eval", seed, step, microbatch, layer)


class LayerSeeder:
    """Seeds the default generators of one stage's device.

    Args:
        seed: The engine's seed.
        device: Device of the stage; its generator is seeded besides the CPU's.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])

    @contextmanager
    def at_work(
        self,
        module: torch.nn.Module,
        stage: int,
        step: int,
        microbatch: int,
        *,
        train: bool,
        backward: bool = False,
    ) -> Iterator[None]:
        """Run a stage on a microbatch: layers are seeded, and the generators put back after.

        A module that has layers of its own offers the attribute `before_layer`: a function that
        it calls with each layer's index in front of it, or None. Others are seeded as a whole, in
        front of a backward as in front of the forward.
        """

        def seed(value: int) -> None:
            for generator in self._generators:
                generator.manual_seed(value)

        def seed_layer(layer: int) -> None:
            seed(layer_seed(self.seed, step, microbatch, layer, train=train))

        attributes: dict[str, Any] = module.__dict__
        before: Callable[[int], None] | None = attributes.get("before_layer")
        with GENERATOR_LOCK:
            states = [generator.get_state() for generator in self._generators]
            try:
                if "before_layer" not in attributes:
                    seed_layer(stage)
                else:
                    attributes["before_layer"] = seed_layer
                    if backward:
                        seed(mixed_seed("backward", self.seed, step, microbatch, stage))
                yield
            finally:
                if "before_layer" in attributes:
                    attributes["before_layer"] = before
                for generator, state in zip(self._generators, states, strict=True):
                    generator.set_state(state)


@contextmanager
def seeded_plain_run(
    model: torch.nn.Module, *, seed: int, step: int, microbatch: int
) -> Iterator[None]:
    """Run a whole model on one microbatch with the random numbers that a pipeline would use.

    For comparing with a plain run: enclose the forward and the backward of each microbatch.

    Args:
        model: A model from `stretto.models.build`, whose layers are numbered as in the pipeline.
        seed: The engine's seed.
        step: Number of the training step, from 0.
        microbatch: Index of the microbatch.
    """
    with LayerSeeder(seed, torch.device("cpu")).at_work(model, 0, step, microbatch, train=True):
        yield

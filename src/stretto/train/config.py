"""What a run is: five sections of settings, each checked where it is made.

A TOML file mirrors the sections; `config_file.py` reads and writes it. Whether the sections fit
together (layers and stages, text and context) is for the parts that use them to say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from stretto.errors import InputError
from stretto.runtime.wire.peers import TRANSPORTS
from stretto.train.text import SHAKESPEARE


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only GPT.

    Args:
        dim: Width.
        num_layers: Blocks; an embedding before and a head after them are layers of their own.
        num_heads: Attention heads; they divide the width.
        context: Length of a sequence, in characters.
        dropout: Share dropped in training, in [0, 1).
    """

    dim: int = 64
    num_layers: int = 8
    num_heads: int = 4
    context: int = 64
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for key in ("dim", "num_layers", "num_heads", "context"):
            _at_least("model", key, getattr(self, key), 1)
        _share("model", "dropout", self.dropout)
        if self.dim % self.num_heads:
            raise InputError(
                f"model.num_heads is {self.num_heads}; it must divide model.dim, {self.dim}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The text and how it is cut.

    Args:
        text: `"shakespeare"`, or the path of a UTF-8 text.
        batch_size: Sequences per step.
        held_out_share: Share of the text, at its end, that is not learned from, in (0, 1).
        held_out_sequences: Sequences in one evaluation.
    """

    text: str = SHAKESPEARE
    batch_size: int = 32
    held_out_share: float = 0.05
    held_out_sequences: int = 256

    def __post_init__(self) -> None:
        _at_least("data", "batch_size", self.batch_size, 1)
        _at_least("data", "held_out_sequences", self.held_out_sequences, 1)
        if not 0 < self.held_out_share < 1:
            raise InputError(
                f"data.held_out_share is {self.held_out_share}; it must lie between 0 and 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """The schedule and how the layers are split over its stages.

    Args:
        name: Name of a schedule generator.
        num_ranks: Ranks the model is split over.
        num_microbatches: Pieces of a step's batch.
        stages_per_rank: Stages on each rank, for generators that take it.
        split: `"even"`, `"uniform_late"`, `"class:PATTERN"`, or layers per stage.
    """

    name: str = "one_f_one_b"
    num_ranks: int = 4
    num_microbatches: int = 8
    stages_per_rank: int | None = None
    split: str | tuple[int, ...] = "even"

    def __post_init__(self) -> None:
        _at_least("schedule", "num_ranks", self.num_ranks, 1)
        _at_least("schedule", "num_microbatches", self.num_microbatches, 1)
        if self.stages_per_rank is not None:
            _at_least("schedule", "stages_per_rank", self.stages_per_rank, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW, its learning rate and clipping.

    Args:
        learning_rate: The highest rate.
        warmup_share: Share of the steps in which the rate rises.
        final_share: Rate at the end, as a share of the highest.
        beta1: Decay of the gradient's mean.
        beta2: Decay of its square's mean.
        weight_decay: Decay of matrices; biases and norms have none.
        max_norm: Gradients with a larger norm, over the whole model, are scaled down to it.
    """

    learning_rate: float = 6e-3
    warmup_share: float = 0.05
    final_share: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        for key in ("learning_rate", "max_norm"):
            if not getattr(self, key) > 0:
                raise InputError(f"optimizer.{key} is {getattr(self, key)}; it must be positive")
        if not self.weight_decay >= 0:
            raise InputError(f"optimizer.weight_decay is {self.weight_decay}; it must be 0 or more")
        for key in ("beta1", "beta2"):
            _share("optimizer", key, getattr(self, key))
        for key in ("warmup_share", "final_share"):
            if not 0 <= getattr(self, key) <= 1:
                raise InputError(f"optimizer.{key} is {getattr(self, key)}; it must lie in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How long, from which seed, and what is kept.

    Args:
        steps: Optimizer steps.
        seed: Seed of weights, batches and sample.
        evaluate_every: Steps between evaluations; there is one before and one after all steps.
        record_every: Steps between recorded timelines; that of the last step is always recorded.
        sample_characters: Length of the text written at the end; 0 for none.
        sample_prompt: What the text starts with.
        directory: Where runs are kept.
        name: Folder of this run in there; empty for one named by the time.
        transport: What carries messages: `auto`, `sockets` or `gloo`; see `Engine`.
        step_timeout_s: How long a rank waits for another before it gives up, in seconds.
    """

    steps: int = 450
    seed: int = 0
    evaluate_every: int = 50
    record_every: int = 25
    sample_characters: int = 300
    sample_prompt: str = "\n"
    directory: str = "runs"
    name: str = ""
    transport: str = "auto"
    step_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        _at_least("run", "steps", self.steps, 1)
        _at_least("run", "evaluate_every", self.evaluate_every, 1)
        _at_least("run", "record_every", self.record_every, 1)
        _at_least("run", "sample_characters", self.sample_characters, 0)
        if not self.sample_prompt:
            raise InputError("run.sample_prompt is empty; it needs at least one character")
        if self.transport not in TRANSPORTS:
            raise InputError(
                f"run.transport is {self.transport!r}; it must be one of {', '.join(TRANSPORTS)}"
            )
        if not 0 < self.step_timeout_s < math.inf:
            raise InputError(
                f"run.step_timeout_s is {self.step_timeout_s}; it must be a positive number of "
                "seconds"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """All settings of a run.

    Raises:
        InputError: a value is out of its range, or the batch is smaller than its pieces; the
            message names section and key, the value and the rule.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if self.data.batch_size < self.schedule.num_microbatches:
            raise InputError(
                f"data.batch_size is {self.data.batch_size}; it must be at least "
                f"schedule.num_microbatches, which is {self.schedule.num_microbatches}"
            )


SECTIONS = tuple(each.name for each in fields(TrainConfig))


def _at_least(section: str, key: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"{section}.{key} is {value}; it must be at least {least}")


def _share(section: str, key: str, value: float) -> None:
    if not 0 <= value < 1:
        raise InputError(f"{section}.{key} is {value}; it must lie in [0, 1)")

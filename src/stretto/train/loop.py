"""The training loop: what happens in a run, as a stream of events.

Every rank runs the same loop and gets the same events; who logs or shows them is not its matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from stretto.ir import Timeline
from stretto.models import split
from stretto.runtime import Engine
from stretto.train.job import Job
from stretto.train.optimizer import learning_rate, make_optimizer, set_learning_rate
from stretto.train.sample import write_text
from stretto.train.text import held_out_batch, training_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The loss on the held-out text after so many steps."""

    step: int
    held_out_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A step was taken.

    Args:
        step: Its number, counted from 1.
        loss: Loss of its batch, before it.
        gradient_norm: Norm of all gradients, before clipping.
        learning_rate: The rate it was taken with.
        timeline: What ran on all ranks, if it was recorded.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    timeline: Timeline | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrote:
    """The text written at the end."""

    text: str


Event = Evaluated | Stepped | Wrote


def next_symbol_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean over all characters of the nats they cost: scores (B, T, V), targets (B, T)."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def run_loop(job: Job, *, rank: int, group: object) -> Iterator[Event]:
    """Train on this rank, and say what happens.

    Args:
        job: The run.
        rank: This rank.
        group: The ranks' process group, or None for one rank alone.

    Yields:
        An evaluation, then steps and evaluations, then the text; equal on every rank.
    """
    config = job.config
    stages = split(
        job.layers, job.schedule, rank=rank, by=config.schedule.split, seed=config.run.seed
    )
    engine = Engine(
        stages,
        job.schedule,
        loss_fn=next_symbol_loss,
        group=group,
        seed=config.run.seed,
        transport=config.run.transport,
        step_timeout_s=config.run.step_timeout_s,
    )
    try:
        yield _evaluate(job, engine, 0)
        yield from _steps(job, engine)
        if config.run.sample_characters:
            text = write_text(
                engine,
                job.corpus,
                prompt=config.run.sample_prompt,
                length=config.run.sample_characters,
                context=config.model.context,
                seed=config.run.seed,
            )
            yield Wrote(text=text)
    finally:
        engine.close()


def _steps(job: Job, engine: Engine) -> Iterator[Event]:
    config, settings = job.config.run, job.config.optimizer
    optimizer = make_optimizer(
        engine.stages.values(),
        learning_rate=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
    )
    for done in range(config.steps):
        step = done + 1
        is_last = step == config.steps
        inputs, targets = training_batch(
            job.corpus,
            seed=config.seed,
            step=done,
            batch_size=job.config.data.batch_size,
            context=job.config.model.context,
        )
        rate = learning_rate(
            done,
            num_steps=config.steps,
            peak=settings.learning_rate,
            warmup_share=settings.warmup_share,
            final_share=settings.final_share,
        )
        set_learning_rate(optimizer, rate)
        engine.record = is_last or step % config.record_every == 0
        result = engine.step(inputs, targets)
        engine.record = False
        norm = engine.clip_grad_norm_(settings.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield Stepped(
            step=step,
            loss=_number(result.loss),
            gradient_norm=float(norm),
            learning_rate=rate,
            timeline=result.timeline,
        )
        if is_last or step % config.evaluate_every == 0:
            yield _evaluate(job, engine, step)


def _evaluate(job: Job, engine: Engine, step: int) -> Evaluated:
    inputs, targets = held_out_batch(
        job.corpus,
        num_sequences=job.config.data.held_out_sequences,
        context=job.config.model.context,
    )
    rows = -(-job.config.data.batch_size // job.config.schedule.num_microbatches)
    result = engine.eval_step(inputs, targets, num_microbatches=-(-len(inputs) // rows))
    return Evaluated(step=step, held_out_loss=_number(result.loss))


def _number(loss: Tensor | None) -> float:
    assert loss is not None  # the engine was asked to deliver it to every rank
    return loss.item()

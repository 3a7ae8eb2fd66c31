"""The training loop, on one rank in this process."""

from __future__ import annotations

import pytest
import torch

from stretto.models import build
from stretto.runtime.random_state import seeded_plain_run
from stretto.train.config_file import make_config
from stretto.train.job import prepare
from stretto.train.loop import Evaluated, Stepped, Wrote, next_symbol_loss, run_loop
from stretto.train.optimizer import learning_rate, make_optimizer, set_learning_rate
from stretto.train.text import training_batch


def plain_losses(job) -> list[float]:
    """Losses of plain accumulation over microbatches, without any pipeline."""
    config, settings = job.config, job.config.optimizer
    model = build(job.layers, seed=config.run.seed)
    optimizer = make_optimizer(
        [model],
        learning_rate=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
    )
    losses = []
    pieces = config.schedule.num_microbatches
    for step in range(config.run.steps):
        inputs, targets = training_batch(
            job.corpus, seed=config.run.seed, step=step, batch_size=6, context=8
        )
        rate = learning_rate(
            step, num_steps=4, peak=settings.learning_rate, warmup_share=0.05, final_share=0.1
        )
        set_learning_rate(optimizer, rate)
        total = torch.zeros(())
        batch = zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True)
        for microbatch, (piece, target) in enumerate(batch):
            seed = config.run.seed
            with seeded_plain_run(model, seed=seed, step=step, microbatch=microbatch):
                loss = next_symbol_loss(model(piece), target) / pieces
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def test_a_run_is_evaluations_steps_and_a_text(small_config):
    """It evaluates before, every so many steps and after; it records as asked and at the end."""
    events = list(run_loop(prepare(small_config), rank=0, group=None))
    kinds = [(type(each), getattr(each, "step", None)) for each in events]
    assert kinds == [
        (Evaluated, 0),
        (Stepped, 1),
        (Stepped, 2),
        (Evaluated, 2),
        (Stepped, 3),
        (Stepped, 4),
        (Evaluated, 4),
        (Wrote, None),
    ]
    recorded = [each.step for each in events if isinstance(each, Stepped) and each.timeline]
    assert recorded == [3, 4]
    assert len(events[-1].text) == 1 + 5


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_run_learns_what_a_plain_loop_learns(small_body, dropout):
    """Every step's loss equals, bit for bit, that of plain accumulation, with dropout too."""
    small_body["model"]["dropout"] = dropout
    job = prepare(make_config(small_body, {"run.seed": "5"}))
    steps = [each for each in run_loop(job, rank=0, group=None) if isinstance(each, Stepped)]
    assert [each.loss for each in steps] == plain_losses(job)


def test_a_run_without_a_text_ends_with_its_evaluation(small_body):
    """With no characters asked for, none are written."""
    small_body["run"]["sample_characters"] = 0
    events = list(run_loop(prepare(make_config(small_body, {})), rank=0, group=None))
    assert isinstance(events[-1], Evaluated)

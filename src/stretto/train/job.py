"""Everything a run needs to know before any rank starts; a user's mistakes show here."""

from __future__ import annotations

from dataclasses import dataclass

from stretto import schedules
from stretto.ir import Schedule
from stretto.models import LayerSpec, describe_split, gpt_layers
from stretto.train.config import ScheduleConfig, TrainConfig
from stretto.train.text import Corpus, encode, make_corpus, read_text


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Job:
    """What all ranks of a run have in common.

    Args:
        config: Its settings.
        corpus: The text.
        layers: The model, described.
        schedule: What every rank runs.
        split: A table of which layers are where.
    """

    config: TrainConfig
    corpus: Corpus
    layers: list[LayerSpec]
    schedule: Schedule
    split: str


def prepare(config: TrainConfig) -> Job:
    """Read the text, describe the model, make the schedule, and see that they fit together.

    Raises:
        InputError: they do not, or the text or the schedule is not to be had.
    """
    model = config.model
    corpus = make_corpus(
        read_text(config.data.text),
        held_out_share=config.data.held_out_share,
        context=model.context,
    )
    encode(config.run.sample_prompt, corpus.symbols)
    layers = gpt_layers(
        vocab_size=len(corpus.symbols),
        dim=model.dim,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        context=model.context,
        dropout=model.dropout,
    )
    schedule = make_schedule(config.schedule)
    split = describe_split(layers, schedule, by=config.schedule.split)
    return Job(config=config, corpus=corpus, layers=layers, schedule=schedule, split=split)


def make_schedule(settings: ScheduleConfig) -> Schedule:
    """The schedule that the settings name.

    Raises:
        InputError: no generator has this name, or its options do not suit it.
    """
    options = {}
    if settings.stages_per_rank is not None:
        options["stages_per_rank"] = settings.stages_per_rank
    return schedules.build(
        settings.name,
        num_ranks=settings.num_ranks,
        num_microbatches=settings.num_microbatches,
        **options,
    )

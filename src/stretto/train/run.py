"""A whole run: from settings to ranks that train, and one that keeps and shows it."""

from __future__ import annotations

from rich.console import Console
from torch import distributed

from stretto.train.config import TrainConfig
from stretto.train.job import Job, prepare
from stretto.train.journal import Draw, Journal
from stretto.train.launch import joined_rank, run_ranks
from stretto.train.loop import run_loop
from stretto.train.optimizer import make_optimizer
from stretto.train.progress import show_cursor
from stretto.train.run_directory import RunDirectory


def train(config: TrainConfig, *, draw: Draw) -> None:
    """Train a GPT as the settings say, on local ranks or on those torchrun started.

    What can be wrong with the settings shows before any rank starts. Rank 0 shows the run on
    standard output and keeps it in its folder.

    Args:
        config: The settings.
        draw: Draws a planned timeline over a measured one.

    Raises:
        InputError: the settings cannot be used.
        ExecutionError: a rank failed; the others were ended.
        KeyboardInterrupt: on Ctrl-C, after all ranks have ended.
    """
    job = prepare(config)
    # The first optimizer makes torch import much of itself: once here, not once in every rank.
    make_optimizer([], learning_rate=1.0, betas=(0.9, 0.99), weight_decay=0.0)
    joined = joined_rank()
    directory = RunDirectory(config) if joined in (None, 0) else None
    console = Console()

    def work(rank: int) -> None:
        group = distributed.group.WORLD if job.schedule.num_ranks > 1 else None
        journal = None
        if rank == 0 and directory is not None:
            journal = Journal(job, directory, console, draw, is_one_host=joined is None)
        _run_rank(job, rank, group, journal)

    try:
        run_ranks(work, job.schedule.num_ranks)
    except BaseException:
        show_cursor(console)
        raise


def _run_rank(job: Job, rank: int, group: object, journal: Journal | None) -> None:
    try:
        for event in run_loop(job, rank=rank, group=group):
            if journal is not None:
                journal.take(event)
    finally:
        if journal is not None:
            journal.close()
    if journal is not None:
        journal.conclude()

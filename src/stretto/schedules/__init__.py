"""Generators: sizes → `Schedule`, one per file, pure.

A generator decides placement and order and nothing else: no costs, no transfers. On every stage
its backwards run in the order of the microbatches, so that gradients are summed in one order
whatever the schedule.
"""

from stretto.schedules.build import GENERATORS, build
from stretto.schedules.gpipe import gpipe
from stretto.schedules.interleaved_1f1b import interleaved_1f1b
from stretto.schedules.looped_bfs import looped_bfs
from stretto.schedules.one_f_one_b import one_f_one_b

__all__ = ["GENERATORS", "build", "gpipe", "interleaved_1f1b", "looped_bfs", "one_f_one_b"]

"""A run small enough for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stretto.train.config import TrainConfig
from stretto.train.config_file import make_config

TEXT = "to be, or not to be, that is the question:\n" * 30


@pytest.fixture
def small_body(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Settings of a tiny model on a short text, on one rank, as a file would give them."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return {
        "model": {"dim": 8, "num_layers": 3, "num_heads": 2, "context": 8},
        "data": {
            "text": str(path),
            "batch_size": 6,
            "held_out_share": 0.1,
            "held_out_sequences": 4,
        },
        "schedule": {
            "name": "interleaved_1f1b",
            "num_ranks": 1,
            "num_microbatches": 3,
            "stages_per_rank": 2,
        },
        "run": {
            "steps": 4,
            "evaluate_every": 2,
            "record_every": 3,
            "sample_characters": 5,
            "directory": str(tmp_path / "runs"),
            "name": "small",
        },
    }


@pytest.fixture
def small_config(small_body: dict[str, dict[str, Any]]) -> TrainConfig:
    """The settings, made."""
    return make_config(small_body, {})

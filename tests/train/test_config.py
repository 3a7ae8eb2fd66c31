"""Settings: file, command line, and what is refused."""

from __future__ import annotations

from dataclasses import fields

import pytest

from stretto.errors import InputError
from stretto.train.config import SECTIONS, TrainConfig
from stretto.train.config_file import config_to_toml, load_config, make_config


def test_what_a_file_leaves_out_has_its_default(tmp_path):
    """An empty file gives the defaults; a value in the file replaces its own only."""
    path = tmp_path / "config.toml"
    path.write_text("")
    assert load_config(path) == TrainConfig()
    path.write_text("[model]\ndim = 32\n[optimizer]\nlearning_rate = 1\n")
    config = load_config(path)
    assert config.model.dim == 32
    assert config.optimizer.learning_rate == 1.0
    assert isinstance(config.optimizer.learning_rate, float)
    assert config.schedule == TrainConfig().schedule


def test_the_command_line_wins_over_the_file():
    """A text for section.key is read by the key's type and replaces the file's value."""
    body = {"model": {"dim": 32}, "schedule": {"split": [1, 2]}}
    overrides = {
        "model.dim": "16",
        "optimizer.learning_rate": "1e-3",
        "schedule.split": "2,1",
        "schedule.stages_per_rank": "2",
        "run.name": "12",
    }
    config = make_config(body, overrides)
    assert config.model.dim == 16
    assert config.optimizer.learning_rate == 1e-3
    assert config.schedule.split == (2, 1)
    assert config.schedule.stages_per_rank == 2
    assert config.run.name == "12"
    assert make_config({}, {"schedule.split": "class:Block"}).schedule.split == "class:Block"


def test_settings_survive_writing_and_reading(tmp_path):
    """What is written reads back as the same settings, lists and special characters too."""
    config = make_config(
        {
            "schedule": {"split": [2, 3], "stages_per_rank": 2},
            "run": {"sample_prompt": 'A "b"\n\\é'},
        },
        {},
    )
    path = tmp_path / "config.toml"
    path.write_text(config_to_toml(config), encoding="utf-8")
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"modle": {}}, "unknown section modle .*; did you mean model?"),
        ({"zzz": {}}, "unknown section zzz .*; known are model, data"),
        ({"model": {"dims": 3}}, r"unknown key model\.dims .*; did you mean model\.dim\?"),
        ({"model": 3}, "model is 3; it must be a section"),
        ({"model": {"dim": "3"}}, r"model\.dim is '3'; it must be a whole number"),
        ({"model": {"dim": True}}, r"model\.dim is True; it must be a whole number"),
        ({"model": {"dim": 2.5}}, r"model\.dim is 2\.5; it must be a whole number"),
        ({"data": {"text": 3}}, r"data\.text is 3; it must be a text"),
        ({"schedule": {"split": [1, "a"]}}, r"schedule\.split is .* a list of whole numbers"),
        ({"model": {"dim": 0}}, r"model\.dim is 0; it must be at least 1"),
        ({"model": {"num_heads": 3}}, r"model\.num_heads is 3; it must divide model\.dim.* 64"),
        ({"model": {"dropout": 1.0}}, r"model\.dropout is 1\.0"),
        ({"data": {"held_out_share": 0.0}}, r"data\.held_out_share is 0\.0"),
        ({"schedule": {"num_microbatches": 0}}, r"schedule\.num_microbatches is 0"),
        ({"schedule": {"stages_per_rank": 0}}, r"schedule\.stages_per_rank is 0"),
        ({"data": {"batch_size": 7}}, r"data\.batch_size is 7; .* schedule\.num_microbatches.* 8"),
        ({"optimizer": {"learning_rate": 0.0}}, r"optimizer\.learning_rate is 0\.0; .* positive"),
        ({"optimizer": {"learning_rate": float("nan")}}, r"optimizer\.learning_rate is nan"),
        ({"optimizer": {"beta2": 1.0}}, r"optimizer\.beta2 is 1\.0"),
        ({"optimizer": {"weight_decay": -1.0}}, r"optimizer\.weight_decay is -1\.0"),
        ({"optimizer": {"warmup_share": 1.5}}, r"optimizer\.warmup_share is 1\.5"),
        ({"run": {"steps": 0}}, r"run\.steps is 0"),
        ({"run": {"sample_prompt": ""}}, r"run\.sample_prompt is empty"),
        ({"run": {"transport": "tcp"}}, r"run\.transport is 'tcp'; .* auto, sockets, gloo"),
        ({"run": {"step_timeout_s": 0}}, r"run\.step_timeout_s is 0\.0; it must be a positive"),
        ({"run": {"step_timeout_s": float("inf")}}, r"run\.step_timeout_s is inf"),
    ],
)
def test_a_bad_setting_is_named(body, message):
    """The message names section and key, the value, and what would do."""
    with pytest.raises(InputError, match=message) as caught:
        make_config(body, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("model.dim", "big", r"model\.dim is 'big'; it must be a whole number"),
        ("optimizer.max_norm", "x", r"optimizer\.max_norm is 'x'; it must be a number"),
        ("model.dmi", "3", r"unknown key model\.dmi .* did you mean model\.dim\?"),
        ("steps", "3", r"unknown key steps .* did you mean"),
    ],
)
def test_a_bad_flag_is_named(name, text, message):
    """A flag's value of the wrong kind, or a flag for no key, is refused by name."""
    with pytest.raises(InputError, match=message):
        make_config({}, {name: text})


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    """No file, a folder, and a file that is not TOML are told apart."""
    with pytest.raises(InputError, match=r"cannot read .*none\.toml: No such file"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(InputError, match=r"cannot read .*directory"):
        load_config(tmp_path)
    bad = tmp_path / "bad.toml"
    bad.write_text("[model\n")
    with pytest.raises(InputError, match=r"bad\.toml is not TOML: .*line 1"):
        load_config(bad)


def test_every_section_is_a_field():
    """The sections of a file are the fields of the settings."""
    assert tuple(each.name for each in fields(TrainConfig)) == SECTIONS

"""What is found wrong before any rank starts."""

from __future__ import annotations

import pytest

from stretto.errors import InputError
from stretto.train.config_file import make_config
from stretto.train.job import prepare


def test_a_job_has_what_all_ranks_need(small_config):
    """Text, described layers, schedule and the table of the split are there; nothing is built."""
    job = prepare(small_config)
    assert len(job.layers) == 5
    assert job.schedule.num_stages == 2
    assert job.split.splitlines()[1].split() == ["0", "0", "0-1", "Embedding,", "Block"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"schedule.name": "interleaved"}, r"'interleaved'.*interleaved_1f1b"),
        ({"schedule.name": "gpipe"}, r"gpipe takes no stages_per_rank.* 2"),
        ({"schedule.num_ranks": "3"}, "5 layers are too few for 6 stages"),
        ({"schedule.split": "1,2"}, "add up to 3; the model has 5 layers"),
        ({"schedule.split": "odd"}, "split by 'odd' is unknown"),
        ({"run.sample_prompt": "Z"}, "the character 'Z' does not occur in data.text"),
        ({"model.context": "2000"}, r"data\.text has a training part .* model\.context 2000"),
        ({"data.text": "/none"}, r"data\.text is '/none'"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(small_body, overrides, message):
    """The message names the values and the rule, in one line."""
    with pytest.raises(InputError, match=message) as caught:
        prepare(make_config(small_body, overrides))
    assert "\n" not in str(caught.value)

"""The traits of objectives: whose log-probabilities are the old policy's, and what a replay costs."""

from pathlib import Path

import pytest

from flow_grpo.settings.loading import load_config
from flow_grpo.settings.objectives import old_log_probs, traits_of
from flow_grpo.settings.schema import Config, TrainConfig

TINY = f"{Path(__file__).parents[2]}/config/grpo.py:tiny_recam"


def recipe(*changes: str) -> Config:
    small = [
        "sample.k=2",
        "sample.train_batch_size=2",
        "train.batch_size=2",
        "sample.share_prefix=false",
        "train.step_weight=none",
    ]
    return load_config(TINY, [f"--config.{change}" for change in (*small, *changes)])


@pytest.mark.parametrize(
    ("mode", "updates", "as_rolled_out", "expected"),
    [
        ("auto", 1, True, "rollout"),
        ("auto", 2, True, "rollout"),
        ("auto", 1, False, "detach"),  # the new ones without gradient: a call less
        ("auto", 2, False, "recompute"),
        ("rollout", 2, False, "rollout"),
        ("recompute", 1, True, "recompute"),
        ("detach", 1, True, "detach"),
    ],
)
def test_the_old_policys_log_probabilities_are_those_of_the_updates_own_calls(mode, updates, as_rolled_out, expected):
    train = TrainConfig(old_log_prob=mode, updates_per_epoch=updates)
    assert old_log_probs(train, as_rolled_out=as_rolled_out) == expected


@pytest.mark.parametrize(
    ("changes", "forwards"),
    [
        (["train.updates_per_epoch=3"], 0),
        (["train.updates_per_epoch=2"], 1),  # three batches are dealt to two steps sample by sample
        (["train.updates_per_epoch=2", "sample.num_batches_per_epoch=4"], 0),
        (["train.batch_size=1", "train.updates_per_epoch=3"], 1),
        (["train.updates_per_epoch=3", "train.guard=true", "train.kl_coef=0.1"], 2),
        (["train.old_log_prob=recompute"], 1),
        (["sample.share_prefix=true"], 0),  # three groups, in calls of two and one as in the rollout
        (["sample.share_prefix=true", "train.updates_per_epoch=3"], 1),
        (["sample.share_prefix=true", "train.batch_size=9", "sample.train_batch_size=9"], 0),  # more than there are
    ],
)
@pytest.mark.filterwarnings("ignore:config.train.updates_per_epoch")
def test_calls_beside_a_replay_are_counted_as_the_epoch_deals_its_batches(changes, forwards):
    config = recipe("sample.num_batches_per_epoch=3", *changes)
    assert traits_of(config).forwards(config) == forwards

"""The four runs that docs/healthy_run.md shows; `python tools/dev/healthy_run.py` makes them all."""

from __future__ import annotations

from ml_collections import ConfigDict

from config.grpo import tiny_recam, tiny_recam_hacking


def normal() -> ConfigDict:
    """A third of the demo, measured more often and on the conditions for tuning."""
    config = tiny_recam()
    config.num_epochs = 40
    config.eval.every = 10
    config.eval.split = "tune"
    config.eval.num_conditions = 80
    config.eval.fixed_conditions = 32
    return config


def flat() -> ConfigDict:
    """Noise so weak that copies differ by their initial noise, which no update can credit, at a small rate."""
    config = normal()
    config.sample.noise_level = 0.1
    config.sample.same_initial_noise = config.sample.share_prefix = False
    config.train.learning_rate = 5e-5
    return config


def hacked() -> ConfigDict:
    """One narrow reward."""
    config = tiny_recam_hacking()
    config.eval.fixed_conditions = 32
    return config


def collapsing() -> ConfigDict:
    """Twenty times the demo's rate."""
    config = normal()
    config.train.learning_rate = 8e-3
    return config

"""The ConfigDict that recipes start from; `flow_grpo/settings/schema.py` declares the knobs."""

from __future__ import annotations

import dataclasses
from typing import get_args

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from flow_grpo.settings.schema import KNOBS, Config


def get_config() -> ConfigDict:
    """Return all knobs at their defaults; a knob that is not in the schema cannot be set."""
    config = ConfigDict(dataclasses.asdict(Config()))
    config.sample.num_image_per_prompt = config.sample.get_oneway_ref("k")
    config.lock()
    for path, knob in KNOBS.items():
        section, _, name = path.rpartition(".")
        if isinstance(knob.default, dict):
            config[section][name].unlock()  # a recipe may add entries
        elif knob.default is None:
            config[section][name] = placeholder(get_args(knob.kind)[0])
    return config

"""From the words of a command line to the checked configuration of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence

from flow_grpo.rewards.base import check_name
from flow_grpo.run import starts
from flow_grpo.settings.checks import check_world
from flow_grpo.settings.reference import command_line
from flow_grpo.settings.schema import Config


def read_command_line(words: Sequence[str] | None, doc: str | None = None) -> tuple[Config, str]:
    """Return the checked configuration and its recipe, "FILE:RECIPE"; print what a resumed run takes from where.

    `words` are by default the process's; `doc` is the docstring of the program, for its help. ConfigError on every rank
    for a setting that cannot work.
    """
    known, overrides = command_line(doc).parse_known_args(words)
    config, lines = starts.configuration(known.config, overrides)
    if lines and int(os.environ.get("RANK", "0")) == 0:
        print("\n".join(lines), flush=True)
    for name in config.reward.weights:
        check_name(name, config.reward.remote)
    check_world(config, int(os.environ.get("WORLD_SIZE", "1")))
    return config, known.config

"""What a program answers before it imports torch and model libraries, which takes seconds."""

from __future__ import annotations

import argparse
import sys

from flow_grpo.runtime.processes import refused
from flow_grpo.settings.loading import unchecked


def answer_at_once(parser: argparse.ArgumentParser) -> None:
    """Exit here where the words of the command line ask for help, are not understood, or set a knob wrongly.

    Call it in a program before the imports that take long; whatever passes is parsed again by `main`.
    """
    try:
        known, overrides = parser.parse_known_args()
        if getattr(known, "config", None):
            unchecked(known.config, overrides)
    except ValueError as error:
        sys.exit(refused(error))

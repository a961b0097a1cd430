"""The suite: one file per file under test, plus shared helpers."""

import flow_grpo  # noqa: F401 - before anything imports torch, see there

"""The suite, in the rooms of what it tests, and its shared helpers."""

import flow_grpo  # noqa: F401 - before anything imports torch, see there

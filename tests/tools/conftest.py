"""Data that several tests of tools read."""

from __future__ import annotations

from pathlib import Path

import pytest

from flow_grpo.data.tiny_world import ensure_tiny_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the smallest tiny world, not to be changed: 2 scenes to train on, 1 held out, 24x32, 5 frames."""
    root = tmp_path_factory.mktemp("world") / "tiny"
    ensure_tiny_world(root, "unit_test")
    return root

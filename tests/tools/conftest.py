"""Data that several tests of tools read."""

from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_folder


@pytest.fixture
def one_batch(world: Path, tmp_path: Path) -> dict[str, object]:
    """Return knobs that make `tiny_recam` one batch of a group of 4 with a random model."""
    return {
        "model.path": make_tiny_folder(tmp_path / "model"),
        "data.root": world,
        "data.tiny_world": "unit_test",
        "data.tune_scenes": 0,
        "device": "cpu",
        "sample.train_batch_size": 4,
        "sample.k": 4,
        "sample.num_batches_per_epoch": 1,
        "train.batch_size": 2,
        "eval.num_conditions": 4,
        "eval.videos": 1,
    }

"""Tests of what is set aside of the training data."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest

from flow_grpo.data.multicam import Scene
from flow_grpo.data.splits import set_aside


def test_scenes_are_set_aside_by_name_whatever_their_order_and_number():
    def aside(scenes, count):
        return set_aside(scenes, count, "scenes", attrgetter("name"))

    scenes = [Scene(Path(), f"train/f18_aperture10/scene{number}", ("cam01", "cam02"), None) for number in range(30)]
    rest, chosen = aside(scenes, 8)
    assert len(chosen) == 8 and sorted([*rest, *chosen], key=scenes.index) == scenes
    assert (rest, chosen) == (sorted(rest, key=scenes.index), sorted(chosen, key=scenes.index))
    assert chosen != scenes[:8]
    assert aside(scenes[::-1], 8) == (rest[::-1], chosen[::-1])
    assert aside([scene for scene in scenes if scene != rest[0]], 8)[1] == chosen
    assert aside(scenes, 0) == (scenes, [])
    with pytest.raises(ValueError, match=r"data\.tune_scenes is 30, must be below the 30 training scenes"):
        aside(scenes, 30)

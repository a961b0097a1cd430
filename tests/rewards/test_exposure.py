"""Exposure: each part by hand, its tolerance, and what is no fault."""

import dataclasses

import pytest
import torch
from torch import Tensor

from flow_grpo.maths.poses import PRESETS
from flow_grpo.rewards.exposure import PARTS, Exposure, grid, looks
from tests.room_films import conditions, film
from tests.textured_room import shoot, slowed, source_path
from tests.tricks import gridded, pressed

TOLERANCE = {name: tolerance for name, tolerance, _ in PARTS}
SCALE = {name: scale for name, _, scale in PARTS}
CONDITION = conditions(film(["pan_left"]))[0]


def flat(red: float, green: float | None = None, blue: float | None = None, frames: int = 5) -> Tensor:
    """Return a video (3, T, 32, 48) of one colour."""
    colour = torch.tensor([red, red if green is None else green, red if blue is None else blue])
    return colour[:, None, None, None].expand(3, frames, 32, 48).clone()


def judged(video: Tensor, source: Tensor, target: Tensor | None = None) -> tuple[float, dict[str, float]]:
    """Return the value and the excess of every part."""
    chosen = dataclasses.replace(CONDITION, source_video=source, target_video=target)
    result = Exposure()(video[None], [chosen])
    assert result.valid.all() and result.causes == ("",) and set(result.info) == set(Exposure.measures)
    return float(result.values), {name: float(excess) for name, excess in result.info.items()}


def only(part: str, excess: float) -> dict[str, float]:
    return pytest.approx({name: excess * (name == part) for name in TOLERANCE}, abs=1e-5)


def test_what_is_measured():
    video = flat(0.2, 0.6, 0.4, frames=5)
    video[:, 2] += 0.1
    video[0, :, :16] = 0.0
    found = dict(zip(TOLERANCE, looks(video).tolist(), strict=True))
    assert found["clipped"] == pytest.approx(1 / 6)  # red, in half of each frame
    assert found["saturation"] == pytest.approx(0.5 * 0.4 + 0.5 * 0.6, abs=0.03)
    assert found["grid"] == pytest.approx(0, abs=1e-6)
    assert found["luma"] == pytest.approx(0.299 * 0.1 + 0.587 * 0.62 + 0.114 * 0.42, abs=0.01)


def test_clipping_counts_beyond_the_source_and_only_upwards():
    source, burnt = flat(0.5), flat(0.5)
    burnt[:, :, :8], burnt[:, :, 8:16] = 1.0, 0.0
    excess = 0.5 - TOLERANCE["clipped"]
    value, found = judged(burnt, source)
    assert found == only("clipped", excess)
    assert value == pytest.approx(-1 / 5)
    value, found = judged(source, burnt)
    assert found == only("clipped", 0) and value == 0


def test_flicker_is_what_the_neighbours_do_not_explain():
    flickering, drifting = flat(0.5), flat(0.5)
    flickering[:, 2] += 0.1
    drifting += 0.01 * torch.arange(-2, 3)[None, :, None, None]
    _, found = judged(flickering, flat(0.5 + 0.02))
    assert found == only("flicker", (0.05 + 0.1 + 0.05) / 3 - TOLERANCE["flicker"])
    assert judged(drifting, flat(0.5))[0] == 0


@pytest.mark.parametrize("sign", [1, -1])
def test_brightness_counts_both_ways(sign):
    value, found = judged(flat(0.5 + sign * 0.1), flat(0.5))
    assert found == only("luma", 0.1 - TOLERANCE["luma"])
    assert value == pytest.approx(-(0.1 - TOLERANCE["luma"]) / SCALE["luma"] / 5)


@pytest.mark.parametrize(("spread", "asked"), [(0.2, 0.0), (0.0, 0.2)])
def test_saturation_counts_both_ways(spread, asked):
    # Red and blue apart, with green where the brightness stays.
    seen, source = (flat(0.5 + s / 2, 0.5 - s / 2 * (0.299 - 0.114) / 0.587, 0.5 - s / 2) for s in (spread, asked))
    _, found = judged(seen, source)
    assert found == only("saturation", 0.2 - TOLERANCE["saturation"])


@pytest.mark.parametrize("period", [8, 16])
def test_a_grid_is_found_in_texture(period):
    video = shoot(source_path(3), (240, 416), painted=True)
    lined = video.clone()
    lined[..., ::period, :] += 6 / 255
    lined[..., ::period] += 6 / 255
    value, found = judged(lined, video)
    assert found["grid"] > TOLERANCE["grid"] and value < -3 * Exposure.floor


def test_lines_every_23_pixels_and_pictures_of_fewer_than_four_tiles_are_no_grid():
    pictures = torch.full((2, 320, 400), 0.5)
    pictures[..., ::23] += 0.1
    assert grid(pictures) < 1e-3
    pictures = torch.full((2, 320, 400), 0.5)
    pictures[..., ::16] += 0.1
    assert grid(pictures) > 0.01
    assert grid(torch.rand(3, 24, 32)) == 0


def test_a_camera_that_moves_by_a_period_a_frame_is_no_grid():
    """A mean over frames would add up the same columns of texture at every frame."""
    texture = torch.rand(192, 1000, generator=torch.Generator().manual_seed(0))
    moving = torch.stack([texture[:, 16 * frame : 16 * frame + 416] for frame in range(21)])
    still = moving[:1].expand(21, -1, -1)
    assert grid(moving) < 1.5 * grid(still) + 0.01


def test_what_lies_between_source_and_true_view_is_right_and_a_part_costs_at_most_a_fifth():
    dark, middle, bright = flat(0.3), flat(0.5), flat(0.7)
    assert judged(middle, dark, bright)[0] == 0
    assert judged(bright, dark, bright)[0] == 0
    assert judged(bright, dark)[0] < -0.1
    assert judged(flat(0.9), dark, bright)[0] < -0.1
    assert judged(flat(0.9), flat(0.1))[0] == pytest.approx(-1 / 5)


def test_two_frames_are_refused():
    with pytest.raises(ValueError, match="at least 3 frames, got videos of 2"):
        Exposure()(flat(0.5, frames=2)[None], [CONDITION])


def test_other_views_of_the_room_and_their_jpeg_copies_cost_nothing():
    """Beside the source alone: what the tolerances were measured for."""
    size, frames = (120, 208), 11
    source = shoot(source_path(frames), size, painted=True)
    for preset in PRESETS:
        video = shoot(slowed(preset, frames, 1.0), size, painted=True, take=2)
        assert judged(video, source)[0] > -Exposure.floor, preset
    assert judged(pressed(video, 50), source)[0] > -Exposure.floor
    assert judged(gridded(video), source)[0] < -3 * Exposure.floor

"""Source match: the order of cheats, the cap by the true view."""

import dataclasses

import pytest
import torch

from flow_grpo.maths.pictures import blur
from flow_grpo.rewards.source_match import SourceMatch, SourceTexture, differences
from tests.room_films import conditions, film, like_a_codec

TARGET = film(["arc_left", "zoom_in", "translate_up"], rooms=2)
SOURCE = film(["pan_right", "pan_left", "tilt_down"], rooms=2)
CONDITIONS = conditions(TARGET, source=SOURCE.videos)


def values(videos, chosen=CONDITIONS) -> torch.Tensor:
    result = SourceMatch()(videos, chosen)
    assert result.valid.all()
    return result.values


def test_the_true_view_and_what_does_better_have_the_best_value():
    assert values(TARGET.videos).tolist() == [0] * 6
    assert values(SOURCE.videos).tolist() == [0] * 6


def test_new_content_and_blur_cost_more_than_a_codec():
    codec = values(like_a_codec(TARGET.videos))
    assert (codec > -0.03).all()
    cheats = {
        "the other room": TARGET.videos.roll(3, 0),
        "noise": torch.rand(TARGET.videos.shape, generator=torch.Generator().manual_seed(0)),
        "grey": torch.full_like(TARGET.videos, 0.5),
        "blur": blur(TARGET.videos, 4.0),
        "faded": 0.5 * TARGET.videos + 0.5 * TARGET.videos.mean(dim=(1, 3, 4), keepdim=True),
    }
    for name, videos in cheats.items():
        assert values(videos).mean() < 1.5 * codec.mean(), name


def test_each_direction_finds_its_own_fault():
    video, source = TARGET.videos[0], SOURCE.videos[0]
    new, lost = differences(video, source)
    grey = torch.full_like(video, 0.5)
    patched = video.clone()
    patched[:, :, 8:16, 8:16] = torch.rand(3, 5, 8, 8, generator=torch.Generator().manual_seed(0))
    more_new, more_lost = differences(patched, source) - torch.stack([new, lost])
    assert more_new > 2 * more_lost > 0
    grey_new, grey_lost = differences(grey, source) - torch.stack([new, lost])
    assert grey_lost > 1.5 * grey_new > 0


def test_a_copy_has_no_difference_and_flat_colours_differ_by_their_distance():
    assert differences(TARGET.videos[0], TARGET.videos[0]).tolist() == pytest.approx([0, 0], abs=1e-3)
    dark, light = torch.full((3, 2, 8, 8), 0.2), torch.full((3, 2, 8, 8), 0.5)
    assert differences(dark, light).tolist() == pytest.approx([0.3, 0.3])


def test_without_a_true_view_the_distances_count_in_full():
    chosen = [dataclasses.replace(condition, target_video=None) for condition in CONDITIONS]
    result = SourceMatch()(TARGET.videos, chosen)
    assert (result.values < 0).all()
    assert torch.allclose(result.values, -(result.info["new"] + result.info["lost"]) / 2)


def textures(videos: torch.Tensor) -> torch.Tensor:
    return SourceTexture()(videos, CONDITIONS).values


def test_another_camera_costs_less_than_a_spoiled_picture():
    assert textures(SOURCE.videos).tolist() == [0] * 6
    true = textures(TARGET.videos).mean()
    noise = 0.05 * torch.randn(TARGET.videos.shape, generator=torch.Generator().manual_seed(0))
    blocks = TARGET.videos.clone()
    blocks[..., ::8] += 0.1
    faded = 0.5 * TARGET.videos + 0.25
    for spoiled in (TARGET.videos + noise, blocks, faded, blur(TARGET.videos, 2.0)):
        assert textures(spoiled).mean() < 1.5 * true < 0


def test_the_distance_is_that_of_sorted_differences():
    def edges(video: torch.Tensor) -> torch.Tensor:
        return torch.cat([video.diff(dim=dim).abs().flatten() for dim in (-1, -2)]).sort().values

    exact = [(edges(one) - edges(other)).abs().mean() for one, other in zip(TARGET.videos, SOURCE.videos, strict=True)]
    assert torch.allclose(-textures(TARGET.videos), torch.stack(exact), atol=1e-3)

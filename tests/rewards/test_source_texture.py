"""Source texture: another camera costs little, a spoiled picture much."""

import torch

from flow_grpo.maths.pictures import blur
from flow_grpo.rewards.source_texture import SourceTexture
from tests.room_films import conditions, film

TARGET = film(["arc_left", "zoom_in", "translate_up"], rooms=2)
SOURCE = film(["pan_right", "pan_left", "tilt_down"], rooms=2)
CONDITIONS = conditions(TARGET, source=SOURCE.videos)


def values(videos: torch.Tensor) -> torch.Tensor:
    return SourceTexture()(videos, CONDITIONS).values


def test_another_camera_costs_less_than_a_spoiled_picture():
    assert values(SOURCE.videos).tolist() == [0] * 6
    true = values(TARGET.videos).mean()
    noise = 0.05 * torch.randn(TARGET.videos.shape, generator=torch.Generator().manual_seed(0))
    blocks = TARGET.videos.clone()
    blocks[..., ::8] += 0.1
    faded = 0.5 * TARGET.videos + 0.25
    for spoiled in (TARGET.videos + noise, blocks, faded, blur(TARGET.videos, 2.0)):
        assert values(spoiled).mean() < 1.5 * true < 0


def test_the_distance_is_that_of_sorted_differences():
    def edges(video: torch.Tensor) -> torch.Tensor:
        return torch.cat([video.diff(dim=dim).abs().flatten() for dim in (-1, -2)]).sort().values

    exact = [(edges(one) - edges(other)).abs().mean() for one, other in zip(TARGET.videos, SOURCE.videos, strict=True)]
    assert torch.allclose(-values(TARGET.videos), torch.stack(exact), atol=1e-3)

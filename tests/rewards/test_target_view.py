"""Agreement with the true view: hand values, known displacements, and the order of speeds and cheats."""

import dataclasses

import pytest
import torch
from einops import rearrange

from flow_grpo.maths.pictures import blur
from flow_grpo.maths.room import render_video
from flow_grpo.rewards.target_view import TargetPsnr, TargetView, align, psnr_db, ssim
from tests.room_films import HEIGHT, INTRINSICS, WIDTH, conditions, film, like_a_codec

PRESETS = ["pan_right", "zoom_in", "zoom_out", "arc_left"]
TRUE = film(PRESETS, rooms=2)
CONDITIONS = conditions(TRUE)


def score(videos, chosen=CONDITIONS):
    return TargetView()(videos, chosen)


def test_psnr_is_a_mean_of_decibels_over_frames_and_ssim_of_constants_follows_its_formula():
    target = torch.full((1, 3, 2, 8, 8), 0.5)
    video = target.clone()
    video[:, :, 0] += 0.1
    video[:, :, 1] += 0.01
    assert psnr_db(video, target).item() == pytest.approx(30, abs=1e-3)
    assert psnr_db(target, target).item() == pytest.approx(100)
    first, second = torch.full((1, 3, 2, 16, 16), 0.4), torch.full((1, 3, 2, 16, 16), 0.6)
    expected = (2 * 0.4 * 0.6 + 1e-4) / (0.4**2 + 0.6**2 + 1e-4)
    assert ssim(first, second).item() == pytest.approx(expected, abs=1e-4)
    assert ssim(TRUE.videos, TRUE.videos).tolist() == pytest.approx([1] * 8, abs=1e-5)
    assert (ssim(blur(TRUE.videos, 2.0), TRUE.videos) < 0.97).all()


@pytest.mark.parametrize("pixels", [(0.25, 0.0), (0.0, -1.0), (2.0, 1.0), (-4.0, 0.0)])
def test_a_known_shift_is_measured_below_a_tenth_of_a_pixel(pixels):
    shifted = INTRINSICS + torch.tensor([0.0, 0.0, *pixels])
    absolute = (TRUE.references[:, None] @ TRUE.true[:, :1]).float()
    moved = render_video(TRUE.rooms, absolute, shifted, HEIGHT, WIDTH, 4)
    displacement, _ = align(rearrange(moved, "b c 1 h w -> b c h w"), TRUE.videos[:, :, 0])
    expected = (pixels[0] ** 2 + pixels[1] ** 2) ** 0.5
    assert (displacement * WIDTH).tolist() == pytest.approx([expected] * 8, abs=max(0.1, 0.06 * expected))


def test_contrast_and_blur_are_not_taken_for_motion_but_counted_as_mismatch():
    frames = rearrange(TRUE.videos, "b c t h w -> (b t) c h w")
    for changed in (0.25 + 0.5 * frames, blur(frames, 1.0)):
        displacement, mismatch = align(changed, frames)
        assert (displacement * WIDTH).median() < 0.15
        assert (mismatch > 0.005).all()


def test_the_true_view_has_the_best_value_and_a_picture_of_nothing_a_worse_one_than_a_wrong_motion():
    result = score(TRUE.videos)
    assert result.values.tolist() == pytest.approx([0] * 8, abs=1e-4)
    assert result.info["psnr_db"].tolist() == pytest.approx([100] * 8)
    frozen = score(TRUE.videos[:, :, :1].expand_as(TRUE.videos)).values
    noise = torch.rand(TRUE.videos.shape, generator=torch.Generator().manual_seed(0))
    mean = TRUE.videos.mean(dim=(3, 4), keepdim=True).expand_as(TRUE.videos)
    for nothing in (torch.full_like(TRUE.videos, 0.5), torch.zeros_like(TRUE.videos), mean, noise):
        assert (score(nothing).values < frozen).all()
        assert (score(nothing).values < -0.8).all()


def test_the_value_falls_with_the_distance_from_the_commanded_speed():
    def at(speed: float) -> torch.Tensor:
        return score(like_a_codec(film(PRESETS, speed=speed, rooms=2).videos)).values

    for speeds in ((1.0, 0.95, 0.8, 0.5, 0.3, 0.0), (1.0, 1.05, 1.2, 1.5)):
        means = [float(at(speed).mean()) for speed in speeds]
        assert means == sorted(means, reverse=True), means
    assert (at(1.0) > at(0.8)).all()


def test_near_the_truth_the_value_tells_speeds_apart_where_psnr_does_not():
    """Samples of one group differ in sharpness and noise by luck; the score must see the motion through it."""
    luck = [{"sigma": 0.5, "noise": 0.02}, {"sigma": 0.8, "noise": 0.01}, {"sigma": 1.1, "noise": 0.03}]
    near, far = (
        [score(like_a_codec(film(PRESETS, speed=speed, rooms=2).videos, seed=i, **how)) for i, how in enumerate(luck)]
        for speed in (1.0, 0.85)
    )

    def signal_to_noise(pick) -> float:
        good, bad = (torch.stack([pick(result) for result in results]) for results in (near, far))
        noise = ((good.var(0) + bad.var(0)).mean() / 2).sqrt()
        return float((good.mean() - bad.mean()) / noise)

    value, psnr = signal_to_noise(lambda r: r.values), signal_to_noise(lambda r: r.info["psnr_db"])
    assert value > 2
    assert value > 2 * psnr


def test_a_target_video_that_is_missing_or_of_another_size_masks_its_own_sample_only():
    chosen = list(CONDITIONS)
    chosen[2] = dataclasses.replace(chosen[2], target_video=None)
    chosen[0] = dataclasses.replace(chosen[0], target_video=torch.zeros(3, 5, 12, 16))
    result = score(like_a_codec(TRUE.videos), chosen)
    assert result.valid.tolist() == [row not in (0, 2) for row in range(8)]
    assert "(3, 5, 12, 16)" in result.causes[0]
    assert "no true view" in result.causes[2] and result.causes[3] == ""
    assert result.values[2].isnan() and result.info["ssim"][2].isnan()
    whole = score(like_a_codec(TRUE.videos))
    assert torch.allclose(result.values[result.valid], whole.values[result.valid], atol=1e-5)
    chosen = [dataclasses.replace(condition, target_video=None) for condition in CONDITIONS]
    result = score(TRUE.videos, chosen)
    assert not result.valid.any()
    assert set(result.info) == set(TargetView.measures)


def test_the_pixel_reward_is_the_psnr():
    videos = (TRUE.videos + 0.1).clamp(0, 1)
    found = TargetPsnr()(videos, CONDITIONS)
    assert torch.equal(found.values, psnr_db(videos, TRUE.videos)) and found.valid.all() and found.info == {}

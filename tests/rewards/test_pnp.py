"""Cameras found by anchored points, against cameras that are known."""

import functools
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from flow_grpo.maths.poses import PRESETS, preset_path, rot_err, trans_err
from flow_grpo.rewards.camera.anchors import PosedFrames, Source, make_source
from flow_grpo.rewards.camera.features import Features, find_features, match
from flow_grpo.rewards.camera.pnp import GATE, MappedView, camera_matrix, locate, locate_video
from tests.textured_room import LARGE, SMALL, film, grey, intrinsics, slowed, source_path, spoiled

FRAMES, ALL_FRAMES = 5, 21


@functools.cache
def anchored(size: tuple[int, int], frames: int) -> Source:
    seen = PosedFrames(grey(film("source", size, frames)), source_path(frames).numpy(), tuple(range(frames)))
    start = time.process_time()
    source = make_source(seen, None, camera_matrix(intrinsics(size).tolist()))
    print(f"\n| anchors, {size[0]}x{size[1]}, {frames} frames | | | {time.process_time() - start:.1f} |")
    assert source.fault == ""
    return source


def found(video: Tensor) -> NDArray[np.float64]:
    source = anchored((video.shape[2], video.shape[3]), video.shape[1])
    return locate_video(
        [find_features(picture) for picture in grey(video)], range(video.shape[1]), source.views, source.camera
    )


def errors(video: Tensor, path: Tensor, name: str = "") -> tuple[Tensor, Tensor]:
    """Return degrees and centimetres (T,), and print a row of docs/camera_rewards.md's table."""
    anchored((video.shape[2], video.shape[3]), video.shape[1])  # made before the clock starts
    start = time.process_time()
    poses = torch.from_numpy(found(video))
    seconds = time.process_time() - start
    degrees, centimetres = rot_err(path, poses).rad2deg(), 100 * trans_err(path, poses)
    turn, move = (f"{error.mean():.3f} / {error.max():.3f}" for error in (degrees, centimetres))
    print(f"| {name}, {video.shape[2]}x{video.shape[3]} | {turn} | {move} | {seconds:.1f} |")
    return degrees, centimetres


def changed(video: Tensor, how: str) -> Tensor:
    if how == "over-exposed":
        return (1.6 * video + 40 / 255).clamp(0, 1)
    if how == "darkened":
        return 0.35 * video
    return spoiled(video, sigma=2.5 if "blur" in how else 0.0, quality=70, sprite=True)


def cases(quick: list[str], size: tuple[int, int], presets: Iterable[str]) -> list[Any]:
    """Return preset, size and frames: some of a few small frames, and slow ones of all frames of `size`."""
    slow = [pytest.param(preset, size, ALL_FRAMES, marks=pytest.mark.slow) for preset in presets]
    return [*((preset, SMALL, FRAMES) for preset in quick), *slow]


@pytest.mark.parametrize(
    ("preset", "size", "frames"),
    [*cases(["pan_right", "zoom_in", "arc_left"], SMALL, PRESETS), *cases([], LARGE, PRESETS)],
)
def test_every_preset_is_measured_to_a_tenth_of_a_degree_and_a_centimetre(preset, size, frames):
    degrees, centimetres = errors(film.__wrapped__(preset, size, frames), preset_path(preset, frames), preset)
    assert degrees.max() < 0.1 and centimetres.max() < 1


@pytest.mark.parametrize(
    ("preset", "size", "frames"),
    cases(
        ["pan_left", "zoom_out", "arc_left"], LARGE, ["pan_left", "tilt_up", "zoom_out", "translate_down", "arc_left"]
    ),
)
def test_a_slow_video_is_reported_as_slow(preset, size, frames):
    video = film.__wrapped__(preset, size, frames, 0.8)
    true, commanded = slowed(preset, frames, 0.8), preset_path(preset, frames)
    degrees, centimetres = errors(video, true, f"{preset} at 0.8, against 0.8")
    assert degrees.max() < 0.1 and centimetres.max() < 1
    degrees, centimetres = errors(video, commanded, f"{preset} at 0.8, against the command")
    assert torch.allclose(degrees, rot_err(commanded, true).rad2deg(), atol=0.1)
    assert torch.allclose(centimetres, 100 * trans_err(commanded, true), atol=1.0)


SEEN = ["pan_right", "zoom_in", "arc_right"]


@pytest.mark.parametrize("how", ["sprite, JPEG 70", "sprite, blur, JPEG 70", "over-exposed", "darkened"])
@pytest.mark.parametrize(("preset", "size", "frames"), [*cases(["arc_right"], SMALL, SEEN), *cases([], LARGE, SEEN)])
def test_spoiled_pictures_move_the_estimate_little(preset, size, frames, how):
    video = changed(film.__wrapped__(preset, size, frames), how)
    degrees, centimetres = errors(video, preset_path(preset, frames), f"{preset}, {how}")
    assert degrees.max() < 0.3 and centimetres.max() < 3


@pytest.mark.parametrize("what", ["noise", "mirrored", "tiled", "flat"])
def test_what_does_not_show_the_scene_is_not_placed_in_it(what):
    video = film("arc_right")
    shown = {
        "noise": torch.rand(video.shape, generator=torch.Generator().manual_seed(0))[:1].expand_as(video),
        "mirrored": video.flip(-1),
        "tiled": video[:, :, ::2, ::2].repeat(1, 1, 2, 2),
        "flat": torch.full_like(video, 0.5),
    }
    assert np.isnan(found(shown[what])).all()


def test_twelve_distinct_features_are_enough_and_moving_anchors_serve_only_their_own_frame():
    source = anchored(SMALL, FRAMES)
    view = source.views[0]
    features = find_features(grey(film("source"))[0])
    spread = np.random.default_rng(0).permutation(len(view))
    matched = spread[np.isin(spread, match(features.descriptors, view.descriptors)[1])]

    def located(count: int, views: int = 1) -> bool:
        rows = matched[:count]
        few = MappedView(0, view.descriptors[rows], view.xyz[rows], view.lasting[rows])
        return bool(np.isfinite(locate(features, 0, [few] * views, source.camera)).all())

    assert [located(count) for count in (GATE - 1, GATE)] == [False, True]
    assert not located(GATE - 1, views=5)
    brief = MappedView(3, view.descriptors, view.xyz, np.zeros(len(view), np.bool_))
    assert np.isfinite(locate(features, 3, [brief], source.camera)).all()
    assert np.isnan(locate(features, 2, [brief], source.camera)).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_picture_whose_only_agreeing_matches_are_one_place_is_not_located(seed):
    """OpenCV raises for inliers without extent. Mirrored videos make them, and must not be masked for it."""
    draw = np.random.default_rng(seed)
    descriptors = draw.normal(size=(14, 128)).astype(np.float32)
    descriptors /= np.linalg.norm(descriptors, axis=1, keepdims=True)
    features = Features(draw.uniform(10, 200, (14, 2)), descriptors)
    lasting, ahead = np.ones(14, np.bool_), np.array([0.0, 0.0, 5.0])
    views = [MappedView(0, descriptors, draw.uniform(-3, 3, (14, 3)) + ahead, lasting)]
    # The first feature is seen by five more views, which place it alike; the second in another place by each.
    for _ in range(5):
        xyz = np.stack([views[0].xyz[0], draw.uniform(-3, 3, 3) + ahead])
        views.append(MappedView(0, descriptors[:2], xyz, lasting[:2]))
    assert np.isnan(locate(features, 0, views, camera_matrix([420.0, 420.0, 208.0, 120.0]))).all()


def test_the_principal_point_counts_from_the_middle_of_the_first_pixel():
    assert camera_matrix([840.4, 841.0, 416.0, 240.0]).tolist() == [[840.4, 0, 415.5], [0, 841.0, 239.5], [0, 0, 1]]

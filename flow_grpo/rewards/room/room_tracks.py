"""The furnished world's independent judge of cameras: points followed through the video, and PnP.

Points of the first frame, which is filmed from the known reference camera, have known places in the room. They are
followed from frame to frame (pyramidal Lucas-Kanade on colours, forwards and backwards), and the camera of each frame
is the pose that projects their places to where they are found, by robust least squares. New points are picked up as the
view changes. Nothing is rendered and no picture is compared with the room: the judge shares no principle, and no
mistake, with `room_pose` and the rewards of `room_path`, which compare renderings.
"""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
import torch
from cv2.typing import MatLike
from einops import rearrange
from numpy.typing import NDArray
from scipy.optimize import least_squares
from torch import Tensor

from flow_grpo.maths.room import frame_times, trace
from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.camera.features import Floats
from flow_grpo.rewards.camera.pnp import camera_matrix
from flow_grpo.rewards.results import scored_rows
from flow_grpo.rewards.room.room_fit import Viewpoints
from flow_grpo.rewards.room.room_pose import RoomPose, closeness

GRID = 2  # pixels between points; of all on the grid the more textured 60 % are followed
WINDOW, LEVELS = 7, 2  # of Lucas-Kanade: pixels, and halvings of the picture
BACK = 0.5  # pixels: largest distance from its start to which a point is followed back
DRIFT = 1.0  # pixels: a point found again from the frame in which it was picked up is taken from there
SPREAD = 0.3  # pixels: scale of the Cauchy loss
STRAYED = 3.0  # pixels from its projection, at which a point is given up: it moves on its own, or was confused
LEAST = 12  # points that place a camera
STOP = (cv2.TERM_CRITERIA_EPS | cv2.TERM_CRITERIA_COUNT, 30, 0.01)
Tracks = NDArray[np.void]  # (n,) points that are followed, rows of
TRACK = np.dtype(
    [
        ("here", np.float32, 2),  # pixels in the latest frame
        ("place", np.float64, 3),  # metres, relative to the reference camera
        ("since", np.int64),  # the frame in which it was picked up
        ("there", np.float32, 2),  # pixels in that frame
    ]
)


def follow(video: Tensor, viewpoint: Viewpoints) -> Floats:
    """Return the poses (T, 4, 4), relative to the reference camera, of a video (3, T, h, w) in [0, 1].

    NaN from the first frame on in which too few points are followed. `viewpoint` is that of one video.
    """
    pictures = [p.numpy() for p in rearrange((255 * video).round().byte(), "c t h w -> t h w c").contiguous()]
    camera = camera_matrix(viewpoint.intrinsics[0].tolist())
    poses = np.full((len(pictures), 4, 4), np.nan)
    poses[0] = np.eye(4)
    tracks: Tracks = np.zeros(0, TRACK)
    place, step = np.zeros(6), np.zeros(6)  # world-to-camera: rotation vector and translation, and their last change
    for number in range(1, len(pictures)):
        new = _pick_up(pictures, number - 1, poses[number - 1], tracks["here"], camera, viewpoint)
        tracks = _move_on(pictures, number, np.concatenate([tracks, new]))
        if len(tracks) < LEAST:
            break
        fits = [_place(start, tracks, camera) for start in (place, place + step)]
        found = min(fits, key=lambda fit: fit[1])[0]
        place, step = found, found - place
        tracks = tracks[np.linalg.norm(_project(place, tracks, camera)[0], axis=1) < STRAYED]
        if len(tracks) < LEAST:
            break
        turn = cv2.Rodrigues(place[:3])[0].T
        poses[number] = np.eye(4)
        poses[number, :3, :3], poses[number, :3, 3] = turn, -turn @ place[3:]
    return poses


def _pick_up(
    pictures: Sequence[MatLike], number: int, pose: Floats, taken: NDArray[np.float32], camera: Floats, view: Viewpoints
) -> Tracks:
    """Return new points of a frame whose pose (4, 4) is known, apart from those that are `taken`."""
    picture = pictures[number]
    height, width = picture.shape[:2]
    y, x = (grid.ravel() for grid in np.mgrid[GRID : height - GRID : GRID, GRID : width - GRID : GRID])
    textures = [cv2.cornerMinEigenVal(colour, 3)[y, x] for colour in cv2.split(picture)]
    texture = np.sum(textures, axis=0)
    points = np.stack([x, y], axis=1).astype(np.float32)[texture > np.quantile(texture, 0.4)]
    points = points[np.abs(points[:, None] - taken).max(axis=2).min(axis=1, initial=np.inf) > 1.5 * GRID]
    rays = np.linalg.solve(camera, np.concatenate([points, np.ones((len(points), 1))], axis=1).T).T
    absolute = view.references[:, None] @ torch.from_numpy(pose)
    room = view.rooms.at(frame_times(len(pictures))[[number]])
    depth = trace(room, absolute.float(), torch.from_numpy(rays).float()).depth[0, 0].numpy()
    new = np.zeros(len(points), TRACK)
    new["here"], new["there"], new["since"] = points, points, number
    new["place"] = (rays * depth[:, None]) @ pose[:3, :3].T + pose[:3, 3]
    return new


def _move_on(pictures: Sequence[MatLike], number: int, tracks: Tracks) -> Tracks:
    """Return the points that are found in frame `number`, from the frame before it and back."""
    before, after = pictures[number - 1], pictures[number]
    moved, found = _find(before, after, tracks["here"].copy())
    back, returned = _find(after, before, moved)
    found &= returned & (np.linalg.norm(back - tracks["here"], axis=1) < BACK)
    for first in set(tracks["since"].tolist()) - {number - 1}:
        own = tracks["since"] == first
        again, fine = _find(pictures[first], after, tracks["there"][own], moved[own])
        near = fine & (np.linalg.norm(again - moved[own], axis=1) < DRIFT)
        moved[own] = np.where(near[:, None], again, moved[own])
    found &= (moved > 1).all(axis=1) & (moved < np.array(after.shape[1::-1]) - 2).all(axis=1)
    tracks["here"] = moved
    return tracks[found]


def _find(
    first: MatLike, second: MatLike, points: NDArray[np.float32], near: NDArray[np.float32] | None = None
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return where points (n, 2) of one picture are in another, and which are found; `near` is a guess, if known."""
    if not len(points):
        return points, np.zeros(0, bool)
    levels, flags = (LEVELS, 0) if near is None else (0, cv2.OPTFLOW_USE_INITIAL_FLOW)
    guess = points.copy() if near is None else near.copy()
    moved, status, _ = cv2.calcOpticalFlowPyrLK(
        first, second, points, guess, winSize=(WINDOW, WINDOW), maxLevel=levels, criteria=STOP, flags=flags
    )
    return np.asarray(moved, np.float32), status.ravel() > 0


def _project(place: Floats, tracks: Tracks, camera: Floats) -> tuple[Floats, Floats]:
    """Return how far (n, 2) points project from where they are, in pixels, and the derivative (2 n, 6)."""
    seen, slope = cv2.projectPoints(tracks["place"].copy(), place[:3], place[3:], camera, None)
    return np.asarray(seen[:, 0] - tracks["here"], np.float64), np.asarray(slope[:, :6], np.float64)


def _place(start: Floats, tracks: Tracks, camera: Floats) -> tuple[Floats, float]:
    """Return the pose (6,) that projects the points best, and its cost."""
    fit = least_squares(
        lambda place: _project(place, tracks, camera)[0].ravel(),
        start,
        jac=lambda place: _project(place, tracks, camera)[1],
        loss="cauchy",
        f_scale=SPREAD,
    )
    return fit.x, fit.cost


class RoomTracks(RoomPose):
    """Closeness of the camera to its command by followed points: the furnished world's reference metric.

    A frame whose points are lost counts as if the camera stood still since the last one that was located, and scores
    both caps. `info`: what comes with `closeness`; picture and travel by `room_pose`; and as a second
    opinion that one's errors, `rendered_rot_err_deg` and `rendered_trans_err_m`.
    """

    name = "room_tracks"
    floor = 0.06  # standard deviation of the value over codec reconstructions of 26 exact videos
    measures = (*RoomPose.measures, "rendered_rot_err_deg", "rendered_trans_err_m")

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score (B, 3, T, h, w) videos in [0, 1]; not valid without room, reference pose or intrinsics."""
        rendered, found = super().__call__(videos, conditions), self.locate(videos, conditions)
        lost = found.isnan().any(dim=(-1, -2))
        latest = torch.where(lost, 0, torch.arange(lost.shape[1])).cummax(dim=1).values
        held = found.gather(1, latest[..., None, None].expand_as(found))

        def score(rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
            commanded = torch.stack([conditions[row].need_poses() for row in rows])
            value, errors = closeness(commanded, held[rows], lost[rows])
            other = {name: values[rows] for name, values in rendered.info.items()}
            second = {f"rendered_{name}": other[name] for name in ("rot_err_deg", "trans_err_m")}
            return value, other | errors | second

        return scored_rows(rendered.causes, self.measures, score)

    def follow(self, videos: Tensor, viewpoints: Viewpoints) -> Tensor:
        """Return the poses (B, T, 4, 4) found in videos of rooms that are known; NaN for lost frames."""
        each = [viewpoints.take(torch.tensor([number])) for number in range(len(videos))]
        return torch.stack([torch.from_numpy(follow(*pair)) for pair in zip(videos.float(), each, strict=True)])

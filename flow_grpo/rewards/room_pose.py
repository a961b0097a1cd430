"""The camera of every frame, found by comparing the frame with renderings of a known room (analysis by synthesis).

The exact reward of the tiny world: the pose of a frame is the one whose rendering matches it best, independent of the
command. Each frame is tried at many poses, then refined by Levenberg-Marquardt on its colours. Three things make it
exact on small, soft pictures:

* walls meet in anti-aliased edges (the distance to the edge says which share of a pixel each wall covers), so the
  strongest lines of the picture have a gradient instead of jumping between pixels;
* blur and contrast of the frame are fitted with the pose, and mean colours are removed: otherwise a codec's blur of one
  pixel, or a tenth more brightness, moves the pose by a degree and ten centimetres;
* a frame also starts from the poses of its neighbours, so one good start is enough for the whole video.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from einops import rearrange, repeat
from torch import Tensor

from flow_grpo.maths.pictures import blur_matrix, shrink
from flow_grpo.maths.poses import (
    pose,
    relative,
    rot_deg_frame_mean,
    rot_err,
    rotation_matrix,
    trans_err,
    trans_m_mean,
)
from flow_grpo.maths.room import Room, render, stack_rooms
from flow_grpo.maths.soft_room import Raster, draw, draw_slopes
from flow_grpo.maths.where_rows import choose
from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.results import scored_rows

ROOM_FILE = "room.json"  # in a scene folder: the room that it was filmed in
COLUMNS = (8, 16, 32)  # of the coarse, middle and fine pictures, at most
STARTS = 4  # initial poses of a frame that are refined
GUESS_YAW, GUESS_PITCH = (-30.0, -15.0, 0.0, 15.0, 30.0), (-12.0, 0.0, 12.0)  # degrees
GUESS_MOVES = (  # metres right, down, forward
    (0.0, 0.0, 0.0),
    (1.2, 0.0, 0.3),
    (-1.2, 0.0, 0.3),
    (0.0, 0.0, 1.2),
    (0.0, 0.0, -1.2),
    (0.0, 0.8, 0.0),
    (0.0, -0.8, 0.0),
)
COMMAND_SCALES = (0.3, 0.6, 1.0, 1.3)
BLUR = 1.5  # pixels: sigma of the blurred rendering that is mixed in
MARGIN = 0.1  # metres between the camera and the walls
LARGEST_TURN, LARGEST_MOVE = 0.3, 0.8  # radians and metres of one step
LOST = 0.5  # unexplained share of a frame's variance: under 0.1 after a codec, above 1 for another place
SMALLEST_CONTRAST = 0.03  # standard deviation of colours below which a frame shows nothing
ROT_CAP_DEG, TRANS_CAP_M = 45.0, 2.0


@dataclasses.dataclass(frozen=True)
class RoomPoses:
    """Where B videos of T frames were taken from.

    Attributes:
        poses: (B, T, 4, 4) float64 OpenCV camera-to-world in metres, relative to the reference camera.
        residual: (B, T) rms colour error in [0, 1] of the best pose, after fitting blur, contrast and mean colour.
    """

    poses: Tensor
    residual: Tensor


@dataclasses.dataclass(frozen=True)
class _View:
    """N frames at one resolution, as planes of P pixels.

    Attributes:
        room: N rooms.
        raster: pixel positions, in pixels of the full video.
        colours: (3, N, 1, P) the frames, each less its mean colour.
        size: rows and columns.
        blur: matrices (rows, rows), (columns, columns) that blur an image.
    """

    room: Room
    raster: Raster
    colours: Tensor
    size: tuple[int, int]
    blur: tuple[Tensor, Tensor]


def _view(room: Room, frames: Tensor, unproject: Tensor, columns: int) -> _View:
    """Shrink frames (N, 3, h, w) to at most `columns` columns and prepare them to be compared with renderings."""
    height, width = frames.shape[-2:]
    small = shrink(frames, columns)
    size = small.shape[-2], small.shape[-1]
    block = width / size[1]
    y = (torch.arange(size[0]) + 0.5) * (height / size[0])
    x = (torch.arange(size[1]) + 0.5) * (width / size[1])
    grid_y, grid_x = torch.meshgrid(y, x, indexing="ij")
    pixels = torch.stack([grid_x, grid_y, torch.ones_like(grid_x)], dim=-1).flatten(0, 1)
    colours = rearrange(small, "n c y x -> c n 1 (y x)").contiguous()
    colours = colours - colours.mean(-1, keepdim=True)
    blur = blur_matrix(size[0], BLUR / block), blur_matrix(size[1], BLUR / block)
    return _View(room, Raster(pixels, unproject, block / math.sqrt(12)), colours, size, blur)


@dataclasses.dataclass(frozen=True)
class _Fit:
    """M candidate poses for each of N frames.

    Attributes:
        poses: (N, M, 4, 4) absolute.
        look: (N, M, 2) weight of the blurred rendering, and contrast less 1.
        cost: (N, M) mean square colour error.
        normal: (N, M, 8, 8) J^T J.
        gradient: (N, M, 8) J^T r.
    """

    poses: Tensor
    look: Tensor
    cost: Tensor
    normal: Tensor
    gradient: Tensor


def _linearise(view: _View, poses: Tensor, look: Tensor) -> _Fit:
    """Compare frames with renderings; return cost, J^T J and J^T r of a Gauss-Newton step."""
    drawn = draw_slopes(view.room, poses, view.raster)  # (7, 3, N, M, P)
    softer = ((view.blur[0] @ drawn.unflatten(-1, view.size)) @ view.blur[1].T).flatten(-2) - drawn
    blur, contrast = look[..., None].unbind(-2)
    drawn = drawn + blur * softer
    drawn = drawn - drawn.mean(-1, keepdim=True)
    error = rearrange((1 + contrast) * drawn[0] - view.colours, "c n m p -> n m (c p)")
    softer = softer[:1] - softer[:1].mean(-1, keepdim=True)
    jacobian = torch.cat([(1 + contrast) * drawn[1:], softer, drawn[:1]])
    jacobian = rearrange(jacobian, "k c n m p -> n m k (c p)").contiguous()
    normal = jacobian @ jacobian.mT
    gradient = (jacobian @ error[..., None])[..., 0]
    return _Fit(poses, look, error.square().mean(-1), normal, gradient)


def _refine(view: _View, poses: Tensor, steps: int) -> _Fit:
    """Improve M poses (N, M, 4, 4) of each frame by Levenberg-Marquardt, rejecting steps that make one worse."""
    fit = _linearise(view, poses, torch.zeros(*poses.shape[:2], 2))
    damping = torch.full_like(fit.cost, 1e-3)
    limit = view.room.half_size[:, None] - MARGIN
    for _ in range(steps):
        diagonal = fit.normal.diagonal(dim1=-2, dim2=-1)
        ridge = damping[..., None] * diagonal + 1e-6
        step = -torch.linalg.solve(fit.normal + torch.diag_embed(ridge), fit.gradient[..., None])[..., 0]
        turn, move, look = step.split([3, 3, 2], dim=-1)
        turn = turn * (LARGEST_TURN / turn.norm(dim=-1, keepdim=True).clamp_min(LARGEST_TURN))
        move = move * (LARGEST_MOVE / move.norm(dim=-1, keepdim=True).clamp_min(LARGEST_MOVE))
        centres = (fit.poses[..., :3, 3] + move).clamp(-limit, limit)
        moved = pose(rotation_matrix(turn) @ fit.poses[..., :3, :3], centres)
        trial = _linearise(view, moved, (fit.look + look).clamp(-0.6, 1.5))
        better = trial.cost < fit.cost
        fit = choose(better, trial, fit)
        damping = torch.where(better, 0.1 * damping, 10 * damping)
    return fit


def _cost(view: _View, drawn: Tensor) -> Tensor:
    """Return the (N, M) mean square colour error of renderings (3, N, M, P), without fitting their look."""
    return (drawn - drawn.mean(-1, keepdim=True) - view.colours).square().mean(dim=(0, -1))


def _best(poses: Tensor, cost: Tensor, count: int) -> Tensor:
    """Return the `count` poses of each frame with the lowest cost, best first."""
    index = cost.topk(count, dim=1, largest=False).indices
    return poses.gather(1, repeat(index, "n m -> n m r c", r=4, c=4))


def initial_poses(commanded: Tensor | None) -> Tensor:
    """Return initial poses (H, 4, 4), or (B, T, H, 4, 4) with a command, relative to the reference.

    A fixed grid of turns and moves around the reference pose, plus the commanded pose at each of `COMMAND_SCALES` of
    its path: the start only decides which minimum is found, so a command helps the search without biasing the result.
    """
    turns = torch.tensor([(pitch, yaw, 0.0) for pitch in GUESS_PITCH for yaw in GUESS_YAW]).deg2rad()
    moves = torch.tensor(GUESS_MOVES)
    spread = pose(
        repeat(rotation_matrix(turns), "turn r c -> (turn move) r c", move=len(moves)),
        repeat(moves, "move i -> (turn move) i", turn=len(turns)),
    )
    if commanded is None:
        return spread
    start = commanded[:, :1, :3, 3]
    path = commanded[..., :3, 3] - start
    centres = torch.stack([start + scale * path for scale in COMMAND_SCALES], dim=2)
    rotations = repeat(commanded[..., :3, :3], "b t r c -> b t scale r c", scale=len(COMMAND_SCALES))
    batch, frames = commanded.shape[:2]
    return torch.cat([repeat(spread, "m r c -> b t m r c", b=batch, t=frames), pose(rotations, centres).float()], dim=2)


def _unproject(intrinsics: Tensor, batch: int) -> Tensor:
    """Return (batch, 3, 3) inverse camera matrices of (4,) or (batch, 4) fx, fy, cx, cy."""
    fx, fy, cx, cy = intrinsics.float().expand(batch, 4).unbind(-1)
    zero, one = torch.zeros_like(fx), torch.ones_like(fx)
    rows = [(1 / fx, zero, -cx / fx), (zero, 1 / fy, -cy / fy), (zero, zero, one)]
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


def _search(views: tuple[_View, _View, _View], initial: Tensor, frames: int) -> _Fit:
    """Return one fitted pose a frame from initial poses (N, H, 4, 4), coarse to fine; N holds videos of `frames`."""
    coarse, middle, fine = views
    cameras = initial.clone()
    cameras[..., :3, :3] = initial[..., :3, :3] @ coarse.raster.unproject[:, None]
    first_look = render(coarse.room, cameras, coarse.raster.pixels).movedim(-1, 0)
    fit = _refine(coarse, _best(initial, _cost(coarse, first_look), STARTS), 3)
    poses = _best(fit.poses, fit.cost, 2)
    own = rearrange(poses[:, 0], "(b t) r c -> b t r c", t=frames)
    before, after = torch.cat([own[:, :1], own[:, :-1]], dim=1), torch.cat([own[:, 1:], own[:, -1:]], dim=1)
    neighbours = rearrange(torch.stack([before, after], dim=2), "b t side r c -> (b t) side r c")
    poses = torch.cat([poses, neighbours], dim=1)
    cost = _cost(middle, draw(middle.room, poses, middle.raster))
    fit = _refine(middle, _best(poses, cost, 2), 2)
    return _refine(fine, _best(fit.poses, fit.cost, 1), 3)


@torch.no_grad()
def estimate_poses(
    videos: Tensor, rooms: Room, reference_poses: Tensor, intrinsics: Tensor, commanded: Tensor | None = None
) -> RoomPoses:
    """Return the camera pose of every frame, found from its own colours.

    A frame that shows another place still gets a pose, with a large residual.

    Args:
        videos: (B, 3, T, h, w) in [0, 1].
        rooms: B rooms from `stack_rooms`.
        reference_poses: (B, 4, 4) absolute camera-to-world of the reference cameras, in metres.
        intrinsics: (4,) or (B, 4) fx, fy, cx, cy in pixels.
        commanded: (B, T, 4, 4) commanded poses relative to the reference, for further initial poses.

    Raises:
        ValueError: a shape does not fit the videos.
    """
    batch, frames = videos.shape[0], videos.shape[2]
    if reference_poses.shape != (batch, 4, 4) or rooms.base.shape[0] != batch:
        raise ValueError(
            f"{batch} videos need as many rooms and reference poses (4, 4), "
            f"got {rooms.base.shape[0]} rooms and poses {tuple(reference_poses.shape)}"
        )
    if commanded is not None and commanded.shape != (batch, frames, 4, 4):
        raise ValueError(f"commanded poses have shape {tuple(commanded.shape)}, must be {(batch, frames, 4, 4)}")
    images = rearrange(videos, "b c t h w -> (b t) c h w").float()
    room = Room(**{f.name: getattr(rooms, f.name).repeat_interleave(frames, 0) for f in dataclasses.fields(Room)})
    unproject = _unproject(intrinsics, batch).repeat_interleave(frames, 0)
    initial = initial_poses(commanded)
    reference = reference_poses.repeat_interleave(frames, 0)[:, None].float()
    initial = reference @ (initial if commanded is None else initial.flatten(0, 1))
    limit = room.half_size[:, None] - MARGIN
    initial[..., :3, 3] = initial[..., :3, 3].clamp(-limit, limit)
    coarse, middle, fine = (_view(room, images, unproject, columns) for columns in COLUMNS)
    fit = _search((coarse, middle, fine), initial, frames)
    found = rearrange(fit.poses[:, 0], "(b t) r c -> b t r c", t=frames).double()
    left, _, right = torch.linalg.svd(found[..., :3, :3])  # float32 steps leave a rotation orthogonal to 1e-6 only
    found[..., :3, :3] = left @ right
    residual = rearrange(fit.cost[:, 0].sqrt(), "(b t) -> b t", t=frames)
    return RoomPoses(relative(reference_poses, found), residual)


@functools.lru_cache(maxsize=512)
def load_room(path: Path) -> Room:
    """Read a scene's `room.json`.

    Raises:
        OSError: no such file.
        ValueError: the file is not the JSON form of a room.
    """
    try:
        return Room.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the JSON form of a room: {error!r}") from error


class RoomPose:
    """Closeness of the camera to its command: an optional reward, and the tiny world's gold metric.

    value = -mean_i min(d_i, 2 m) / 1 m - mean_i min(theta_i, 45 deg) / 45 deg over frames i, with d_i the distance of
    camera centres and theta_i the rotation error. A frame is lost if no pose explains half its variance; it scores
    both caps, so that an empty picture never beats a wrong camera. `info`: `rot_err_deg` and `trans_err_m`
    (uncapped means over all frames), `residual`, and `located`, the share of frames that are not lost.
    """

    name = "room_pose"
    floor = 0.02  # about 1.5 cm and 0.2 degrees: half of what a codec's blur moves the estimate
    measures = ("rot_err_deg", "trans_err_m", "residual", "located")

    def __init__(self, data_root: str | Path) -> None:
        self.data_root = Path(data_root)

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score (B, 3, T, h, w) videos in [0, 1]; not valid without room, reference pose or intrinsics."""
        rooms: dict[int, Room] = {}
        causes = [""] * len(conditions)
        for row, condition in enumerate(conditions):
            if condition.reference_pose is None or condition.intrinsics is None:
                causes[row] = f"{condition.scene} has no reference pose or no intrinsics"
                continue
            try:
                rooms[row] = load_room(self.data_root / condition.scene / ROOM_FILE)
            except (OSError, ValueError) as error:
                causes[row] = f"no room to compare with: {error}"

        def score(rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
            return _score(videos[rows], stack_rooms(list(rooms.values())), [conditions[row] for row in rows])

        return scored_rows(causes, self.measures, score)


def _score(videos: Tensor, rooms: Room, conditions: Sequence[Condition]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return values (B,) and info; every condition has a reference pose and intrinsics."""
    commanded = torch.stack([condition.target_poses for condition in conditions])
    references = torch.stack([c.reference_pose for c in conditions if c.reference_pose is not None])
    intrinsics = torch.stack([c.intrinsics for c in conditions if c.intrinsics is not None])
    found = estimate_poses(videos, rooms, references, intrinsics, commanded)
    variance = rearrange(videos, "b c t h w -> b t c (h w)").var(-1).mean(-1)
    lost = found.residual.square() > LOST * variance.clamp_min(SMALLEST_CONTRAST**2)
    degrees = rot_err(commanded, found.poses).rad2deg().clamp(max=ROT_CAP_DEG).masked_fill(lost, ROT_CAP_DEG)
    metres = trans_err(commanded, found.poses).clamp(max=TRANS_CAP_M).masked_fill(lost, TRANS_CAP_M)
    info = {
        "rot_err_deg": rot_deg_frame_mean(commanded, found.poses).float(),
        "trans_err_m": trans_m_mean(commanded, found.poses).float(),
        "residual": found.residual.mean(-1),
        "located": 1 - lost.float().mean(-1),
    }
    return -(metres + degrees / ROT_CAP_DEG).mean(-1).float(), info

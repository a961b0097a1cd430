"""Errors of an estimated camera path against the commanded one, in all published conventions.

    A   CamI2V, RealCam-I2V: sums over frames, poses relative to the first frame; "rel": each path scaled by its reach
    B   ReDirector, Geo-Align: means; rotation over ordered frame pairs, translation after Sim(3) alignment

Numbers of different conventions are not comparable. An undefined error is None, never a number.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flow_grpo.maths import poses

LEAST_BASELINE_M = 0.01  # a shorter commanded path is a pure rotation: its translation error has no scale
LEAST_FRAMES = 3  # fewer cannot be aligned
CONVENTIONS = {
    "rot_deg_mean": "B",
    "trans_sim3_rel": "B",
    "rot_rad_sum": "A",
    "trans_rel_sum": "A",
    "cam_mc_rel_sum": "A",
    "rot_deg_frame_mean": "ours",
    "trans_m_mean": "ours",
}


def baseline_m(commanded: Tensor) -> float:
    """Return the largest distance between two cameras of a path (F, 4, 4), in metres."""
    centres = commanded[..., :3, 3].double()
    return float(torch.cdist(centres, centres).max())


def path_errors(commanded: Tensor, estimated: Tensor, *, metric: bool = False) -> dict[str, float | None]:
    """Return the errors named in `CONVENTIONS` of an estimated path.

    Both paths are taken relative to the first registered frame, so the estimate may be in any world frame.

    Args:
        commanded: (F, 4, 4) camera-to-world in metres.
        estimated: (F, 4, 4) camera-to-world, NaN for frames that were not registered; any unit unless `metric`.
        metric: the estimate is in metres.

    Returns:
        name -> value, or None: all errors with fewer than three registered frames; translation errors of a commanded
        path without motion; sums with a frame missing (they would be too small); metres of a non-metric estimate.
    """
    found = estimated.isfinite().flatten(1).all(1)
    errors: dict[str, float | None] = dict.fromkeys(CONVENTIONS)
    if int(found.sum()) < LEAST_FRAMES:
        return errors
    every, moves = bool(found.all()), baseline_m(commanded) >= LEAST_BASELINE_M
    commanded, estimated = commanded.double()[found], estimated.double()[found]
    commanded, estimated = poses.relative(commanded[0], commanded), poses.relative(estimated[0], estimated)
    turns = poses.rot_err(commanded, estimated)
    values = {
        "rot_deg_mean": poses.rot_deg_pair_mean(commanded, estimated),
        "rot_deg_frame_mean": turns.mean(-1).rad2deg(),
    }
    if every:
        values["rot_rad_sum"] = turns.sum(-1)
    if metric:
        values["trans_m_mean"] = poses.trans_err(commanded, estimated).mean(-1)
    if moves:
        values["trans_sim3_rel"] = poses.trans_sim3_rel(commanded, estimated)
    if moves and every:
        ours, theirs = _over_reach(commanded), _over_reach(estimated)
        values["trans_rel_sum"] = poses.trans_err(ours, theirs).sum(-1)
        values["cam_mc_rel_sum"] = poses.cam_mc(ours, theirs).sum(-1)
    # The registered frames may be static although the whole path moves: their errors are NaN.
    return errors | {name: float(value) for name, value in values.items() if math.isfinite(value)}


def _over_reach(path: Tensor) -> Tensor:
    """Scale camera centres of a path (F, 4, 4) by the largest distance from the first; static paths are unchanged."""
    reach = torch.linalg.vector_norm(path[:, :3, 3], dim=-1).max()
    scaled = path.clone()
    if float(reach) > poses.ZERO_BASELINE:
        scaled[:, :3, 3] /= reach
    return scaled

"""A second judge of cameras in the tiny worlds, written apart from the product: own ray casting in numpy and scipy.

It reads `room.json` by the description in flow_grpo/maths/room.py and shares no code with renderer, rewards or judges.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.spatial.transform import Rotation

Array = NDArray[np.float64]
BLOCK = 2  # pixels are compared as means of blocks
RAYS = 3  # per block and axis
STARTS = 3000
REFINED = 6


def sight(room: dict, camera: Array, time: float, rays: Array) -> Array:
    """Return colours (n, 3) seen along rays (n, 3) of a camera-to-world pose (4, 4), at a time within 0..1."""
    eye, look = camera[:3, 3], rays @ camera[:3, :3].T
    look = np.where(np.abs(look) < 1e-12, 1e-12, look)
    sizes = np.array(room["half_size"])
    exits = (np.sign(look) * sizes - eye) / look
    axis = exits.argmin(axis=1)
    rows = np.arange(len(look))
    nearest = exits[rows, axis]
    surface = 2 * axis + (look[rows, axis] > 0)
    home = np.zeros_like(look)
    for number, (centre, half, way) in enumerate(np.array(room["boxes"]).reshape(-1, 3, 3)):
        centre = centre + time * way
        one, other = (centre - half - eye) / look, (centre + half - eye) / look
        enters, leaves = np.minimum(one, other), np.maximum(one, other).min(axis=1)
        side = enters.argmax(axis=1)
        first = enters[rows, side]
        hit = (first < leaves) & (first > 0) & (first < nearest)
        nearest, axis = np.where(hit, first, nearest), np.where(hit, side, axis)
        surface, home = np.where(hit, 6 + number, surface), np.where(hit[:, None], centre, home)
    point = eye + nearest[:, None] * look
    local = point - home
    along = np.stack([np.where(axis == 0, local[:, 1], local[:, 0]), np.where(axis == 2, local[:, 1], local[:, 2])], 1)
    base, amplitude, frequency, phase = (
        np.array(room[n])[surface] for n in ("base", "amplitude", "frequency", "phase")
    )
    waves = np.cos(2 * np.pi * (frequency * along[:, None]).sum(-1) + phase)
    colour = 1 / (1 + np.exp(-base - (amplitude * waves[..., None]).sum(1)))
    lamp, share = np.array(room["lamp"][:3]), room["lamp"][3]
    towards = lamp - point
    facing = -np.sign(look[rows, axis]) * towards[rows, axis] / np.linalg.norm(towards, axis=1)
    return colour * (1 - share * (1 - np.clip(facing, 0, None)))[:, None]


def find_camera(room: dict, start: Array, frame: Array, time: float, focal: float) -> Array:
    """Return the pose (4, 4), relative to the `start` camera, that a frame (3, h, w) in [0, 1] was filmed from.

    The command has no part in it: random guesses in a wide range, of which the best are refined by least squares.
    """
    height, width = frame.shape[1:]
    rows, columns = height // BLOCK, width // BLOCK
    every = rows // 4
    picture = frame.reshape(3, rows, BLOCK, columns, BLOCK).mean(axis=(2, 4)).transpose(1, 2, 0)
    offsets = (np.arange(RAYS) + 0.5) / RAYS * BLOCK
    y = (BLOCK * np.arange(rows)[:, None] + offsets).ravel() - height / 2
    x = (BLOCK * np.arange(columns)[:, None] + offsets).ravel() - width / 2
    grid = np.stack([*np.meshgrid(x / focal, y / focal), np.ones((len(y), len(x)))], axis=-1)

    def posed(six: Array) -> Array:
        pose = np.eye(4)
        pose[:3, :3], pose[:3, 3] = Rotation.from_rotvec(np.radians(six[:3])).as_matrix(), six[3:]
        return start @ pose

    def error(six: Array) -> Array:
        seen = (
            sight(room, posed(six), time, grid.reshape(-1, 3)).reshape(rows, RAYS, columns, RAYS, 3).mean(axis=(1, 3))
        )
        return (seen - picture - (seen - picture).mean(axis=(0, 1))).ravel()

    def coarse_error(six: Array) -> float:
        rays = grid[RAYS // 2 :: every * RAYS, RAYS // 2 :: every * RAYS]  # the middle of some blocks
        seen = sight(room, posed(six), time, rays.reshape(-1, 3)).reshape(*rays.shape[:2], 3)
        apart = seen - picture[::every, ::every]
        return float(np.square(apart - apart.mean(axis=(0, 1))).mean())

    draw = np.random.default_rng(0)
    guesses = draw.uniform(-1, 1, (STARTS, 6)) ** 3 * [22, 48, 4, 2.4, 1.3, 2.5]  # most near the start
    best = np.argsort([coarse_error(guess) for guess in guesses])[:REFINED]
    fits = [least_squares(error, guesses[row], method="lm", x_scale=[10, 10, 10, 1, 1, 1]) for row in best]
    return np.linalg.inv(start) @ posed(min(fits, key=lambda fit: fit.cost).x)

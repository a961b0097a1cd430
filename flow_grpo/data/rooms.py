"""The rooms of the tiny worlds: bare ones for tests, furnished ones for people to look at, and what is filmed in them.

A model can learn what is outside the first view: five faces are the same in every room, so that a comparison with the
true view measures camera motion, not luck in guessing unseen walls.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from flow_grpo.maths.poses import PRESETS, pose, rotation_matrix
from flow_grpo.maths.room import FACES, Room, frame_times

HOUSE_SEED = 8  # of the faces that all rooms share
FAR = 1  # x+, the wall that differs from room to room
WAVES = 3
BARE_SIZE = (3.0, 2.0, 1.25)  # half extents in metres
SIZE = (3.5, 3.0, 1.4)
BOXES = 9
# Two columns from floor to ceiling and two tables, lower than any camera: x, y and half of width, depth and height.
FURNITURE = (
    (0.8, 0.72, 0.11, 0.11, SIZE[2]),
    (1.2, -0.8, 0.11, 0.11, SIZE[2]),
    (2.2, 1.1, 0.4, 0.5, 0.3),
    (1.7, -1.4, 0.35, 0.4, 0.22),
)

Surfaces = dict[str, Tensor]


def _surfaces(draw: torch.Generator, count: int, cycles: tuple[float, float], base: float, waves: float) -> Surfaces:
    """Draw textures of `count` surfaces: waves of so many cycles per metre; spreads of colour and waves in logits."""
    colour = base * torch.randn(count, 3, generator=draw)
    amplitude = waves * torch.randn(count, WAVES, 3, generator=draw)
    size = cycles[0] + (cycles[1] - cycles[0]) * torch.rand(count, WAVES, 1, generator=draw)
    angle = 2 * math.pi * torch.rand(count, WAVES, 1, generator=draw)
    phase = 2 * math.pi * torch.rand(count, WAVES, generator=draw)
    frequency = size * torch.cat([angle.cos(), angle.sin()], dim=-1)
    return {"base": colour, "amplitude": amplitude, "frequency": frequency, "phase": phase}


def bare_room(draw: torch.Generator, half_size: tuple[float, float, float] = BARE_SIZE) -> Room:
    """Draw an empty, evenly lit room, whose far wall is random; waves are half a small picture and longer."""
    textures = _surfaces(torch.Generator().manual_seed(HOUSE_SEED), FACES, (0.1, 0.4), 0.8, 1.0)
    wall = _surfaces(draw, FACES, (0.1, 0.4), 0.8, 1.0)
    for name, values in textures.items():
        values[FAR] = wall[name][FAR]
    return Room(torch.tensor(half_size), torch.zeros(0, 3, 3), torch.zeros(4), **textures)


def furnished_room(draw: torch.Generator) -> Room:
    """Draw a room with a lamp, door and window, two pictures, two columns, two tables and, in half, a moving thing.

    The door, the window and the five faces are the same in every room, and the furniture stands at the same places: how
    far away things are can be learned, as a large model has learned it of the world. The columns stand between camera
    and wall: before a wall alone a turn looks so much like a shift that a model learns to confuse them.
    """
    house = _surfaces(torch.Generator().manual_seed(HOUSE_SEED), FACES, (0.15, 0.5), 0.0, 0.35)
    house["base"] += torch.tensor(
        [[0.4, 0.5, 0.6], [0.0, 0.0, 0.0], [0.9, 0.5, -0.2], [0.1, 0.5, 0.9], [-0.1, -0.7, -1.3], [1.6, 1.5, 1.3]]
    )
    floor = 4
    house["amplitude"][floor, 0] = torch.tensor([0.5, 0.4, 0.3])  # planks
    house["frequency"][floor, 0] = torch.tensor([0.0, 1.25])
    wall = _surfaces(draw, FACES, (0.1, 0.5), 1.1, 0.5)
    things = _surfaces(draw, BOXES, (0.4, 1.2), 1.1, 0.4)
    fittings = _surfaces(torch.Generator().manual_seed(HOUSE_SEED), 2, (0.4, 1.2), 0.0, 0.3)
    fittings["base"] += torch.tensor([[-0.5, -1.2, -1.6], [1.5, 1.8, 2.2]])  # a brown door, a bright window
    for name, values in house.items():
        values[FAR] = wall[name][FAR]
        things[name][:2] = fittings[name]
        house[name] = torch.cat([values, things[name]])
    lamp = [_uniform(draw, -1, 2.5), _uniform(draw, -1.5, 1.5), SIZE[2] - 0.3, 0.55]
    return Room(torch.tensor(SIZE), _boxes(draw), torch.tensor(lamp), **house)


def _boxes(draw: torch.Generator) -> Tensor:
    x, y, z = SIZE
    boxes = [
        [(1.6, y - 0.02, -0.3), (0.45, 0.02, 1.1), (0.0, 0.0, 0.0)],  # the door
        [(1.2, 0.02 - y, 0.2), (0.7, 0.02, 0.55), (0.0, 0.0, 0.0)],  # the window
    ]
    for side in (-1, 1):  # pictures
        centre = (x - 0.02, side * _uniform(draw, 0.5, 2.0), _uniform(draw, 0.1, 0.7))
        boxes.append([centre, (0.02, _uniform(draw, 0.35, 0.8), _uniform(draw, 0.25, 0.5)), (0.0, 0.0, 0.0)])
    boxes += [[(x, y, height - z), (wide, deep, height), (0.0, 0.0, 0.0)] for x, y, wide, deep, height in FURNITURE]
    way = _uniform(draw, 0.5, 1.2) * (1 if _uniform(draw, 0, 1) < 0.5 else -1)
    size = _uniform(draw, 0.15, 0.28) if _uniform(draw, 0, 1) < 0.5 else 0.0
    centre = (_uniform(draw, 2.2, 3.0), _uniform(draw, -0.4, 0.4) - way / 2, _uniform(draw, -0.5, 0.5))
    boxes.append([centre, (size, size, size), (0.0, way if size else 0.0, 0.0)])
    return torch.tensor(boxes)


def _uniform(draw: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(1, generator=draw))


@dataclasses.dataclass(frozen=True)
class Shot:
    """A kind of camera path: a straight motion from the identity, of random size.

    Attributes:
        translation: camera centre at the last frame for a factor of 1, in metres: x right, y down, z forward.
        rotation: rotation vector at the last frame for a factor of 1, in degrees, same axes.
        speed: range of the factor on the translation, drawn log-uniformly.
        turn: range of the factor on the rotation, drawn uniformly and independently, so that a model cannot infer one
            from the other.
        ease: "even" speed, or "in", slow at first, or "out", slow at last.
    """

    translation: tuple[float, float, float]
    rotation: tuple[float, float, float]
    speed: tuple[float, float] = (0.2, 0.4)
    turn: tuple[float, float] = (0.25, 0.5)
    ease: str = "even"

    def path(self, draw: torch.Generator, frames: int) -> Tensor:
        """Draw a path (frames, 4, 4), float64, from the identity."""
        first, second = torch.rand(2, generator=draw, dtype=torch.float64).tolist()
        low, high = map(math.log, self.speed)
        speed, turn = math.exp(low + (high - low) * first), self.turn[0] + (self.turn[1] - self.turn[0]) * second
        progress = frame_times(frames).double()[:, None]
        progress = {"even": progress, "in": progress**2, "out": 1 - (1 - progress) ** 2}[self.ease]
        translation, rotation = torch.tensor((self.translation, self.rotation), dtype=torch.float64)
        return pose(rotation_matrix(progress * (turn * rotation).deg2rad()), progress * (speed * translation))


def _preset(name: str, **changes: object) -> Shot:
    return dataclasses.replace(Shot(PRESETS[name].translation, PRESETS[name].rotation), **changes)  # type: ignore[arg-type]


RECAMMASTER = {name: _preset(name) for name in PRESETS}
RAILS = {
    "truck_left": Shot((-2.0, 0.0, 0.0), (0.0, 0.0, 0.0)),
    "truck_right": Shot((2.0, 0.0, 0.0), (0.0, 0.0, 0.0)),
    "pedestal_up": Shot((0.0, -1.0, 0.0), (0.0, 0.0, 0.0)),
    "pedestal_down": Shot((0.0, 1.0, 0.0), (0.0, 0.0, 0.0)),
}
PUSHES = {
    "push_left": Shot((0.0, 0.0, 2.0), (0.0, -20.0, 0.0)),
    "push_right": Shot((0.0, 0.0, 2.0), (0.0, 20.0, 0.0)),
    "pull_up": Shot((0.0, 0.0, -2.0), (10.0, 0.0, 0.0)),
    "pull_down": Shot((0.0, 0.0, -2.0), (-10.0, 0.0, 0.0)),
}
# What a base model has seen with true videos: short paths.
LABELLED = {
    name: dataclasses.replace(shot, speed=(0.08, 0.2), turn=(0.1, 0.25)) for name, shot in (RECAMMASTER | RAILS).items()
}
# What is commanded without a true video to learn from: paths up to twice as long, and moves that turn.
UNLABELLED = {**{f"far_{name}": shot for name, shot in RECAMMASTER.items()}, **PUSHES}
# What nobody trains on: others again, uneven speeds, longer ones.
UNSEEN = {
    "far_truck_left": RAILS["truck_left"],
    "far_truck_right": RAILS["truck_right"],
    "crane_up": Shot((0.0, -1.0, 0.0), (0.0, -20.0, 0.0)),
    "crane_down": Shot((0.0, 1.0, 0.0), (0.0, 20.0, 0.0)),
    "ease_in_arc_left": _preset("arc_left", ease="in"),
    "ease_out_push_right": dataclasses.replace(PUSHES["push_right"], ease="out"),
    "longest_arc_right": _preset("arc_right", speed=(0.4, 0.5), turn=(0.5, 0.65)),
    "longest_pull_down": dataclasses.replace(PUSHES["pull_down"], speed=(0.4, 0.5), turn=(0.5, 0.65)),
}
# How sources are filmed.
SOURCES = {
    "still": Shot((0.0, 0.0, 0.0), (0.0, 0.0, 0.0)),
    "panning": Shot((0.0, 0.0, 0.0), (4.0, 12.0, 0.0), turn=(-0.7, 0.7)),
    "moving": Shot((0.6, 0.15, 0.5), (0.0, -6.0, 0.0), speed=(0.2, 0.6), turn=(-0.7, 0.7)),
}
SHOTS = LABELLED | UNLABELLED | UNSEEN | SOURCES

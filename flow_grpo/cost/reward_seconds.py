"""Seconds of the rewards on the host's cores, from what each took where it was measured."""

from __future__ import annotations

import math
from collections.abc import Collection

# CPU-seconds of a video on one core of an x86-64 server that others used as well, at two sizes: a textured room with
# true views (tools/dev/bench_rewards.py) at 33x240x416 and 81x480x832, the demos' rooms at 5x24x32 and 9x64x96.
VIDEO = {
    "features": (1.3, 2.0),
    "pose": (2.4, 3.1),
    "view_disp": (0.5, 0.7),
    "target_view": (2.8, 33.0),
    "target_psnr": (0.09, 1.2),
    "source_match": (0.2, 1.1),
    "source_texture": (0.71, 7.2),
    "motion_mag": (0.05, 0.25),
    "exposure": (0.05, 0.45),
    "sharpness": (0.12, 1.1),
    "room": (0.04, 0.12),
    "room_pose": (0.04, 0.36),
    "room_tracks": (0.13, 0.67),
}
# Once for the videos of a source (features: of a true view); these use all cores, features and poses frame by frame.
SOURCE = {"features": (1.3, 2.6), "pose": (4.3, 5.5), "view_disp": (0.0, 0.0)}
# Measurements that rewards share, each made once; other rewards are their own.
READ = {name: ["features", "pose"] for name in ("pose_rot", "pose_trans", "pose_dir", "smooth")}
READ |= {"view_disp": ["features", "view_disp"]}
READ |= {name: ["room"] for name in ("room_rot", "room_trans", "room_content")}


def reward_seconds(names: Collection[str], size: tuple[int, int, int], videos: int, sources: int, cores: int) -> float:
    """Return the seconds of a batch of videos of so many sources; rewards that are not measured take none."""
    found = 0.0
    parts = {part for name in names for part in READ.get(name, [name])}
    for name in parts & VIDEO.keys():
        least, most = (3_840, 55_296) if name.startswith("room") else (3_294_720, 32_348_160)  # pixels of all frames
        for (low, high), count in ((VIDEO[name], videos), (SOURCE.get(name, (0.0, 0.0)), sources)):
            if low:  # a power of the pixels between the sizes and beyond
                power = math.log(high / low) / math.log(most / least)
                rows = math.ceil(count / cores) if name in SOURCE else count
                found += rows * low * (math.prod(size) / least) ** power
    return found

"""Which way a source video is used to locate cameras: by anchors where it has some, else as one that stays in place."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import numpy as np

from flow_grpo.rewards.camera.anchors import PosedFrames, Source, make_source
from flow_grpo.rewards.camera.features import Floats
from flow_grpo.rewards.camera.fixed_source import FixedSource, make_fixed_source
from flow_grpo.rewards.camera.unposed import make_unposed_source

AnySource: TypeAlias = Source | FixedSource


def find_source(source: PosedFrames, target: PosedFrames | None, camera: Floats, depth: Floats | None) -> AnySource:
    """Return what locates the frames of videos made from a source; where nothing does, `fault` has every reason.

    Anchors come first where poses are known: they are exact. Without poses a camera that stays in place is looked for
    first, in a tenth of the time that structure from motion takes. A source's poses are NaN where they are not known;
    `target` is as for `make_source` and `make_unposed_source`, `depth` as for `make_fixed_source`.
    """
    posed = bool(np.isfinite(source.poses).all())
    fixed = None
    if not posed and target is None:
        fixed = make_fixed_source(source, camera, depth)
        if not fixed.fault:
            return fixed
    made = (make_source if posed else make_unposed_source)(source, target, camera)
    if not made.fault or (target is not None and depth is None):  # with a true view metres are asked for
        return made
    fixed = fixed or make_fixed_source(source, camera, depth)
    if not fixed.fault:
        return fixed
    return dataclasses.replace(made, fault=f"{made.fault}; nor does it stay in place: {fixed.fault}")

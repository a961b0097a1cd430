"""Published figures, each a claim of its paper, and the rule that shows them beside ours only under one protocol.

A protocol is a mapping of what decides a figure to its value, in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flow_grpo.maths.benchmarks import PRESET_FRAMES
from flow_grpo.maths.poses import PRESETS
from tools.published.davis import DAVIS_2016, LIST_NAME, read_list

# What ReDirector's public code does (inference.py, evaluate.py, eval_utils.py), which Geo-Align says it uses.
VIDEOS = len(read_list(DAVIS_2016))
REDIRECTOR = {
    "set": "davis",
    "videos": LIST_NAME,
    "sources": VIDEOS,
    "presets": len(PRESETS),
    "judged": VIDEOS * len(PRESETS),
    "frames": "all, 4n+1",
    "command": f"speed of {PRESET_FRAMES} frames",
    "size": "480x832",
    "estimator": "ViPE",
    "alignment": "Sim(3)",
}
PRINTED = ("printed_trans", "printed_rot_deg")  # our columns of `printed_errors`
NAMES = {"TransErr": PRINTED[0], "RotErr": PRINTED[1], "Dyn-MEt3R": "dyn_met3r", "MEt3R": "met3r"}


SOURCE, DATE = "Geo-Align, arXiv 2605.23903, tables 1 and 3", "2026-05"  # of all of these, measured by REDIRECTOR
# Model -> TransErr (share of the path), RotErr (degrees), Dyn-MEt3R (higher is better), MEt3R (lower is better).
CLAIMS = {
    "CogNVS": (0.0367, 6.950, 0.804, 0.274),
    "TrajectoryCrafter": (0.0293, 10.434, 0.824, 0.214),
    "ReCamMaster": (0.0245, 2.318, 0.797, 0.349),
    "ReDirector": (0.0149, 1.464, 0.850, 0.313),
    "Geo-Align": (0.0129, 1.365, 0.857, 0.308),
}


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return in one line where our protocol differs from the published one, "" if nowhere."""
    found = [f"{name} {ours.get(name)!r}, not {value!r}" for name, value in theirs.items() if ours.get(name) != value]
    return "; ".join(found)

"""Does a judge order a known-good video above broken ones? What `tools/reward_server.py --check` asks a server."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from flow_grpo.data.tiny_world import FURNISHED, caption, make_scene
from flow_grpo.maths.pictures import blur
from flow_grpo.maths.poses import relative
from flow_grpo.maths.room import render_video, stack_rooms
from flow_grpo.records import Condition
from flow_grpo.rewards.remote import protocol
from flow_grpo.rewards.remote.http_client import ask
from flow_grpo.rewards.remote.reward import HEALTH_S, RemoteReward
from tools.common import markdown_table

SPEC = dataclasses.replace(FURNISHED, frames=13, height=240, width=416)
SCENES = 3
WAVES = 6  # of fine texture on every surface, of 1 to 4 cycles per metre: smooth walls have too few features
PATHS = ("far_arc_left", "far_arc_right")  # the command and the wrong camera, in turn
WRONG_PROMPT = "a herd of elephants drinks at a river"
VIEW = ("camera", "target")
# Broken video -> what of `protocol.READ` a judge must read for it to be asked; () asks every one.
CASES: Mapping[str, tuple[str, ...]] = {
    "frozen": VIEW,
    "reversed": VIEW,
    "mirrored": (*VIEW, "source"),
    "blurred": (),  # but not of a judge of cameras: it may see through blur
    "noise": (),
    "wrong camera": VIEW,
    "wrong prompt": ("prompt",),
}


def not_asked(case: str, needs: tuple[str, ...]) -> str:
    """Return why a judge with these needs is not asked about a case, or ""."""
    wanted = CASES[case]
    if wanted and not set(wanted) & set(needs):
        return f"not asked: reads no {' or '.join(wanted)}"
    return "not asked: judges the camera" if case == "blurred" and "camera" in needs else ""


def examples(number: int) -> tuple[Condition, dict[str, Tensor]]:
    """Return a furnished room's condition, and "known-good" and each of `CASES` -> its video (3, T, h, w)."""
    names = ("moving", *(PATHS if number % 2 else PATHS[::-1]))
    scene = make_scene(SPEC, "check", number, names)
    poses, start = scene.poses, scene.poses[0, 0]
    draw, surfaces = torch.Generator().manual_seed(number), len(scene.room.base)
    angle, phase = 2 * math.pi * torch.rand(2, surfaces, WAVES, generator=draw)
    cycles = 1 + 3 * torch.rand(surfaces, WAVES, 1, generator=draw)
    fine = {"amplitude": 0.4 * torch.randn(surfaces, WAVES, 1, generator=draw).expand(-1, -1, 3), "phase": phase}
    fine["frequency"] = cycles * torch.stack([angle.cos(), angle.sin()], -1)
    textured = {name: torch.cat([getattr(scene.room, name), more], 1) for name, more in fine.items()}
    rooms = stack_rooms([dataclasses.replace(scene.room, **textured)] * len(names))
    source, good, wrong = render_video(rooms, poses.float(), SPEC.intrinsics(), SPEC.height, SPEC.width, 2)
    condition = Condition(
        index=number,
        gid=time.time_ns(),  # a server that was checked before must not answer from memory
        slot=0,
        prompt=f"{caption(source)}, two columns, two tables and pictures on the walls",
        source_video=source,
        target_video=good,
        target_poses=relative(start, poses[1]),
        source_poses=relative(start, poses[0]),
        reference_pose=start,
        intrinsics=SPEC.intrinsics(),
        scene=f"scene{number}",
    )
    return condition, {
        "known-good": good,
        "frozen": good[:, :1].expand_as(good),
        "reversed": good.flip(1),
        "mirrored": good.flip(3),
        "blurred": blur(good, SPEC.width / 40),
        "noise": torch.rand(good.shape, generator=draw),
        "wrong camera": wrong,
        "wrong prompt": good,
    }


def check(url: str, timeout_s: float) -> int:
    """Print for every score of a server how it orders broken videos, and what a score costs; return the exit code.

    Raises:
        ServiceError: the server does not say what it is.
        ValueError, LookupError, TypeError: what it says cannot be read.
    """
    said = ask(f"{url}/health", HEALTH_S)
    names = json.loads(said)["rewards"]
    (model, version), health = protocol.read_health(said, names[0])
    asked = ["known-good", *(case for case in CASES if not not_asked(case, health.needs))]
    judges = {name: RemoteReward(name, url, timeout_s, delays_s=()) for name in names}
    scores: dict[str, list[Tensor]] = {name: [] for name in names}  # a row per scene, as `asked`
    causes, seconds = {}, math.inf
    for number in range(SCENES):
        condition, films = examples(number)
        prompts = [WRONG_PROMPT if case == "wrong prompt" else condition.prompt for case in asked]
        given = [dataclasses.replace(condition, slot=slot, prompt=prompt) for slot, prompt in enumerate(prompts)]
        begun = time.monotonic()
        for name, judge in judges.items():
            result = judge(torch.stack([films[case] for case in asked]), given)
            # No value for a broken video is as good as a low one, unless measuring failed.
            unknown = torch.where(result.faults, torch.inf, -torch.inf)
            scores[name].append(torch.where(result.valid, result.values, unknown))
            causes |= {f"{name}, {case}": cause for case, cause in zip(asked, result.causes, strict=True) if cause}
        seconds = min(seconds, (time.monotonic() - begun) / len(asked))  # the model runs once for all its scores
    print(f"{model} ({version}) reads the video and {', '.join(health.needs) or 'nothing else'}\n")
    wrong = []
    for name in names:
        table = torch.stack(scores[name])
        below = ((table < table[:, :1]) & table[:, :1].isfinite()).sum(0).tolist()
        means = [f"{mean:.4f}" if math.isfinite(mean) else "no score" for mean in table.mean(0).tolist()]
        found = {case: [case, means[place], f"below in {below[place]} of {SCENES}"] for place, case in enumerate(asked)}
        rows = [found.get(case) or [case, "", not_asked(case, health.needs)] for case in CASES]
        print("\n".join(markdown_table((name, "mean", ""), [["known-good", means[0], ""], *rows])), end="\n\n")
        wrong += [f"{name} {case}" for case, count in zip(asked[1:], below[1:], strict=True) if count < SCENES]
    print("".join(f"no score of {place}: {cause}\n" for place, cause in causes.items()), end="")
    peak = json.loads(ask(f"{url}/health", HEALTH_S)).get("peak_gib") or {}
    memory = " and ".join(f"{gib:.2f} GiB ({kind})" for kind, gib in peak.items() if gib) or "not said"
    size = "x".join(map(str, protocol.as_wanted(films["noise"][None], [condition], health)[0].shape[2:]))
    print(f"{seconds:.3f} s a score of {size}, with sending; the server's peak memory: {memory}")
    print(
        f"does not order above: {'; '.join(wrong)}" if wrong else "orders known-good videos above all it is asked about"
    )
    return int(bool(wrong))

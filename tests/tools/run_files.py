"""A run folder as a finished run leaves it, with every kind of file that the report reads."""

import json
import math
from pathlib import Path
from typing import Any

import torch

from flow_grpo.reporting.metric_files import MetricFiles
from flow_grpo.run import starts
from flow_grpo.runtime.video_file import write_video
from flow_grpo.settings.loading import load_config

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "config/grpo.py:tiny_recam"
PANELS = ("source", "base", "now", "true view")
COLOURS = {"source": (40, 160, 40), "base": (200, 30, 30), "now": (30, 30, 200), "true view": (160, 160, 160)}
WIDTH, HEIGHT, FRAMES, EPOCHS = 48, 32, 12, 40
CAMERAS = {"arc_left": (0.3, 0.12), "zoom_in": (0.2, 0.25)}  # translation error before and after
MEASURED_ON = {"eval.num_conditions": 8, "eval.num_steps": 8, "eval.gold": "room_pose"}


def make_run(folder: Path, *overrides: str, command: str = "", videos: bool = True) -> Path:
    """Write a finished run of 40 epochs; `overrides` are its command line's."""
    config = load_config(str(ROOT / "config/grpo.py") + ":tiny_recam", overrides)
    device = "device cpu (x86_64, 2 cores); no npu"
    starts.record(folder, config, RECIPE, checkpoint=None, epoch=0, ranks=2, device=device, served={})
    change(folder / "starts/001.json", command=command or "train_grpo.py --config config/grpo.py:tiny_recam")
    starts.begin(folder)
    _write_metrics(folder)
    (folder / "summary.json").write_text(json.dumps(_summary()))
    if videos:
        _write_videos(folder / "videos")
    return folder


def change(file: Path, **values: Any) -> None:
    """Replace values of a JSON file's object."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def _write_metrics(folder: Path) -> None:
    files = MetricFiles(folder)
    files.append(_evaluation(0) | {"eval_floor/trans_err_m": 0.04}, 0)
    for epoch in range(1, EPOCHS + 1):
        row = {
            "reward/room_rot_mean": -2 + epoch / EPOCHS + 0.1 * math.sin(epoch),
            "reward/room_rot_group_std": 0.2,
            "reward/room_trans_mean": -0.2 + epoch / EPOCHS / 10,
            "reward/target_psnr_mean": 24 + epoch / EPOCHS,
            "policy/clip_fraction": 0.0,
            "policy/credit_share": 0.03 if epoch > 20 else 0.5,
            "train/grad_norm": 0.4 + 0.05 * math.cos(epoch),
            "train/bad_steps": 1.0 if epoch == 3 else 0.0,
            "train/updates": 1.0,
            "time/rollout_s": 1.5,
            "time/update_s": 0.5,
            "time/score_hidden_s": 9.0,
            "time/epoch_s": 2.0,
            "system/samples_per_s": 50.0,
            "system/mfu": 0.21,
            "system/tflops_per_device": 0.04,
            "system/memory_peak_gib": 0.9,
            "system/memory_total_gib": 23.5,
            "system/forward_equivalents": 700.0 * epoch,
        }
        files.append(row, epoch)
        if epoch % 20 == 0:
            files.append(_evaluation(epoch), epoch)


def _evaluation(epoch: int) -> dict[str, float]:
    done = epoch / EPOCHS
    found = {
        "eval/trans_err_m": 0.25 - 0.1 * done,
        "eval/target_view_psnr_db": 24.0 + done,
        "eval/room_rot": -2.0 + done,
    }
    for camera, (before, after) in CAMERAS.items():
        found[f"eval_by_camera/{camera}/trans_err_m"] = before + (after - before) * done
    if epoch:
        found |= {
            f"eval_change/trans_err_m{end}": -0.1 * done + more
            for end, more in (("", 0), ("_low", -0.02), ("_high", 0.02))
        }
    return found


def _summary() -> dict[str, Any]:
    return {
        "verdict": {
            "overall": "mixed",
            "aspects": {"camera": "better", "picture": "worse"},
            "in_words": "mixed: camera better (trans_err_m 0.25 → 0.15), picture worse (residual 0.0348 → 0.041)",
            "metrics": {"eval/trans_err_m": "better", "eval/target_view_psnr_db": "unclear"},
            "worse_by_camera": ["zoom_in trans_err_m +0.05 [+0.01, +0.09]"],
        },
        "before": {"eval/trans_err_m": 0.25, "eval/target_view_psnr_db": 24.0, "eval/room_rot": -2.0},
        "after": {
            "eval/trans_err_m": 0.15,
            "eval/trans_err_m_ci95": [-0.12, -0.08],
            "eval/target_view_psnr_db": 25.0,
            "eval/target_view_psnr_db_ci95": [-0.2, 2.2],
            "eval/room_rot": -1.0,
        },
        "change_by_camera": {
            "arc_left": {"eval/trans_err_m": [-0.18, -0.2, -0.16]},
            "zoom_in": {"eval/trans_err_m": [0.05, 0.01, 0.09]},
        },
        "floor": {"eval_floor/trans_err_m": 0.04},
        "measured_on": MEASURED_ON,
        "train_seconds": 80.0,
        "ended_by": "max_minutes",
    }


def _write_videos(folder: Path) -> None:
    panels = [{"name": n, "x": i * WIDTH, "y": 0, "width": WIDTH, "height": HEIGHT} for i, n in enumerate(PANELS)]
    video = torch.zeros(3, FRAMES, HEIGHT, WIDTH * len(PANELS), dtype=torch.uint8)
    for panel in panels:
        colour = torch.tensor(COLOURS[panel["name"]], dtype=torch.uint8).reshape(3, 1, 1, 1)
        video[..., panel["x"] : panel["x"] + WIDTH] = colour
    lines = []
    for kind, step in (("eval", 20), ("eval", EPOCHS), ("best", EPOCHS), ("worst", EPOCHS), ("train", EPOCHS)):
        file = f"{kind}_{step:06d}_scene.mp4"
        write_video(folder / file, video)
        angles = [0.1 * frame for frame in range(FRAMES)]
        commanded = [[math.sin(angle), 0.0, 1 - math.cos(angle)] for angle in angles]
        estimated = [None if frame == 5 else [x + 0.01, y, z] for frame, (x, y, z) in enumerate(commanded)]
        lines.append(
            {"file": file, "kind": kind, "step": step, "scene": f"val/scene of {kind}", "camera": "cam05"}
            | {"preset": "arc_left", "panels": panels, "scores": {"room_rot": -1.9}, "caption": "one sentence"}
            | {"before": {"room_rot": -2.4} if kind == "best" else {}}
            | {"paths": {"commanded": commanded, "estimated": estimated}}
        )
    (folder / "index.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

"""Both test sets on stand-ins in their layouts: rooms with known cameras, and files as ViPE and other scorers write."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor

from flow_grpo.data.rooms import bare_room
from flow_grpo.data.video_io import read_video
from flow_grpo.maths.benchmarks import preset_at_own_speed
from flow_grpo.maths.path_errors import path_errors
from flow_grpo.maths.poses import PRESETS, pose, preset_path, relative, rotation_matrix, trans_err
from flow_grpo.maths.room import render_video, stack_rooms
from flow_grpo.rewards.camera import structure_from_motion as motion
from flow_grpo.rewards.camera.matched_motion import Estimate
from flow_grpo.runtime.video_file import write_video
from tests.refusals import refusal
from tests.room_films import HEIGHT, INTRINSICS, WIDTH, reference_pose
from tools import benchmark, evaluate, generate
from tools.generation.options import parse
from tools.published import claims
from tools.published.redirect4d import target_path

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "assets" / "tiny_recam"
FILES = {"bear": 28, "dog": 7}  # frames in the folder
USED = {"bear": 25, "dog": 5}  # of which these are used; 25 are more than our own estimator looks at
SIZE = ["--size", f"{HEIGHT}x{WIDTH}"]
MOVING = [name for name, preset in PRESETS.items() if any(preset.translation)]


def film(path: Tensor, seed: int = 0) -> Tensor:
    """Film a room along a path relative to its first camera: (3, T, h, w) in [0, 1]."""
    room = stack_rooms([bare_room(torch.Generator().manual_seed(seed))])
    return render_video(room, (reference_pose(seed) @ path)[None].float(), INTRINSICS, HEIGHT, WIDTH)[0]


def run(*words: object) -> int:
    return benchmark.main([str(word) for word in words])


def write_davis(root: Path) -> Path:
    for number, (name, frames) in enumerate(FILES.items()):
        folder = root / "JPEGImages" / "480p" / name
        folder.mkdir(parents=True)
        pictures = (film(preset_path("arc_left", frames), number) * 255).round().byte().permute(1, 2, 3, 0).numpy()
        for frame, picture in enumerate(pictures):
            cv2.imwrite(str(folder / f"{frame:05d}.jpg"), cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))
    (root / "list.txt").write_text("\n".join(FILES))
    return root


def prepare_words(root: Path, *more: object) -> list[object]:
    return ["prepare", "davis", "--root", root, "--list", root / "list.txt", "--out", root / "out", *SIZE, *more]


@pytest.fixture(scope="module")
def filmed(tmp_path_factory) -> Path:
    """Return a prepared folder in which every video is filmed exactly along its command."""
    root = write_davis(tmp_path_factory.mktemp("davis"))
    assert run(*prepare_words(root)) == 0
    for number, (source, frames) in enumerate(USED.items()):
        for preset in PRESETS:
            video = film(preset_at_own_speed(preset, frames), number)
            write_video(root / "out" / "videos" / f"{source}_{preset}.mp4", video)
    return root


@pytest.fixture
def davis(filmed, tmp_path) -> Path:
    """Return a copy that a test may change."""
    return Path(shutil.copytree(filmed, tmp_path / "davis")) / "out"


def elsewhere(path: Tensor, scale: float = 7.0) -> Tensor:
    """Return a path in ViPE's own world and unit."""
    turn = rotation_matrix(torch.tensor([0.3, -0.8, 1.1], dtype=torch.float64))
    moved = pose(turn, torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64)) @ path
    moved[:, :3, 3] *= scale
    return moved


def write_vipe(folder: Path, name: str, path: Tensor) -> None:
    for part, data in (("pose", path.numpy()), ("intrinsics", np.tile([20.0, 20, 16, 12], (len(path), 1)))):
        (folder / name / part).mkdir(parents=True, exist_ok=True)
        np.savez(folder / name / part / f"{name}.npz", data=data.astype(np.float32), inds=np.arange(len(path)))


def vipe_of_davis(davis: Path, change=lambda path: path, scale: float = 7.0) -> Path:
    folder = davis.parent / "vipe"
    for source, frames in USED.items():
        for preset in PRESETS:
            write_vipe(folder, f"{source}_{preset}", elsewhere(change(preset_at_own_speed(preset, frames)), scale))
    return folder


def scored(out: Path, *more: object, place: str = "vipe") -> dict:
    assert run("score", out, *more) == 0
    return json.loads((out / "scores" / place / "metrics.json").read_text())


def mean(metrics: dict, column: str) -> float:
    return metrics["summary"]["metrics"][column]["mean"]


# --- DAVIS


def test_prepared_davis_holds_every_frame_path_and_name(davis):
    plan = json.loads((davis / "benchmark.json").read_text())
    assert [item["name"] for item in plan["items"]] == [f"{s}_{p}" for s in FILES for p in PRESETS]
    for source, frames in USED.items():
        kept = read_video(davis / "sources" / f"{source}.mp4", frames).permute(1, 2, 3, 0).numpy()
        for number, picture in enumerate(kept):
            file = davis.parent / "JPEGImages" / "480p" / source / f"{number:05d}.jpg"
            assert np.array_equal(cv2.cvtColor(picture, cv2.COLOR_RGB2BGR), cv2.imread(str(file)))
        with pytest.raises(ValueError, match=f"got {frames} of"):
            read_video(davis / "sources" / f"{source}.mp4", frames + 1)


def calls(out: Path) -> list[list[str]]:
    lines = [line for line in (out / "generate.sh").read_text().splitlines() if line.startswith("[")]
    return [shlex.split(line.split("generate.py ", 1)[1])[:-1] for line in lines]


def test_the_script_asks_generate_for_exactly_the_videos_of_the_list(filmed):
    names, numbers, davis = [], [], filmed / "out"
    for words in calls(davis):
        args = parse([*words, "--model", str(MODEL)], None)
        dataset, requests = generate.plan(args)
        for request in requests:
            preset = request.name.split("_", 1)[1]
            commanded = dataset.condition(request.index).target_poses
            assert torch.allclose(commanded, preset_at_own_speed(preset, args.frames), atol=1e-9)
            assert request.file(".mp4") == davis.resolve() / "videos" / f"{request.name}.mp4"
        names += [request.name for request in requests]
        numbers += [request.number for request in requests]
    assert names == [f"{s}_{p}" for s in FILES for p in PRESETS] and numbers == list(range(20))


def test_exact_poses_have_no_error_in_any_world_and_unit_and_pans_are_in_no_mean_of_translation(davis, capsys):
    metrics = scored(davis, "--vipe", vipe_of_davis(davis))
    for name, cell in metrics["summary"]["metrics"].items():
        sure = name.startswith("rot_")
        assert cell["mean"] == pytest.approx(0, abs=2e-3), name
        assert cell["rows"] == 2 * (len(PRESETS) if sure else len(MOVING)), name
    assert "trans_m_mean" not in metrics["summary"]["metrics"]  # the unit of these poses is not the metre
    text = capsys.readouterr().out
    assert "8 of 20 videos are commanded to stay in place" in text
    assert text.startswith((davis / "scores" / "vipe" / "benchmark.md").read_text())


def half_speed(path: Tensor) -> Tensor:
    slow = path.clone()
    slow[:, :3, 3] /= 2
    return slow


def test_half_the_speed_is_seen_in_metres_only(davis):
    metrics = scored(davis, "--vipe", vipe_of_davis(davis, half_speed, scale=1.0), "--metric")
    for column in ("trans_sim3_rel", "trans_rel_sum", "rot_deg_mean"):
        assert mean(metrics, column) == pytest.approx(0, abs=2e-3)
    for row in metrics["rows"]:
        path = preset_at_own_speed(row["camera_type"], row["frames"])
        assert row["trans_m_mean"] == pytest.approx(float(trans_err(path, half_speed(path)).mean()), abs=1e-6)
    assert mean(metrics, "trans_m_mean") > 0.01


def test_noisy_poses_have_the_errors_of_their_noise_over_all_frames(davis):
    draw = torch.Generator().manual_seed(5)
    seen = {}

    def noisy(path: Tensor) -> Tensor:
        noise = 0.01 * torch.randn(2, len(path), 3, generator=draw, dtype=torch.float64)
        moved = pose(path[:, :3, :3] @ rotation_matrix(noise[0]), path[:, :3, 3] + noise[1])
        seen[len(seen)] = path_errors(path, moved)
        return moved

    rows = scored(davis, "--vipe", vipe_of_davis(davis, noisy))["rows"]
    for row, errors in zip(rows, seen.values(), strict=True):
        assert row["frames"] == USED[row["source"]] and row["rot_deg_mean"] > 0.3
        for column, value in errors.items():
            assert row[column] == (None if value is None else pytest.approx(value, rel=1e-2)), column


def test_a_video_without_poses_of_vipe_has_failed_and_one_that_is_missing_is_counted(davis, capsys):
    folder = vipe_of_davis(davis)
    (folder / "dog_arc_left" / "pose" / "dog_arc_left.npz").unlink()
    (davis / "videos" / "dog_zoom_in.mp4").unlink()
    metrics = scored(davis, "--vipe", folder)
    lost = [row for row in metrics["rows"] if not row["registered"]]
    assert [(row["video"], row["cause"]) for row in lost] == [("dog_arc_left", "ViPE has no pose/dog_arc_left.npz")]
    out = capsys.readouterr().out
    assert "19 of the list's 20 videos are there; no poses were found of 1 of them." in out
    assert "sources 2, not 50; judged 18, not 500" in out and "Geo-Align |" not in out


def test_our_estimator_judges_the_same_videos_by_the_same_paths(davis, monkeypatch, capsys):
    def exact(video: Path, num_frames: int, frames: list[int], focal_px: float) -> Estimate:
        assert focal_px == 23.0
        return Estimate(elsewhere(preset_at_own_speed(video.stem.split("_", 1)[1], num_frames))[frames].numpy())

    monkeypatch.setattr(evaluate, "estimate", exact)
    metrics = scored(davis, "--focal-px", 23, "--workers", 0, place="own")
    assert mean(metrics, "rot_deg_mean") == pytest.approx(0, abs=1e-6) and metrics["summary"]["registered"] == 20
    assert f"estimator {motion.name()!r}" in capsys.readouterr().out


def test_videos_before_training_are_scored_apart_and_compared(davis):
    for file in list((davis / "videos").iterdir()):
        file.with_name(f"{file.stem}_before.mp4").write_bytes(file.read_bytes())
    folder = davis.parent / "vipe"
    for source, frames in USED.items():
        for preset in PRESETS:
            path = preset_at_own_speed(preset, frames)
            write_vipe(folder, f"{source}_{preset}_before", path[:1].repeat(frames, 1, 1))
    before = scored(davis, "--vipe", folder, "--before", place="vipe_before")
    vipe_of_davis(davis)
    file = davis / "scores" / "vipe_before" / "metrics.json"
    change = scored(davis, "--vipe", folder, "--baseline", file)["summary"]["baseline"]["metrics"]["rot_deg_mean"]
    assert change["mean"] == pytest.approx(-mean(before, "rot_deg_mean"), abs=2e-3) and change["rows"] == 20


# --- figures of other programs, and of papers


def test_published_figures_are_shown_beside_ours_under_the_same_protocol_only(davis, monkeypatch, capsys):
    folder = vipe_of_davis(davis)
    own = {"videos": "list.txt", "sources": 2, "judged": 20, "size": f"{HEIGHT}x{WIDTH}"}
    said = {"CLAIMS": {"Model X": claims.CLAIMS["CogNVS"]}, "SOURCE": "A paper", "DATE": "2026-01"}
    for name, value in (said | {"REDIRECTOR": claims.REDIRECTOR | own}).items():
        monkeypatch.setattr(claims, name, value)
    write_met3r(davis.parent / "met3r", "dog_arc_left", 0.1)  # of one video: no figure of the set
    scored(davis, "--vipe", folder, "--results", davis.parent / "met3r")
    assert "| these videos | 0 | 0 | – | – | measured here |" in (out := capsys.readouterr().out)
    assert "| Model X | 0.0367 | 6.95 | 0.804 | 0.274 | A paper, 2026-01 |" in out
    (davis / "videos" / "dog_zoom_in.mp4").unlink()
    scored(davis, "--vipe", folder)
    out = capsys.readouterr().out
    assert "Figures of A paper are not shown, the protocol differs: judged 19, not 20." in out and "Model X" not in out


@pytest.mark.parametrize("word", claims.REDIRECTOR)
def test_every_part_of_the_protocol_decides(word):
    same = dict(claims.REDIRECTOR)
    assert claims.difference(same, claims.REDIRECTOR) == ""
    same[word] = "other"
    assert claims.difference(same, claims.REDIRECTOR) == f"{word} 'other', not {claims.REDIRECTOR[word]!r}"


def write_met3r(folder: Path, name: str, value: object) -> None:
    (folder / name).mkdir(parents=True)
    text = f"TransErr: 0.01\nRotErr: 1.2\nDyn-MEt3R: None\nMEt3R: {value}\n"
    (folder / name / "results.txt").write_text(text)


def write_vbench(folder: Path, names: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    videos = [{"video_path": f"./videos/{name}.mp4", "video_results": 70.0} for name in names]
    (folder / "results_x_eval_results.json").write_text(json.dumps({"imaging_quality": [0.71, videos]}))
    return folder


def test_results_of_other_programs_stand_beside_ours(davis, capsys):
    for name, value in (("bear_arc_left", 0.3), ("dog_arc_left", 0.1)):
        write_met3r(davis.parent / "met3r", name, value)
    vbench = write_vbench(davis.parent / "vbench", [f"{s}_{p}" for s in FILES for p in PRESETS])
    words = ["--vipe", vipe_of_davis(davis), "--results", davis.parent / "met3r", "--vbench", vbench]
    rows = {row["video"]: row for row in scored(davis, *words)["rows"]}
    assert rows["dog_arc_left"]["met3r"] == 0.1 and rows["dog_zoom_in"]["met3r"] is None
    out = capsys.readouterr().out
    assert "| met3r | MEt3R | 0.2 | – | 2 |" in out and "| imaging_quality | VBench | 0.71 | – | 20 |" in out
    write_vbench(vbench, ["dog_arc_left", "cat"])
    line = refusal(capsys, benchmark.main, ["score", davis, *words])
    assert "is about 2 videos, must be about the 20 scored ones" in line
    (davis.parent / "met3r" / "bear_arc_left" / "results.txt").write_text("MEt3R: low")
    assert "MEt3R is 'low', must be a number or None" in refusal(capsys, benchmark.main, ["score", davis, *words[:4]])


# --- what is refused


def test_unusable_davis_is_refused_in_one_line_before_anything_is_written(tmp_path, capsys):
    root = write_davis(tmp_path)
    frames = root / "JPEGImages" / "480p" / "bear"
    (root / "captions.json").write_text('{"bear": "a bear"}')
    cases = [
        (["--captions", root / "captions.json"], "has None for dog"),
        (["--frames-at-most", 4], "must be at least 5"),
    ]
    (frames / "00004.jpg").rename(root / "gone.jpg")
    assert "bear has no 00004.jpg" in refusal(capsys, benchmark.main, prepare_words(root))
    (root / "gone.jpg").rename(frames / "00004.jpg")
    for words, message in cases:
        assert message in refusal(capsys, benchmark.main, prepare_words(root, *words))
    (root / "list.txt").write_text("bear cat")
    assert "DAVIS video cat has 0 frames" in refusal(capsys, benchmark.main, prepare_words(root))
    (root / "list.txt").write_text("bear bear ../dog")
    assert "must hold names of videos" in refusal(capsys, benchmark.main, prepare_words(root))
    assert not (root / "out").exists()
    (root / "list.txt").write_text("bear")
    (frames / "00002.jpg").write_bytes(b"no picture")
    assert "00002.jpg cannot be read" in refusal(capsys, benchmark.main, prepare_words(root))
    cv2.imwrite(str(frames / "00002.jpg"), np.zeros((8, 8, 3), np.uint8))
    assert "has size (8, 8), the first (24, 32)" in refusal(capsys, benchmark.main, prepare_words(root))


def test_unusable_results_are_refused_in_one_line(davis, capsys):
    folder = vipe_of_davis(davis)
    words = ["score", davis, "--vipe", folder]
    file = folder / "bear_arc_left" / "pose" / "bear_arc_left.npz"
    good = file.read_bytes()
    np.savez(file, data=np.zeros((5, 4, 4)))
    assert "has shape (5, 4, 4), must be (25, 4, 4)" in refusal(capsys, benchmark.main, words)
    file.write_bytes(good[:100])
    assert "bear_arc_left.npz cannot be read" in refusal(capsys, benchmark.main, words)
    np.savez(file, data=np.zeros((25, 4, 4)))
    assert "last row other than 0 0 0 1" in refusal(capsys, benchmark.main, words)
    file.write_bytes(good)
    write_vipe(folder / "again", "bear_arc_left", torch.eye(4).repeat(25, 1, 1))
    assert "remove one of them" in refusal(capsys, benchmark.main, words)
    assert "has poses of no video" in refusal(capsys, benchmark.main, ["score", davis, "--vipe", davis / "videos"])
    assert "--focal-px is None" in refusal(capsys, benchmark.main, ["score", davis])
    assert "write it with tools/benchmark.py prepare" in refusal(capsys, benchmark.main, ["score", davis.parent])
    (davis / "benchmark.json").write_text("{}")
    assert "is no plan of a benchmark" in refusal(capsys, benchmark.main, words)


def test_videos_that_do_not_belong_are_refused_in_one_line(davis, capsys):
    videos, words = davis / "videos", ["score", davis, "--vipe", vipe_of_davis(davis)]
    write_video(videos / "cat_arc_left.mp4", torch.zeros(3, 5, 8, 8))
    assert "cat_arc_left.mp4 in" in (line := refusal(capsys, benchmark.main, words)) and "not in the list" in line
    (videos / "cat_arc_left.mp4").unlink()
    write_video(videos / "dog_arc_left.mp4", torch.zeros(3, 4, 8, 8))
    assert "has 4 frames, must have 5" in refusal(capsys, benchmark.main, words)
    write_video(videos / "dog_arc_left.mp4", torch.zeros(3, 5, 8, 8))
    record = {"tool": "tools/generate.py", "steps": 50, "poses": preset_at_own_speed("arc_left", 5).tolist()}
    (videos / "dog_arc_left.json").write_text(json.dumps(record | {"poses": preset_path("arc_left", 5).tolist()}))
    assert "was generated along another path than cameras/5/arc_left.json" in refusal(capsys, benchmark.main, words)
    (videos / "dog_arc_left.json").write_text(json.dumps(record))
    other = {"steps": 25, "poses": preset_at_own_speed("pan_left", 5).tolist()}
    (videos / "dog_pan_left.json").write_text(json.dumps(record | other))
    assert "was made with steps" in refusal(capsys, benchmark.main, words)
    assert "has none of the 20 videos" in refusal(capsys, benchmark.main, [*words, "--videos", davis])


# --- Redirect4D-Bench

CASES = {"bear_seq1": ["yaw_20", "up_1.5"], "wolf": ["yaw_20"]}
TARGETS = {"yaw_20": ("arc_left", 1.0), "up_1.5": ("translate_up", 0.7)}
LENGTH = 5


def target(trajectory: str) -> Tensor:
    preset, scale = TARGETS[trajectory]
    return preset_path(preset, LENGTH, translation_scale=scale)


def write_redirect4d(root: Path) -> Path:
    lines = []
    for track, trajectories in CASES.items():
        write_video(root / "sources" / "tracks" / track / "video.mp4", film(preset_path("zoom_in", LENGTH)))
        for trajectory in trajectories:
            folder = root / "tracks" / track / "redirected" / trajectory
            folder.mkdir(parents=True)
            matrices = torch.linalg.inv(elsewhere(target(trajectory), 1.0))[:, :3].tolist()
            lens = [[22.0, 0, WIDTH / 2], [0, 22.0, HEIGHT / 2], [0, 0, 1]]
            entries = [{"extrinsic": matrix, "intrinsic": lens} for matrix in matrices]
            (folder / "trajectory.json").write_text(json.dumps({"camera_path": entries}))
            (folder / "prompt.txt").write_text(f"It's a {track}.\n")
            lines.append(json.dumps({"case": f"{track}__{trajectory}", "track": track}))
    (root / "cases.jsonl").write_text("\n".join(lines) + "\n")
    return root


def redirect_words(root: Path, *more: object) -> list[object]:
    words = ["prepare", "redirect4d", "--root", root, "--out", root / "out", *SIZE, "--frames-at-most", LENGTH]
    return [*words, "--sources", root / "sources", *more]


def test_a_case_runs_through_generate_under_its_name_and_is_not_made_twice(tmp_path, capsys):
    root = write_redirect4d(tmp_path)
    (root / "cases.jsonl").write_text('{"case": "bear_seq1__up_1.5"}\n')
    assert run(*redirect_words(root)) == 0
    script = ["sh", str(root / "out" / "generate.sh"), "--model", str(MODEL), "--max-prompt-tokens", "8"]
    script += ["--steps", "1", "--guidance", "1", "--dtype", "fp32", "--device", "cpu"]
    made, written = root / "out" / "videos" / "bear_seq1_up_1.5.mp4", set()
    for _ in range(2):
        subprocess.run(script, check=True, env=os.environ | {"PYTHON": sys.executable}, cwd=tmp_path)
        written.add(made.stat().st_mtime_ns)
    assert len(written) == 1
    record = json.loads(made.with_suffix(".json").read_text())
    assert record["prompt"] == "It's a bear_seq1." and record["focal_px"] == 22.0
    assert torch.allclose(torch.tensor(record["poses"], dtype=torch.float64), target("up_1.5"), atol=1e-9)
    capsys.readouterr()
    write_vipe(root / "vipe", "bear_seq1__up_1.5", target("up_1.5"))
    assert scored(root / "out", "--vipe", root / "vipe")["summary"]["registered"] == 1


def test_errors_and_videos_of_redirect4d_have_the_names_that_its_scorer_reads(tmp_path):
    root = write_redirect4d(tmp_path)
    assert run(*redirect_words(root)) == 0
    slow = {"yaw_20": target("yaw_20"), "up_1.5": half_speed(target("up_1.5"))}
    for track, trajectories in CASES.items():
        for trajectory in trajectories:
            write_video(root / "out" / "videos" / f"{track}_{trajectory}.mp4", film(target(trajectory)))
            write_vipe(root / "vipe", f"{track}_{trajectory}", elsewhere(slow[trajectory], 1.0))
    metrics = scored(root / "out", "--vipe", root / "vipe")
    assert metrics["summary"]["registered"] == 3
    names = {"bear_seq1__yaw_20", "bear_seq1__up_1.5", "wolf__yaw_20"}
    assert {file.stem for file in (root / "out" / "cases").iterdir()} == names
    assert {file.stem for file in (root / "out" / "VIDEOS").iterdir()} == {n.replace("__", "_") for n in names}
    for row in metrics["rows"]:
        case = f"{row['source']}__{row['camera_type']}"
        part = json.loads((root / "out" / "pose" / case / "summary.json").read_text())
        assert (part["track"], part["trajectory"], part["n_frames"]) == (row["source"], row["camera_type"], LENGTH)
        assert part["rot_err_deg_mean"] == pytest.approx(0, abs=1e-3)
        expected = 0.7 * 0.994 / 4 if row["camera_type"] == "up_1.5" else 0
        assert part["trans_err_m_mean"] == pytest.approx(expected, abs=1e-5)
        assert part["trans_err_m_mean"] == pytest.approx(row["trans_m_mean"], abs=1e-9)
        assert row["trans_sim3_rel"] == pytest.approx(0, abs=1e-5)


def keyframe(timestep: int, position: list[float], wxyz: list[float]) -> dict:
    return {"timestep": timestep, "position": position, "wxyz": wxyz}


def test_a_path_through_keyframes_starts_at_the_origin_and_stays_at_its_last_pose():
    quarter = [2**-0.5, 0.0, 2**-0.5, 0.0]
    frames = [keyframe(2, [9.0, 9, 9], quarter), keyframe(2, [2.0, 0, 0], quarter)]  # the last one of a time counts
    path = target_path({"keyframes": frames}, 4, Path("t.json"))
    turns = torch.tensor([[0.0, angle, 0.0] for angle in (0, 45, 90, 90)], dtype=torch.float64).deg2rad()
    centres = torch.tensor([[x, 0.0, 0.0] for x in (0, 1, 2, 2)], dtype=torch.float64)
    assert torch.allclose(path, pose(rotation_matrix(turns), centres), atol=1e-12)


def test_a_camera_path_that_is_too_short_keeps_its_last_pose_and_one_too_long_is_cut():
    path = target("yaw_20")
    content = {"camera_path": [{"extrinsic": m} for m in torch.linalg.inv(path)[:, :3].tolist()]}
    longer, shorter = (target_path(content, frames, Path("t.json")) for frames in (7, 3))
    assert torch.allclose(longer, path[[0, 1, 2, 3, 4, 4, 4]]) and torch.allclose(shorter, path[:3])
    assert torch.allclose(relative(path[0], path), path)


def test_unusable_redirect4d_is_refused_in_one_line(tmp_path, capsys):
    root = write_redirect4d(tmp_path)
    trajectory = root / "tracks" / "wolf" / "redirected" / "yaw_20" / "trajectory.json"
    good = trajectory.read_text()
    for content, message in (
        ('{"camera_path": [{"extrinsic": [[1, 2], [3, 4]]}]}', "no usable camera_path or keyframes"),
        ("{}", "no usable camera_path or keyframes ('keyframes')"),
        (json.dumps({"keyframes": [keyframe(4, [0, 0, 0], [0, 0, 0, 0])]}), "is no quaternion"),
        (json.dumps({"keyframes": [keyframe(4, [0, 0, 0], [0, 0, 1, 0])]}), "which way is not known"),
    ):
        trajectory.write_text(content)
        assert message in refusal(capsys, benchmark.main, redirect_words(root))
    trajectory.write_text(good)
    line = refusal(capsys, benchmark.main, redirect_words(root, "--sources", tmp_path))
    assert "no source video of bear_seq1" in line
    with (root / "cases.jsonl").open("a") as file:
        file.write('{"case": "wolf__../x"}\n')
    assert "cases.jsonl, line 4 names no case" in refusal(capsys, benchmark.main, redirect_words(root))
    (root / "cases.jsonl").write_text('{"case": "wolf__yaw_20"}\n' * 2)
    assert "video wolf_yaw_20 is 2 times in the list" in refusal(capsys, benchmark.main, redirect_words(root))
    assert "--sources is needed" in refusal(capsys, benchmark.main, redirect_words(root)[:-2])
    assert not (root / "out").exists()

"""The check of a data set finds every damage, names it, and goes on."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch

from flow_grpo.runtime.video_file import write_video
from tools import check_dataset

SCENE = "train/f17_aperture10/scene1"
OTHER = "train/f17_aperture10/scene2"
VAL = "val/f17_aperture10/scene1"
CAMERAS = "cameras/camera_extrinsics.json"


@pytest.fixture
def root(world, tmp_path):
    return Path(shutil.copytree(world, tmp_path / "tiny"))


def report(root: Path, *words: str, code: int = 1) -> dict:
    file = root.parent / "report.json"
    assert check_dataset.main([str(root), "--json", str(file), *words]) == code
    return json.loads(file.read_text())


def problems(root: Path, *words: str) -> dict[str, list[str]]:
    found = report(root, *words)["problems"]
    return {entry["file"]: [each["problem"] for each in found if each["file"] == entry["file"]] for entry in found}


def edit_cameras(scene: Path, change) -> None:
    file = scene / CAMERAS
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_a_clean_world_is_clean_and_its_contents_are_counted(world, tmp_path):
    file = tmp_path / "report.json"
    words = [str(world), "--decode", "--frames", "5", "--size", "24x32", "--json", str(file)]
    assert check_dataset.main(words) == 0
    got = json.loads(file.read_text())
    assert got["problems"] == [] and got["decoded"] is True
    train, val = got["lenses"]
    assert train == {
        "split": "train",
        "lens": "f17_aperture10",
        "scenes": 2,
        "cameras": {"10": 2},
        "clips": 20,
        "frames": {"5": 20},
        "sizes": {"24x32": 20},
        "seconds": {"min": 0.333333, "median": 0.333333, "max": 0.333333},
        "captioned": 20,
    }
    assert (val["split"], val["scenes"], val["clips"]) == ("val", 1, 10)


def test_motion_is_measured_in_metres_and_degrees(root):
    def change(content):
        for number in range(5):
            # 20 cm and then 10 cm per frame along x; no rotation.
            x = [0, 20, 30, 40, 50][number]
            for camera in content[f"frame{number}"]:
                content[f"frame{number}"][camera] = f"[1 0 0 0] [0 1 0 0] [0 0 1 0] [{x} 0 0 1] "

    edit_cameras(root / VAL, change)
    motion = {row["split"]: row for row in report(root, code=0)["motion"]}
    assert motion["val"]["path_m"] == {"min": 0.5, "median": 0.5, "max": 0.5}
    assert motion["val"]["step_m"]["max"] == 0.2
    assert motion["val"]["rotation_deg"]["max"] == motion["val"]["step_deg"]["max"] == 0
    assert 15 < motion["train"]["rotation_deg"]["max"] < 30
    # Uniform speed over four steps.
    assert motion["train"]["step_deg"]["max"] == pytest.approx(motion["train"]["rotation_deg"]["max"] / 4, abs=1e-4)


def test_every_damage_is_reported_once_under_its_file_and_printed(root, capsys):
    (root / SCENE / "videos" / "cam03.mp4").write_bytes(b"nothing")
    edit_cameras(root / SCENE, lambda content: content.pop("frame3"))
    matrix = "[2 0 0 0] [0 2 0 0] [0 0 2 0] [0 0 0 1] "
    edit_cameras(root / OTHER, lambda content: content["frame2"].update(cam05=matrix))
    write_video(root / OTHER / "videos" / "cam02.mp4", torch.zeros(3, 5, 16, 16), lossless=True)
    write_video(root / OTHER / "videos" / "cam04.mp4", torch.zeros(3, 4, 24, 32), lossless=True)
    file = root / VAL / "metadata.csv"
    file.write_text("".join(line for line in file.read_text().splitlines(True) if "cam07" not in line))
    found = problems(root)
    said = {
        f"{SCENE}/videos/cam03.mp4": "damaged or no video",
        f"{SCENE}/{CAMERAS}": "has no frame3, needs frame0..frame4",
        f"{OTHER}/{CAMERAS}": "frame2, cam05 has a rotation part that is off orthonormal by 3",
        f"{OTHER}/videos/cam02.mp4": "16x16 pixels, must be 24x32",
        f"{OTHER}/videos/cam04.mp4": "4 frames, must be 5",
        f"{VAL}/metadata.csv": "0 rows for videos/cam07.mp4, must be one, with text",
    }
    assert set(found) == set(said)
    assert all(len(texts) == 1 and said[file] in texts[0] for file, texts in found.items()), found
    # Unreadable clips are not counted.
    found = report(root, "--workers", "2")
    assert found == report(root, "--workers", "1")
    train, val = found["lenses"]
    assert train["clips"] == 19 and train["captioned"] == 20 and val["captioned"] == 9
    assert train["frames"] == {"4": 1, "5": 18} and train["sizes"] == {"16x16": 1, "24x32": 18}
    capsys.readouterr()
    assert check_dataset.main([str(root)]) == 1
    out, err = capsys.readouterr()
    assert "f17_aperture10" in out and "24x32 (18)" in out and err == ""  # no bar where there is no terminal
    assert f"{OTHER}/videos/cam02.mp4: 16x16 pixels, must be 24x32\n" in out and out.endswith("6 problems\n")


def test_decoding_finds_what_the_header_hides(root):
    cut, short = root / SCENE / "videos" / "cam03.mp4", root / OTHER / "videos" / "cam04.mp4"
    content = cut.read_bytes()
    cut.write_bytes(content[: int(len(content) * 0.8)])
    noise = torch.rand(3, 5, 24, 32, generator=torch.Generator().manual_seed(0))
    write_video(short, noise, lossless=True)
    content = bytearray(short.read_bytes())
    content[-3000:-2000] = bytes(1000)
    short.write_bytes(content)
    assert report(root, code=0)["problems"] == []
    assert set(problems(root, "--decode")) == {f"{SCENE}/videos/cam03.mp4", f"{OTHER}/videos/cam04.mp4"}


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--frames", "9"], "5 frames, must be 9"), (["--size", "24x24"], "24x32 pixels, must be 24x24")],
)
def test_frames_and_sizes_may_be_asked_for(root, words, said):
    found = problems(root, *words)
    assert [text for file, texts in found.items() if "videos/" in file for text in texts] == [said] * 30
    fewer = report(root, "--frames", "3", code=0)
    assert fewer["problems"] == []
    assert fewer["motion"] == report(root, code=0)["motion"], "paths are measured over all frames"


def test_cameras_of_a_scene_at_different_rates_are_named(root):
    write_video(root / SCENE / "videos/cam03.mp4", torch.rand(3, 5, 24, 32), fps=30, lossless=True)
    text = "cameras at 15 and 30 frames per second: frame i is another moment in each"
    assert problems(root) == {SCENE: [text]}


def test_a_camera_that_jumps_is_named(root):
    def jump(content):
        for number in (3, 4):
            content[f"frame{number}"]["cam05"] = "[1 0 0 0] [0 1 0 0] [0 0 1 0] [900 0 0 1] "

    edit_cameras(root / SCENE, jump)
    (text,) = problems(root)[f"{SCENE}/{CAMERAS}"]
    assert text.startswith("cam05 moves ") and "at most 1 m, 30 degrees are plausible" in text
    assert report(root, "--max-step", "20", "180", code=0)["problems"] == []
    assert len(problems(root, "--max-step", "0.001", "0.001")[f"{OTHER}/{CAMERAS}"]) == 10


def test_commands_are_checked_like_the_cameras_and_need_no_video(root):
    commands = root / SCENE / "commands"
    shutil.copytree(root / SCENE / "cameras", commands / "cameras")
    for file in commands.rglob("*.json"):
        file.write_text(file.read_text().replace('"cam', '"path'))
    assert report(root, code=0)["problems"] == []
    edit_cameras(
        commands, lambda content: content["frame3"].update(path05="[1 0 0 0] [0 1 0 0] [0 0 1 0] [900 0 0 1] ")
    )
    (commands / "cameras" / "presets.json").write_text("[")
    (commands / "videos").mkdir()
    write_video(commands / "videos" / "path02.mp4", torch.rand(3, 4, 24, 32), lossless=True)
    write_video(commands / "videos" / "path03.mp4", torch.rand(3, 5, 24, 16), lossless=True)
    found = problems(root)
    assert found[f"{SCENE}/commands/{CAMERAS}"][0].startswith("path05 moves ")
    assert set(found) == {
        f"{SCENE}/commands/{part}"
        for part in (CAMERAS, "cameras/presets.json", "videos/path02.mp4", "videos/path03.mp4")
    }


def test_a_clip_with_commands_needs_no_poses_and_its_depths_are_read(root):
    scene = root / SCENE
    (scene / "commands").mkdir()
    (scene / "cameras").rename(scene / "commands" / "cameras")
    for file in scene.rglob("commands/**/*.json"):
        file.write_text(file.read_text().replace('"cam', '"path'))
    assert report(root, code=0)["problems"] == []
    (scene / "videos" / "cam01.depth.npz").write_bytes(b"no archive")
    (text,) = problems(root)[f"{SCENE}/videos/cam01.depth.npz"]
    assert "cannot be read" in text and str(root) not in text


def test_videos_without_poses_poses_without_videos_and_a_stray_video_are_named(root):
    videos = root / SCENE / "videos"
    shutil.copy(next(videos.glob("*.mp4")), videos / "preview.mp4")
    found = problems(root)
    assert list(found) == [SCENE, f"{SCENE}/metadata.csv"]
    assert "is named like the videos preview.mp4, it has cam01" in found[SCENE][0]
    (videos / "preview.mp4").unlink()
    (root / SCENE / "videos" / "cam04.mp4").unlink()
    edit_cameras(root / OTHER, lambda content: content["frame1"].pop("cam08"))
    edit_cameras(root / VAL, lambda content: content.update(frame5=content["frame4"]))
    found = problems(root)
    assert found[f"{SCENE}/{CAMERAS}"] == ["poses of cam04, which have no video"]
    assert "has no cam08 in frame1" in found[f"{OTHER}/{CAMERAS}"][0]
    assert found[f"{VAL}/{CAMERAS}"] == ["poses beyond frame4, the last of the videos"]


def test_broken_scenes_do_not_hide_one_another_or_their_own_files(root):
    (root / SCENE / CAMERAS).unlink()
    (root / SCENE / "videos" / "preview.mp4").touch()
    shutil.rmtree(root / OTHER / "videos")
    (root / VAL / CAMERAS).write_text("[1")
    (root / VAL / "cameras" / "presets.json").write_text("[]")
    (root / "val" / "f18_aperture10" / "scene7").mkdir(parents=True)
    found = problems(root)
    assert SCENE not in found and str(root) not in str(found)
    assert "cannot be read" in found[f"{SCENE}/{CAMERAS}"][0]
    assert "damaged or no video" in found[f"{SCENE}/videos/preview.mp4"][0]
    assert found[OTHER] == ["no videos here, only ['cameras', 'metadata.csv', 'room.json']"]
    assert "is not JSON" in found[f"{VAL}/{CAMERAS}"][0]
    assert "must be a JSON object" in found[f"{VAL}/cameras/presets.json"][0]
    assert found["val/f18_aperture10/scene7"] == ["no videos here, only []"]


def test_captions_are_all_there_or_nowhere(root):
    for scene in (SCENE, OTHER, VAL):
        (root / scene / "metadata.csv").unlink()
    got = report(root, code=0)
    assert [row["captioned"] for row in got["lenses"]] == [0, 0] and got["problems"] == []
    with (root / SCENE / "videos" / "metadata.csv").open("w", newline="") as file:
        rows = [("file_name", "text"), *((f"cam{number:02d}.mp4", "a room") for number in range(1, 11))]
        csv.writer(file).writerows(rows)
    (root / "train" / "f18_aperture10" / "scene7").mkdir(parents=True)  # is not asked for captions
    assert problems(root) == {
        OTHER: ["no caption file, other scenes of train have one"],
        "train/f18_aperture10/scene7": ["no videos here, only []"],
    }


def test_captions_without_text_or_given_twice_an_unquoted_comma_and_an_open_quote_are_named(root):
    file = root / SCENE / "metadata.csv"
    good = file.read_text()
    lines = good.splitlines()
    file.write_text("\n".join([*lines[:1], "cam01.mp4,", *lines[2:], lines[2]]))
    assert problems(root)[f"{SCENE}/metadata.csv"] == [
        "1 rows for videos/cam01.mp4, must be one, with text",
        "2 rows for videos/cam02.mp4, must be one, with text",
    ]
    file.write_text(good.replace("cam01.mp4,", "cam01.mp4,seen from above, "))
    (text,) = problems(root)[f"{SCENE}/metadata.csv"]
    assert text == f"{SCENE}/metadata.csv: line 2 has more fields than columns; put texts in quotes"
    file.write_text(good.replace("cam01.mp4,", 'cam01.mp4,"'))
    (text,) = problems(root)[f"{SCENE}/metadata.csv"]
    assert text == f"{SCENE}/metadata.csv is no table (unexpected end of data); correct its quotes"


def test_paths_as_short_as_those_of_a_file_in_metres_and_folders_without_a_lens_are_noted(root, capsys):
    assert report(root, code=0)["notes"] == []

    def in_metres(content):
        for frame in content.values():
            for camera, text in frame.items():
                rows = [row.split() for row in text.strip(" []").split("] [")]
                rows[3][:3] = [str(float(number) / 100) for number in rows[3][:3]]
                frame[camera] = " ".join(f"[{' '.join(row)}]" for row in rows) + " "

    for scene in (SCENE, OTHER):
        edit_cameras(root / scene, in_metres)
    lens = (root / SCENE).parent
    lens.rename(lens.with_name("unknown"))
    (short, bare) = report(root, "--split", "train", code=0)["notes"]
    assert short.startswith("train: no camera moves 0.02 m (at most 0.0") and "must be centimetres" in short
    assert bare.startswith("train: ") and "no focal length in a folder's name (f24_aperture5)" in bare
    check_dataset.main([str(root), "--split", "train"])
    assert f"note: {short}" in capsys.readouterr().out
    # The other split may be checked as well.
    (root / VAL / CAMERAS).unlink()
    assert set(problems(root, "--split", "train", "--split", "val")) == {f"{VAL}/{CAMERAS}"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere"),
        (["{root}", "--split", "test"], "has no split test"),
        (["{root}", "--workers", "0"], "--workers is 0"),
        (["{root}", "--frames", "0"], "--frames 0"),
        (["{root}", "--size", "24"], "--size"),
        (["{root}", "--json", "{root}/missing/report.json"], "missing/report.json"),
        (["{root}/train/f17_aperture10/scene1/videos"], "has no split"),
    ],
)
def test_invalid_arguments_are_exit_code_2(world, capsys, words, said):
    with pytest.raises(SystemExit) as caught:
        check_dataset.main([word.format(root=world) for word in words])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err

"""A dataset in MultiCamVideo layout becomes the same conditions on every machine, or a clear refusal."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flow_grpo.data.camera_files import read_cameras
from flow_grpo.data.multicam import MultiCamDataset, find_scenes, fitted_intrinsics
from flow_grpo.data.video_io import fit_video
from flow_grpo.maths.poses import relative, rotation_matrix
from flow_grpo.records import Condition
from flow_grpo.runtime.video_file import write_video
from tests.data.cases import clip, refusal

FRAMES = 5
IDENTITY = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
TURNED_RIGHT = [[0, 1, 0, 0], [-1, 0, 0, 0], [0, 0, 1, 0]]  # Unreal, row vectors: forward is now world y, right is -x
# Camera -> Unreal centimetres at frame 0 and centimetres gained per frame (x forward, y right, z up).
PATHS = {
    "cam01": ((100, 200, 300), (10, 0, 0)),
    "cam02": ((100, 250, 300), (0, 0, 20)),
    "cam10": ((100, 200, 320), (0, 0, 0)),
}


def matrix_text(rotation: list[list[float]], position: tuple[float, ...]) -> str:
    return "".join("[" + " ".join(f"{value:g}" for value in row) + "] " for row in [*rotation, [*position, 1]])


def extrinsics() -> dict[str, dict[str, str]]:
    def text(camera: str, frame: int) -> str:
        start, speed = PATHS[camera]
        position = tuple(s + frame * v for s, v in zip(start, speed, strict=True))
        return matrix_text(TURNED_RIGHT if camera == "cam10" else IDENTITY, position)

    return {f"frame{frame}": {camera: text(camera, frame) for camera in PATHS} for frame in range(FRAMES)}


def write_scene(folder: Path, captions: str | None = None) -> None:
    (folder / "videos").mkdir(parents=True)
    (folder / "cameras").mkdir()
    for number, camera in enumerate(PATHS):
        write_video(folder / "videos" / f"{camera}.mp4", clip(number), lossless=True)
    (folder / "cameras" / "camera_extrinsics.json").write_text(json.dumps(extrinsics()))
    if captions is not None:
        rows = [f'{camera}.mp4,"a room, seen by {camera}"' for camera in PATHS]
        (folder / captions).write_text("\n".join(["file_name,text", *rows]))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    write_scene(root / "train" / "f18_aperture10" / "scene12", captions="metadata.csv")
    write_scene(root / "train" / "f35_aperture2.4" / "scene1", captions="videos/metadata.csv")
    write_scene(root / "val" / "10basic_trajectories")
    presets = {"cam01": "zoom_in", "cam02": "translate_up"}
    (root / "train" / "f18_aperture10" / "scene12" / "cameras" / "presets.json").write_text(json.dumps(presets))
    return root


@pytest.fixture
def root(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "world"))


def open_split(root: Path, split: str = "train", **changes) -> MultiCamDataset:
    return MultiCamDataset(root, split, **{"size": (FRAMES, 16, 24), "prompt": "a video", **changes})


def second_camera(root: Path) -> Condition:
    """Return the condition of the validation scene whose target is cam02."""
    return open_split(root, "val").condition(1)


def test_every_scene_and_target_camera_is_one_index(original):
    dataset = open_split(original)
    conditions = [dataset.condition(index) for index in range(len(dataset))]
    scenes = ["train/f18_aperture10/scene12"] * 3 + ["train/f35_aperture2.4/scene1"] * 3
    expected = [(index, scene, [*PATHS][index % 3]) for index, scene in enumerate(scenes)]
    assert [(c.index, c.scene, c.target_camera) for c in conditions] == expected
    assert all(c.source_camera in PATHS and c.source_camera != c.target_camera for c in conditions)
    assert [c.preset for c in conditions[:4]] == ["zoom_in", "translate_up", None, None]
    assert dataset.cameras() == [c.camera for c in conditions] and conditions[2].camera == "cam10"
    # One scene keeps its captions in videos/, the other above; of a scene without any the prompt is the default.
    assert [c.prompt for c in conditions] == [f"a room, seen by {c.target_camera}" for c in conditions]
    focal = [conditions[index].intrinsics[0].item() for index in (0, 3)]
    assert focal == pytest.approx([18 / 23.76 * 24, 35 / 23.76 * 24])
    plain = open_split(original, "val").condition(0)
    assert (plain.scene, plain.intrinsics, plain.prompt) == ("val/10basic_trajectories", None, "a video")


def test_cameras_may_have_any_names_that_their_file_knows(root):
    scene, names = root / "val" / "10basic_trajectories", {"cam01": "left 9", "cam02": "left 10", "cam10": "right"}
    before = [open_split(root, "val").condition(index) for index in range(3)]
    for old, new in names.items():
        (scene / "videos" / f"{old}.mp4").rename(scene / "videos" / f"{new}.mp4")
    file = scene / "cameras" / "camera_extrinsics.json"
    file.write_text(json.dumps({f: {names[c]: text for c, text in e.items()} for f, e in extrinsics().items()}))
    data = open_split(root, "val")
    assert data.cameras() == ["left 9", "left 10", "right"]
    for number, condition in enumerate(before):
        assert torch.equal(data.condition(number).target_video, condition.target_video)


def test_an_item_does_not_depend_on_the_root_or_on_other_scenes(original, root):
    shutil.rmtree(root / "train" / "f18_aperture10")
    expected, got = open_split(original).condition(4), open_split(root).condition(1)
    assert got.source_camera == expected.source_camera
    for name in ("source_video", "target_video", "source_poses", "target_poses", "reference_pose", "intrinsics"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


def test_all_cameras_serve_as_sources(tmp_path):
    for number in range(12):
        scene = tmp_path / "train" / f"scene{number}"
        (scene / "videos").mkdir(parents=True)
        (scene / "cameras").mkdir()
        (scene / "cameras" / "camera_extrinsics.json").write_text("{}")
        for camera in PATHS:
            (scene / "videos" / f"{camera}.mp4").touch()
    dataset = open_split(tmp_path)
    pairs = {(dataset.source_file(index).stem, dataset.name_of(index)[1]) for index in range(len(dataset))}
    assert len(pairs) == 6


@pytest.mark.parametrize("size", [(FRAMES, 16, 24), (3, 16, 24), (FRAMES, 8, 8)])
def test_videos_are_the_first_frames_of_their_cameras_resized(original, size):
    dataset = open_split(original, size=size)
    condition = dataset.condition(2)
    for camera, video in ((condition.source_camera, condition.source_video), ("cam10", condition.target_video)):
        assert video is not None and video.dtype == torch.float32 and condition.size == size == dataset.size_of(2)
        fitted = fit_video(clip(list(PATHS).index(camera))[:, : size[0]], *size[1:])
        assert torch.equal(video * 255, fitted.float())
        video.zero_()  # must not change what is read next
    assert dataset.condition(2).source_video.any() and condition.target_poses.shape == (size[0], 4, 4)


def pose(translation: list[float], rotation: list[list[float]] | None = None) -> Tensor:
    matrix = torch.eye(4, dtype=torch.float64)
    matrix[:3, 3] = torch.tensor(translation)
    if rotation is not None:
        matrix[:3, :3] = torch.tensor(rotation)
    return matrix


# Seen by another camera's first frame, after 2 frames: x right, y down, z forward, metres.
YAW_RIGHT, YAW_LEFT = [[0.0, 0, 1], [0, 1, 0], [-1, 0, 0]], [[0.0, 0, -1], [0, 1, 0], [1, 0, 0]]
SEEN_AT_FRAME_2 = {
    ("cam01", "cam02"): pose([0.5, -0.4, 0.0]),
    ("cam02", "cam01"): pose([-0.5, 0.0, 0.2]),
    ("cam01", "cam10"): pose([0.0, -0.2, 0.0], YAW_RIGHT),
    ("cam02", "cam10"): pose([-0.5, -0.2, 0.0], YAW_RIGHT),
    ("cam10", "cam01"): pose([-0.2, 0.2, 0.0], YAW_LEFT),
    ("cam10", "cam02"): pose([0.0, -0.2, 0.5], YAW_LEFT),
}


@pytest.mark.parametrize("reference", ["source", "target"])
def test_poses_are_those_seen_by_the_first_frame_of_the_reference_camera(original, reference):
    dataset = open_split(original, reference=reference)
    for index in range(len(dataset)):
        condition = dataset.condition(index)
        file = original / condition.scene / "cameras" / "camera_extrinsics.json"
        (absolute,) = read_cameras(file, (condition.target_camera,), FRAMES)
        assert torch.allclose(condition.reference_pose @ condition.target_poses, absolute, atol=1e-12)
        poses = {condition.source_camera: condition.source_poses, condition.target_camera: condition.target_poses}
        origin = condition.source_camera if reference == "source" else condition.target_camera
        (other,) = poses.keys() - {origin}
        assert torch.allclose(poses[origin][0], torch.eye(4, dtype=torch.float64), atol=1e-12)
        assert torch.allclose(poses[other][2], SEEN_AT_FRAME_2[origin, other], atol=1e-12), index
        assert torch.linalg.det(poses[other][:, :3, :3]).allclose(torch.ones(FRAMES, dtype=torch.float64))


@pytest.mark.parametrize(
    ("focal", "size", "expected"),
    [
        *((focal, (1280, 1280), (fx, fx)) for focal, fx in ((18, 630.3), (24, 840.4), (35, 1225.6), (50, 1750.8))),
        (23.76, (720, 1280), (854.0, 853 + 1 / 3)),  # is resized to 854x480, where 853.33 would be exact
    ],
)
def test_intrinsics_at_480x832(focal, size, expected):
    found = fitted_intrinsics(focal, size, 480, 832).tolist()
    assert found == pytest.approx([*expected, 416, 240], abs=0.05)


@pytest.mark.parametrize(("size", "height", "width"), [((40, 60), 16, 48), ((96, 96), 24, 48), ((50, 70), 30, 40)])
def test_intrinsics_fit_the_pixels_of_a_resized_and_cropped_video(size, height, width):
    rows, columns = size
    y, x = torch.meshgrid(torch.arange(rows) + 0.5, torch.arange(columns) + 0.5, indexing="ij")
    video = torch.stack([x * 2.5, y * 2.5, y])[:, None].to(torch.uint8)
    fitted = fit_video(video, height, width)[:, 0].float()
    fx, fy, cx, cy = fitted_intrinsics(20, size, height, width).tolist()
    focal = 20 / 23.76 * columns
    for row, column in ((height // 2, width // 2), (height // 3, width // 3)):
        # The ray of the new pixel, looked up in the old picture, has the colour of the new pixel.
        old_x = (column + 0.5 - cx) / fx * focal + columns / 2
        old_y = (row + 0.5 - cy) / fy * focal + rows / 2
        assert fitted[0, row, column].item() == pytest.approx(2.5 * old_x, abs=1.6)
        assert fitted[1, row, column].item() == pytest.approx(2.5 * old_y, abs=1.6)


def test_the_fingerprint_hashes_names_and_the_contents_sizes_but_neither_the_root(original, root):
    here, there = open_split(original), open_split(root)
    expected, files = here.fingerprint(), here.contents()
    assert (there.fingerprint(), there.contents()) == (expected, files)
    assert open_split(original, "val").fingerprint() != expected != files != open_split(original, "val").contents()
    video = root / "train" / "f35_aperture2.4" / "scene1" / "videos" / "cam02.mp4"
    video.write_bytes(video.read_bytes() + b"0")
    mended = open_split(root)
    assert mended.fingerprint() == expected and mended.contents() != files
    video.unlink()
    assert open_split(root).fingerprint() != expected


def test_unusable_folders_are_refused(root):
    scene = root / "val" / "10basic_trajectories"
    (root / "file").touch()
    for name in ("nowhere", "file"):
        assert f"dataset folder {root / name} does not exist" in refusal(lambda name=name: open_split(root / name))
    assert "has no split 'test', it has ['train', 'val']" in refusal(lambda: open_split(root, "test"))
    (root / "empty" / "f18_aperture10").mkdir(parents=True)
    assert "holds no scene" in refusal(lambda: open_split(root, "empty"))
    (scene / "videos" / "preview.mp4").touch()
    (scene / "videos" / "making_of.mp4").touch()
    said = refusal(lambda: open_split(root, "val"))
    assert "is named like the videos making_of.mp4, preview.mp4, it has cam01, " in said and "rename" in said
    (scene / "videos" / "making_of.mp4").unlink()
    (scene / "videos" / "preview.mp4").unlink()
    (scene / "cameras" / "camera_extrinsics.json").unlink()
    assert f"scene {scene} has no cameras/camera_extrinsics.json" in refusal(lambda: open_split(root, "val"))
    for camera in ("cam02", "cam10"):
        (scene / "videos" / f"{camera}.mp4").unlink()
    assert f"scene {scene} has 1 camera video(s), needs at least 2" in refusal(lambda: open_split(root, "val"))


def test_unusable_videos_are_refused(root):
    video = root / "val" / "10basic_trajectories" / "videos" / "cam02.mp4"
    write_video(video, clip(1)[:, :4], lossless=True)
    assert f"{video} is too short, got 4 of 5 frames" in refusal(lambda: second_camera(root))
    video.write_bytes(b"nothing")
    assert f"{video} cannot be read" in refusal(lambda: second_camera(root))
    write_video(video, clip(1, FRAMES, 32, 48), lossless=True)  # another size than the other cameras
    assert "(32, 48, 15.0)" in refusal(lambda: second_camera(root))
    write_video(video, clip(1), fps=30, lossless=True)
    assert "(16, 24, 30.0) (rows, columns, frames per second)" in refusal(lambda: second_camera(root))


SCALED = [[2, 0, 0, 0], [0, 2, 0, 0], [0, 0, 2, 0]]
MIRRORED = [[1, 0, 0, 0], [0, -1, 0, 0], [0, 0, 1, 0]]
TRANSPOSED = "[1 0 0 100] [0 1 0 200] [0 0 1 300] [0 0 0 1] "


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("file,caption\ncam02.mp4,a room", "has the columns ['file', 'caption'], must have file_name and text"),
        ("", "has the columns [], must"),
        ("file_name,text\ncam01.mp4,a room", "has 0 rows for cam02.mp4"),
        ("file_name,text\ncam02.mp4,a room\ncam02.mp4,another", "has 2 rows for cam02.mp4"),
        ("file_name,text\ncam02.mp4", "must have one with a text"),
        ('file_name,text\ncam02.mp4,"a room\ncam01.mp4,a room', "is no table"),
        ("file_name,text\ncam01.mp4,a\ncam02.mp4,a, from above", "line 3 has more fields than columns; put texts in"),
    ],
)
def test_a_caption_file_without_the_caption_is_refused(root, content, text):
    file = root / "val" / "10basic_trajectories" / "metadata.csv"
    file.write_text(content)
    got = refusal(lambda: second_camera(root))
    assert text in got and str(file) in got


def test_caption_files_may_name_the_folder_and_start_with_a_byte_order_mark(root):
    rows = "".join(f"videos/{camera}.mp4,it is {camera}\n" for camera in PATHS)
    file = root / "val" / "10basic_trajectories" / "metadata.csv"
    file.write_text("file_name,text\n" + rows, encoding="utf-8-sig")
    assert second_camera(root).prompt == "it is cam02"


def test_a_start_asks_the_file_system_once_about_every_video(original, monkeypatch):
    asked, stat = [], os.stat
    monkeypatch.setattr(os, "stat", lambda path, **words: (asked.append(str(path)), stat(path, **words))[1])
    data = open_split(original)
    data.contents()
    videos = [str(scene.video(camera)) for scene in data.scenes for camera in scene.cameras]
    assert sorted(path for path in asked if path.endswith(".mp4")) == sorted(videos)


@pytest.mark.parametrize("above", ["", "val/"])
def test_one_caption_file_at_the_data_s_root_names_videos_by_their_paths(root, above):
    """ReCamMaster trains from one, with paths below train/; a scene's own comes first."""
    rows = "".join(f"{above}10basic_trajectories/videos/{camera}.mp4,above {camera}\n" for camera in PATHS)
    before = open_split(root, "val").contents()
    (root / "metadata.csv").write_text(f"file_name,text\nelsewhere/videos/cam02.mp4,another\n{rows}")
    assert second_camera(root).prompt == "above cam02" and open_split(root, "val").contents() != before
    (root / "metadata.csv").write_text("file_name,text\nelsewhere/videos/cam02.mp4,another\n")
    assert "metadata.csv has 0 rows for cam02.mp4" in refusal(lambda: second_camera(root))
    own = "".join(f"{camera}.mp4,own {camera}\n" for camera in PATHS)
    (root / "val/10basic_trajectories/metadata.csv").write_text(f"file_name,text\n{own}")
    assert second_camera(root).prompt == "own cam02"


def test_every_scene_comes_in_the_bucket_nearest_to_its_videos(tmp_path):
    for name, (height, width) in {"scene1": (16, 24), "scene2": (24, 16)}.items():
        folder = tmp_path / "train" / "f24_aperture5" / name
        write_scene(folder)
        for number, camera in enumerate(PATHS):
            write_video(folder / "videos" / f"{camera}.mp4", clip(number, FRAMES, height, width), lossless=True)
    made = open_split(tmp_path, size=(5, 16, 16), buckets=[(5, 8, 16), (5, 16, 8), (9, 16, 24)])
    assert [made.size_of(index) for index in range(6)] == [(5, 8, 16)] * 3 + [(5, 16, 8)] * 3
    assert [made.condition(index).size for index in (0, 3)] == [(5, 8, 16), (5, 16, 8)]
    wide, tall = made.condition(0), made.condition(3)
    # A focal length of 24 mm on a sensor whose width is that of the file, then shrunk by 3/2.
    assert wide.intrinsics[0] == pytest.approx(24 / 23.76 * 24 * 2 / 3)
    # The tall file of 16 columns shrinks by 2/3 to 10 whole columns and 16 rows before it is cropped.
    assert tall.intrinsics[:2].tolist() == pytest.approx([24 / 23.76 * 10, 24 / 23.76 * 16 * 2 / 3], rel=1e-3)
    assert open_split(tmp_path, size=(5, 16, 32)).cost(0) == 2 * 1 * 2
    assert "cam01.mp4: 5 frames fill none of the buckets" in refusal(lambda: open_split(tmp_path, buckets=[(9, 8, 8)]))


# --- camera files


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (matrix_text([[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]], (1, 2, 3)), "singular"),
        (matrix_text(SCALED, (1, 2, 3)), "off orthonormal by 3"),
        (matrix_text(MIRRORED, (1, 2, 3)), "mirror image"),
        (TRANSPOSED, "is the matrix transposed?"),
        (matrix_text(IDENTITY, (1, 2, float("nan"))), "not finite"),
        ("[1 0 0 0] [0 1 0 0] [0 0 1 0]", "four rows of four numbers"),
        ("[1 0 0 0] [0 1 0 0] [0 0 1 0] [1 2 3]", "four rows of four numbers"),
        ("[1 0 0 0] [0 1 0 0] [0 0 1 0] [1 2 three 1]", "four rows of four numbers"),
        ("[1 0 0 0] [0 1 0 0] and [0 0 1 0] [1 2 3 1]", "four rows of four numbers"),
        ("[1 0 0 0] [0 1 0 0] [0 0 1 0] [1_0 2 3 1]", "four rows of four numbers"),
        ([[1, 0, 0, 0]], "four rows of four numbers"),
    ],
)
def test_a_matrix_that_is_no_pose_is_refused_with_its_place(tmp_path, entry, reason):
    content = extrinsics()
    content["frame3"]["cam02"] = entry  # type: ignore[assignment]
    file = tmp_path / "camera_extrinsics.json"
    file.write_text(json.dumps(content))
    assert read_cameras(file, ("cam01", "cam10"), FRAMES).shape == (2, FRAMES, 4, 4)
    assert read_cameras(file, ("cam02",), 3).shape == (1, 3, 4, 4)
    text = refusal(lambda: read_cameras(file, ("cam01", "cam02"), FRAMES))
    assert reason in text and f"{file}, frame3, cam02" in text


def test_a_missing_frame_or_camera_or_another_file_is_refused(tmp_path):
    file, content = tmp_path / "camera_extrinsics.json", extrinsics()

    def refused() -> str:
        return refusal(lambda: read_cameras(file, ("cam02",), FRAMES))

    del content["frame3"]["cam02"]
    file.write_text(json.dumps(content))
    assert f"{file} has no cam02 in frame3, it has ['cam01', 'cam10']" in refused()
    del content["frame3"]
    file.write_text(json.dumps(content))
    assert "has no frame3, needs frame0..frame4 for cam02" in refused()
    for other in (b'{"frame0": ', b"[1, 2]", b"", b"\xff\xfe\x00"):
        file.write_bytes(other)
        assert str(file) in refused() and "remove the scene" in refused()


def test_a_folder_that_may_not_be_read_is_named(root, monkeypatch):
    iterdir, closed = Path.iterdir, root / "train" / "f35_aperture2.4"

    def refused(folder: Path):
        if folder == closed:
            raise PermissionError(13, "Permission denied", str(folder))
        return iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", refused)
    said = refusal(lambda: find_scenes(root, "train"))
    assert said == f"dataset folder {closed} cannot be read (Permission denied); make it readable"


@pytest.mark.parametrize("into", ["train/f18_aperture10", "train", "val/10basic_trajectories/videos"])
def test_a_folder_that_is_reached_twice_is_refused(root, into):
    (root / "train" / "again").symlink_to(root / into)
    if into.startswith("val"):
        (root / "train" / "once_more").symlink_to(root / into)
    said = refusal(lambda: open_split(root))
    assert "is" in said and "again, its scenes would count twice; remove the link" in said


def test_a_scene_under_a_link_alone_is_a_scene(root):
    (root / "train" / "f18_aperture10").rename(root / "elsewhere")
    (root / "train" / "f18_aperture10").symlink_to(root / "elsewhere")
    assert len(open_split(root)) == 6


@pytest.mark.parametrize("how", ["link", "copy", "one video"])
def test_a_held_out_video_in_the_training_split_is_refused_under_any_name(root, how):
    video = root / "val" / "10basic_trajectories" / "videos" / "cam01.mp4"
    for scene in find_scenes(root, "train"):  # the fixture's scenes hold the same clips
        for camera in scene.cameras:
            write_video(scene.video(camera), clip(7 + len(scene.name)), lossless=True)
    open_split(root).check_apart(open_split(root, "val"))
    if how == "link":
        (root / "train" / "other").symlink_to(root / "val" / "10basic_trajectories")
    elif how == "copy":
        shutil.copytree(root / "val" / "10basic_trajectories", root / "train" / "other")
    else:
        shutil.copy(video, root / "train" / "f35_aperture2.4" / "scene1" / "videos" / "cam10.mp4")
    said = refusal(lambda: open_split(root).check_apart(open_split(root, "val")))
    assert str(video.parent) in said and "must not be trained on; remove one of the two scenes" in said


def test_the_page_s_conversion_of_opencv_poses_is_read_back_as_they_were(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "your_videos.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    given: dict[str, Any] = {}
    exec(code, given)
    steps = torch.arange(3, dtype=torch.float64)[:, None]
    poses = torch.eye(4, dtype=torch.float64).repeat(3, 1, 1)
    poses[:, :3, :3] = rotation_matrix((20 * steps * torch.tensor([0.0, 1.0, 0.0])).deg2rad())
    poses[:, :3, 3] = steps * torch.tensor([0.5, -0.2, 1.0])
    still = poses[:1].expand(3, 4, 4)
    paths = {"left": poses, "right": still}
    given["write_cameras"](tmp_path, {name: torch.linalg.inv(path).numpy() for name, path in paths.items()})
    found = read_cameras(tmp_path / "cameras" / "camera_extrinsics.json", ["left", "right"], 3)
    for poses_read, written in zip(found, (poses, still), strict=True):
        torch.testing.assert_close(relative(found[1][0], poses_read), relative(still[0], written), rtol=0, atol=1e-8)


@pytest.fixture
def clip_scene(root):
    """A scene of one clip without poses, with two commands."""
    scene = root / "clips" / "f18_aperture10" / "street"
    (scene / "videos").mkdir(parents=True)
    write_video(scene / "videos" / "walk.mp4", clip(0), lossless=True)
    (scene / "commands" / "cameras").mkdir(parents=True)
    (scene / "commands" / "cameras" / "camera_extrinsics.json").write_text(json.dumps(extrinsics()))
    return scene


def test_a_clip_without_poses_is_filmed_along_commands_that_begin_where_it_does(root, clip_scene):
    data = open_split(root, "clips")
    condition = data.condition(2)
    assert (condition.source_camera, condition.target_camera, len(data)) == ("walk", "cam10", 3)
    assert condition.source_poses is None and condition.reference_pose is None and condition.target_video is None
    asked = read_cameras(clip_scene / "commands" / "cameras" / "camera_extrinsics.json", ("cam10",), FRAMES)[0]
    assert torch.equal(condition.target_poses, relative(asked[0], asked))
    assert condition.source_depth is None


def test_depths_beside_a_video_are_cropped_as_it_is_and_the_nearest_frame_counts(root, clip_scene):
    maps = np.stack([np.full((32, 64), metres) for metres in (2.0, 4.0)])
    maps[:, :, :8] = 9  # cropped: 32x64 has a wider shape than 16x24
    maps[1, 16:, 32:] = np.nan  # unknown
    file = clip_scene / "videos" / "walk.depth.npz"
    before = open_split(root, "clips").contents()
    np.savez(file, depth=maps, frames=[0, 4])
    data = open_split(root, "clips")
    depth = data.condition(0).source_depth
    assert data.contents() != before
    assert depth.maps.shape == (2, 16, 24)
    assert (depth.maps[0] == 2).all() and (depth.maps[1] == 4).all()
    assert depth.at([0, 1, 3, 4])[:, 0, 0].tolist() == [2, 2, 4, 4]
    np.savez(file, depth=np.full((1, 1, 1), 3.5))
    assert data.condition(0).source_depth.at([0, 1]).tolist() == [[[3.5]]]


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (b"no archive", "cannot be read"),
        ({"distance": np.ones((1, 2, 2))}, "cannot be read ('depth is not a file in the archive')"),
        ({"depth": np.ones((2, 2))}, "depth has shape (2, 2) and frames (1,), must be (n, h, w) and (n,)"),
        ({"depth": np.ones((2, 2, 2))}, "depth has shape (2, 2, 2) and frames (1,)"),
        ({"depth": np.zeros((1, 2, 2))}, "a map has no number above 0, must be metres"),
    ],
)
def test_other_depth_files_are_refused_in_one_line(root, clip_scene, arrays, text):
    file = clip_scene / "videos" / "walk.depth.npz"
    if isinstance(arrays, bytes):
        file.write_bytes(arrays)
    else:
        np.savez(file, **arrays)
    said = refusal(lambda: open_split(root, "clips").condition(0))
    assert str(file) in said and text in said and said.endswith("make it again or remove it")


def test_a_clip_without_poses_needs_commands(root, clip_scene):
    shutil.rmtree(clip_scene / "commands")
    write_video(clip_scene / "videos" / "other.mp4", clip(1), lossless=True)
    assert "has no cameras/camera_extrinsics.json" in refusal(lambda: open_split(root, "clips"))

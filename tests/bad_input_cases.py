"""What people get wrong, one case each: how a small valid set-up is spoiled, and what the one line must say."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import train_grpo
from flow_grpo.data.tiny_world import ensure_tiny_world
from flow_grpo.data.video_io import read_video
from flow_grpo.runtime.video_file import write_video
from tests.tiny_models import make_tiny_folder

ROOT = Path(__file__).parents[1]
SMALL = {
    "device": "cpu",
    "num_epochs": 1,
    "max_minutes": 0,
    "trackers": "",
    "log_videos_every": 0,
    "data.tiny_world": "",
    "sample.k": 2,
    "sample.train_batch_size": 2,
    "sample.num_batches_per_epoch": 1,
    "sample.num_steps": 2,
    "sample.sde_steps": 0,
    "sample.sde_window": 0,
    "train.batch_size": 2,
    "reward.weights": "motion_mag=1",
    "eval.every": 0,
    "eval.num_conditions": 1,
    "eval.num_steps": 1,
    "eval.gold": "",
    "eval.videos": 0,
}


@dataclasses.dataclass
class Setup:
    """A set-up that works until it is spoiled.

    Attributes:
        folder: holds world/ (data), model/ and runs/ (output), copies that may be broken.
        knobs: what follows on the command line.
        recipe: FILE:RECIPE.
    """

    folder: Path
    knobs: dict[str, object] = dataclasses.field(default_factory=dict)
    recipe: str = f"{ROOT}/config/grpo.py:tiny_recam"

    def copy(self, folder: Path) -> Setup:
        """Return a copy that may be spoiled."""
        return Setup(Path(shutil.copytree(self.folder, folder)))

    @property
    def words(self) -> list[str]:
        """The command line."""
        places = {"data.root": "world", "model.path": "model", "output_root": "runs"}
        knobs = SMALL | {name: str(self.folder / part) for name, part in places.items()} | {"run_name": "run"}
        return ["--config", self.recipe, *(f"--config.{name}={value}" for name, value in (knobs | self.knobs).items())]

    def scenes(self, split: str = "val") -> list[Path]:
        """Return the scene folders of a split."""
        return sorted((self.folder / "world" / split).glob("*/scene*"))

    def videos(self, split: str = "val") -> list[Path]:
        """Return all videos of a split."""
        return sorted((self.folder / "world" / split).rglob("*.mp4"))

    def change_cameras(self, change: Callable[[dict[str, Any]], object], split: str = "val") -> None:
        """Write the camera files of a split anew."""
        for scene in self.scenes(split):
            file = scene / "cameras" / "camera_extrinsics.json"
            content = json.loads(file.read_text())
            change(content)
            file.write_text(json.dumps(content))

    def camera_files(self, content: bytes) -> None:
        """Replace the camera files of the held-out split."""
        for scene in self.scenes():
            (scene / "cameras" / "camera_extrinsics.json").write_bytes(content)

    def captions(self, content: bytes) -> None:
        """Replace the captions of the held-out split."""
        for scene in self.scenes():
            (scene / "metadata.csv").write_bytes(content)

    def file(self, name: str, content: bytes | str = "") -> Path:
        """Write a file of the set-up."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


def make_valid(folder: Path) -> Path:
    """Make a set-up that works in a folder, which is returned: data, model, and a checkpoint."""
    ensure_tiny_world(folder / "world", "unit_test")
    make_tiny_folder(folder / "model")
    config, recipe = train_grpo.read_command_line(Setup(folder).words)
    trainer = train_grpo.build(config, recipe, *train_grpo.init_ranks(config))
    trainer.state.save(folder / "saved", keep=1, ranks=trainer.ranks)
    shutil.rmtree(folder / "runs")
    return folder


@dataclasses.dataclass(frozen=True)
class Case:
    """One mistake.

    Attributes:
        name: a short sentence about it.
        spoil: makes it.
        says: what the line must hold: the field or file, the value got, the bound, the way out.
    """

    name: str
    spoil: Callable[[Setup], object]
    says: tuple[str, ...]


def knob(path: str, value: object) -> Callable[[Setup], None]:
    return lambda setup: setup.knobs.update({path: value})


def knobs(**values: object) -> Callable[[Setup], None]:
    return lambda setup: setup.knobs.update({name.replace("__", "."): value for name, value in values.items()})


def recipe(text: str, name: str = "run", file: str = "recipe.py") -> Callable[[Setup], None]:
    def spoil(setup: Setup) -> None:
        setup.recipe = f"{setup.file(file, text)}:{name}"

    return spoil


def every_video(change: Callable[[Path], object]) -> Callable[[Setup], None]:
    def spoil(setup: Setup) -> None:
        for file in setup.videos():
            change(file)

    return spoil


def entry(value: object, frame: str = "frame3") -> Callable[[Setup], None]:
    """Set what the held-out camera files say of every camera in a frame."""
    return lambda setup: setup.change_cameras(
        lambda content: content[frame].update(dict.fromkeys(content[frame], value))
    )


def _folder_in_place(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _short(file: Path) -> None:
    write_video(file, read_video(file, 4), lossless=True)


def _unequal(setup: Setup) -> None:
    for file in setup.videos()[::2]:
        write_video(file, read_video(file, 5)[..., :16], lossless=True)


CONFIG = [
    Case(
        "an unknown knob", knob("sample.kk", 3), ("config.sample.kk", "no such knob", "did you mean", "config/base.py")
    ),
    Case("a section for a knob", knob("sample", 3), ("config.sample", "is a section", "its knobs are")),
    Case(
        "a word for a number", knob("sample.k", "many"), ("config.sample.k", "'many'", "must be a whole number", "=8")
    ),
    Case(
        "nothing for a number", knob("sample.k", ""), ("config.sample.k", "''", "must be a whole number", "for example")
    ),
    Case(
        "a flag that is neither",
        knob("debug", "perhaps"),
        ("config.debug", "'perhaps'", "true or false", "for example"),
    ),
    Case("not finite", knob("train.learning_rate", "nan"), ("config.train.learning_rate", "nan", "(0, inf)", "pass")),
    Case("infinite", knob("sample.guidance_scale", "inf"), ("config.sample.guidance_scale", "inf", "[1, inf)", "pass")),
    Case("out of bounds", knob("train.clip_range", 1.5), ("config.train.clip_range", "1.5", "(0, 1)", "pass")),
    Case("negative", knob("num_epochs", -1), ("config.num_epochs", "-1", "[0, inf)", "pass")),
    Case("a huge number", knob("seed", "9" * 5000), ("config.seed", "must be a whole number", "for example")),
    Case("no choice", knob("model.dtype", "fp8"), ("config.model.dtype", "'fp8'", "must be one of", "'bf16'", "pass")),
    Case(
        "no sampler", knob("sample.sde", "fow"), ("config.sample.sde", "'fow'", "must be one of", "did you mean 'flow'")
    ),
    Case(
        "a step too far",
        knob("sample.sde_steps", "0,9"),
        ("config.sample.sde_steps", "(0, 9)", "must lie in 0..0", "drop"),
    ),
    Case("frames that no codec packs", knob("data.num_frames", 6), ("config.data.num_frames", "6", "4n+1", "=5")),
    Case(
        "a torn pattern",
        knob("model.lora_targets", "("),
        ("config.model.lora_targets", "'('", "regular expression", "correct it"),
    ),
    Case(
        "contradictory knobs",
        knobs(train__guard="true", train__step_weight="inverse_gain"),
        ("config.train.guard", "True", "must be 'none'", "pass --config.train.step_weight=none"),
    ),
    Case(
        "groups that do not fit",
        knob("sample.k", 3),
        ("config.sample.train_batch_size", "got 2", "multiple of 3", "=3"),
    ),
    Case(
        "training on what is held out",
        knob("data.eval_split", "train"),
        ("config.data.eval_split", "must differ", "pass"),
    ),
    Case(
        "a word that is no setting",
        lambda s: s.knobs.update({"x y": 1}),
        ("config.x y", "no such knob", "config/base.py"),
    ),
    Case("NUL in a text", knob("data.prompt", "a\0b"), ("config.data.prompt", r"'a\x00b'", "must be", "without NUL")),
    Case("a text that is not UTF-8", knob("data.prompt", "caf\udce9"), ("config.data.prompt", "must be", "UTF-8")),
    Case(
        "no recipe file",
        lambda s: setattr(s, "recipe", "nowhere.py:run"),
        ("--config", "nowhere.py", "give the full path"),
    ),
    Case(
        "no recipe name",
        lambda s: setattr(s, "recipe", "config/grpo.py"),
        ("--config", "must be FILE:RECIPE", "for example"),
    ),
    Case(
        "an unknown recipe", recipe("def rum(): ..."), ("--config", "no recipe 'run'", "did you mean rum?", "known are")
    ),
    Case("a recipe that is no Python", recipe("def run(:"), ("--config", "recipe.py", "line 1", "correct")),
    Case(
        "a recipe that imports nothing",
        recipe("import nothing_here"),
        ("--config", "recipe.py", "nothing_here", "correct"),
    ),
    Case(
        "a recipe that raises",
        recipe("def run():\n return 1 / 0"),
        ("--config", "recipe.py:run", "division by zero", "correct"),
    ),
    Case(
        "a recipe of something else",
        recipe("def run():\n return {}"),
        ("--config", "returns dict", "must return the ConfigDict"),
    ),
    Case("a recipe that is no text", lambda s: recipe("\0")(s), ("--config", "recipe.py", "correct")),
    Case(
        "a recipe with an unknown knob",
        recipe("from config.base import get_config\ndef run():\n c = get_config()\n c.sample.kk = 1\n return c"),
        ("--config", "recipe.py:run", "line 4", "kk", "correct it"),
    ),
]

REWARDS = [
    Case(
        "an unknown reward",
        knob("reward.weights", "target_vew=1"),
        ("config.reward.weights", "'target_vew'", "must be one of", "did you mean 'target_view'"),
    ),
    Case(
        "nothing to learn",
        knob("reward.weights", "motion_mag=0"),
        ("config.reward.weights", "0.0", "must hold a weight above 0", "pass"),
    ),
    Case(
        "a negative weight",
        knob("reward.weights", "motion_mag=-1"),
        ("config.reward.weights.motion_mag", "-1", "[0, inf)", "0 measures it"),
    ),
    Case(
        "a reward without server",
        knob("reward.weights", "remote:hps=1"),
        ("config.reward.weights", "'remote:hps'", "must be one of", "say where"),
    ),
    Case(
        "a server that is no address",
        knob("reward.remote", "hps=localhost"),
        ("config.reward.remote", "localhost", "must be", "for example"),
    ),
    Case(
        "a port that is none",
        knob("reward.remote.hps", "http://h:99999"),
        ("config.reward.remote", "99999", "must be", "for example"),
    ),
    Case(
        "a password in an address",
        knob("reward.remote", "hps=http://me:hunter2@h:1"),
        ("config.reward.remote", "without a password", "for example"),
    ),
    Case(
        "a served reward named like a path",
        knob("reward.remote", "../hps=http://h:1"),
        ("config.reward.remote", "../hps", "must be names without dots"),
    ),
    Case(
        "a gold reward that is trained on",
        knobs(eval__gold="room_pose", reward__weights="room_pose=1"),
        ("config.eval.gold", "'room_pose'", "must be an estimator that no reward uses", "pass"),
    ),
    Case(
        "a schedule that runs backwards",
        knob("reward.schedules", "motion_mag=5:1,2:0"),
        ("config.reward.schedules.motion_mag", "(5, 1.0)", "rising order", "pass"),
    ),
]

PLACES = [
    Case(
        "a name that climbs",
        knob("run_name", "../x"),
        ("config.run_name", "'../x'", "must be letters", "--config.output_root"),
    ),
    Case(
        "a name that is a path",
        knob("run_name", "/abs"),
        ("config.run_name", "'/abs'", "must be letters", "--config.output_root"),
    ),
    Case(
        "a name that climbs later",
        knob("run_name", "a/../../b"),
        ("config.run_name", "'a/../../b'", "must be letters", "pass"),
    ),
    Case("a name of dots", knob("run_name", ".."), ("config.run_name", "'..'", "must be letters", "pass")),
    Case("a name with NUL", knob("run_name", "a\0b"), ("config.run_name", r"'a\x00b'", "must be", "for example")),
    Case("a name longer than names may be", knob("run_name", "a" * 300), ("config.run_name", "at most 100", "pass")),
    Case(
        "a split outside",
        knob("data.train_split", "../other"),
        ("config.data.train_split", "'../other'", "must lie below data.root", "pass"),
    ),
    Case(
        "a split elsewhere",
        knob("data.eval_split", "/etc"),
        ("config.data.eval_split", "'/etc'", "must lie below data.root", "pass"),
    ),
    Case(
        "a split inside the other",
        knob("data.eval_split", "train/f17_aperture10"),
        ("config.data.eval_split", "must differ", "pass"),
    ),
    Case(
        "a file for the output folder",
        lambda s: knob("output_root", s.file("taken"))(s),
        ("config.output_root", "taken", "is a file", "must be a folder", "pass"),
    ),
    Case(
        "a run folder that is a file",
        lambda s: s.file("runs/run"),
        ("config.run_name", "runs/run", "is a file", "must be a folder", "pass"),
    ),
]

DATA = [
    Case("no data", lambda s: shutil.rmtree(s.folder / "world"), ("world", "does not exist", "set data.root")),
    Case(
        "a file for the data",
        lambda s: (shutil.rmtree(s.folder / "world"), s.file("world")),
        ("world", "does not exist", "set data.root"),
    ),
    Case("no split", knob("data.eval_split", "test"), ("no split 'test'", "['train', 'val']", "set the split")),
    Case(
        "an empty split",
        lambda s: [shutil.rmtree(scene) for scene in s.scenes()],
        ("val", "holds no scene", "expected"),
    ),
    Case(
        "a scene without videos",
        lambda s: [file.unlink() for file in s.videos()],
        ("scene1", "0 camera video(s)", "at least 2", "remove the scene"),
    ),
    Case(
        "no cameras",
        lambda s: [(x / "cameras/camera_extrinsics.json").unlink() for x in s.scenes()],
        ("scene1", "camera_extrinsics.json", "complete or remove"),
    ),
    Case(
        "a foreign name",
        lambda s: s.videos()[0].rename(s.videos()[0].with_name("left.mp4")),
        ("left.mp4", "not named like a camera (cam01.mp4)", "rename"),
    ),
    Case(
        "captions that are not UTF-8",
        lambda s: s.captions(b"file_name,text\ncam01.mp4,caf\xe9"),
        ("metadata.csv", "utf-8", "repair it"),
    ),
    Case(
        "captions without rows",
        lambda s: s.captions(b"file_name,text\n"),
        ("metadata.csv", "0 rows", "must have one", "complete"),
    ),
    Case(
        "captions of other columns",
        lambda s: s.captions(b"a,b\n1,2\n"),
        ("metadata.csv", "['a', 'b']", "must be file_name and text", "add them"),
    ),
    Case(
        "a caption twice",
        lambda s: s.captions(b"file_name,text\n" + b"".join(b"cam%02d.mp4,a room\n" % n for n in range(1, 11)) * 2),
        ("metadata.csv", "2 rows", "must have one", "complete"),
    ),
    Case(
        "blank captions",
        lambda s: s.captions(b"file_name,text\n" + b"".join(b"cam%02d.mp4, \n" % n for n in range(1, 11))),
        ("metadata.csv", "must have one with a text", "complete"),
    ),
    Case(
        "a caption without end",
        lambda s: s.captions(b'file_name,text\ncam01.mp4,"' + b"a" * 200_000),
        ("metadata.csv", "field larger", "repair it"),
    ),
    Case(
        "presets that are none",
        lambda s: [(x / "cameras/presets.json").write_text("[]") for x in s.scenes()],
        ("presets.json", "holds a list", "must be a JSON object", "export"),
    ),
    Case(
        "a preset that is no name",
        lambda s: [(x / "cameras/presets.json").write_text('{"cam01": 5}') for x in s.scenes()],
        ("presets.json", "cam01", "5", "must be", "export"),
    ),
    Case(
        "no verdicts",
        knob("data.exclude", "nowhere.json"),
        ("nowhere.json", "no file", "make it with tools/check_sources.py"),
    ),
    Case(
        "verdicts that are none",
        lambda s: knob("data.exclude", s.file("v.json", "[1]"))(s),
        ("v.json", "holds a list", "must be a JSON object"),
    ),
    Case(
        "verdicts of another form",
        lambda s: knob("data.exclude", s.file("v.json", '{"a": 1}'))(s),
        ("v.json", "no settings and table scene -> camera -> verdict", "make it"),
    ),
    Case(
        "verdicts too deep to read",
        lambda s: knob("data.exclude", s.file("v.json", "[" * 200_000))(s),
        ("v.json", "is not JSON", "export"),
    ),
    Case(
        "more conditions than there are",
        knob("eval.num_conditions", 400),
        ("eval.num_conditions=400", "1..10", "must be"),
    ),
    Case(
        "another tiny world",
        knob("data.tiny_world", "tiny"),
        ("data.root", "is not the tiny world 'tiny'", "choose another"),
    ),
    Case("a tiny world that is none", knob("data.tiny_world", "huge"), ("data.tiny_world", "'huge'", "known are")),
    Case(
        "a torn tiny world",
        lambda s: (knob("data.tiny_world", "unit_test")(s), s.file("world/world.json", "{")),
        ("world.json", "is not JSON", "delete the folder"),
    ),
]

VIDEOS = [
    Case("half a video", every_video(_half), ("cam", ".mp4", "frames", "fetch or encode it again")),
    Case(
        "a video of no bytes",
        every_video(lambda file: file.write_bytes(b"")),
        (".mp4", "got 0 of 5 frames", "fetch or encode it again"),
    ),
    Case(
        "a text for a video",
        every_video(lambda file: file.write_text("no video\n" * 100)),
        (".mp4", "got 0 of 5 frames", "fetch or encode it again"),
    ),
    Case("a short video", every_video(_short), (".mp4", "too short", "4 of 5 frames", "lower num_frames")),
    Case(
        "a folder for a video", every_video(_folder_in_place), (".mp4", "got 0 of 5 frames", "check the dataset folder")
    ),
    Case("unequal videos", _unequal, ("scene1", "(24, 16)", "must share one size", "encode them again")),
    Case(
        "buckets that no video fills", knob("data.buckets", "9x24x32"), (".mp4", "5 frames fill none", "data.buckets")
    ),
    Case(
        "a size that the model cannot make",
        knobs(data__num_frames=5, data__buckets="5x20x32"),
        ("config.data.buckets", "'5x20x32'", "multiples of 8", "pass"),
    ),
]

CAMERAS = [
    Case(
        "cameras that are no JSON",
        lambda s: s.camera_files(b'{"frame0": '),
        ("camera_extrinsics.json", "is not JSON", "export it again"),
    ),
    Case(
        "cameras that are no object",
        lambda s: s.camera_files(b"[1]"),
        ("camera_extrinsics.json", "holds a list", "must be a JSON object", "export"),
    ),
    Case(
        "cameras that are no text",
        lambda s: s.camera_files(b"\xff\xfe\0"),
        ("camera_extrinsics.json", "utf-8", "export it again"),
    ),
    Case(
        "cameras too deep to read",
        lambda s: s.camera_files(b"[" * 200_000),
        ("camera_extrinsics.json", "is not JSON", "export it again"),
    ),
    Case(
        "a number of 5000 digits",
        lambda s: s.camera_files(b'{"frame0": %s}' % (b"9" * 5000)),
        ("camera_extrinsics.json", "is not JSON", "export it again"),
    ),
    Case(
        "a missing frame",
        lambda s: s.change_cameras(lambda c: c.pop("frame4")),
        ("camera_extrinsics.json", "no frame4", "frame0..frame4", "lower num_frames"),
    ),
    Case(
        "a missing camera",
        lambda s: s.change_cameras(lambda c: [c["frame2"].pop(f"cam{n:02}") for n in range(1, 11)]),
        ("camera_extrinsics.json", "in frame2", "complete the file"),
    ),
    Case(
        "NaN",
        entry("[1 0 0 0] [0 1 0 0] [0 0 1 0] [nan 0 0 1]"),
        ("camera_extrinsics.json", "frame3", "not finite", "check the camera file"),
    ),
    Case(
        "no rotation",
        entry("[2 0 0 0] [0 2 0 0] [0 0 2 0] [0 0 0 1]"),
        ("camera_extrinsics.json", "frame3", "off orthonormal by 3", "must be at most"),
    ),
    Case(
        "a mirror",
        entry("[1 0 0 0] [0 1 0 0] [0 0 -1 0] [0 0 0 1]"),
        ("camera_extrinsics.json", "frame3", "mirror image", "must be +1", "export"),
    ),
    Case(
        "three rows",
        entry("[1 0 0 0] [0 1 0 0] [0 0 1 0]"),
        ("camera_extrinsics.json", "frame3", "must be four rows of four numbers", "export"),
    ),
    Case(
        "a list for a matrix",
        entry([[1, 0, 0, 0]] * 4),
        ("camera_extrinsics.json", "frame3", "must be four rows of four numbers", "export"),
    ),
    Case(
        "a camera beyond the moon",
        entry("[1 0 0 0] [0 1 0 0] [0 0 1 0] [1e300 0 0 1]"),
        ("camera_extrinsics.json", "frame3", "1e+298 m", "must be at most", "is the file"),
    ),
]


def _weights(setup: Setup, part: str) -> Path:
    (file,) = sorted((setup.folder / "model" / part).glob("*.safetensors"))
    return file


def _no_weights(part: str) -> Callable[[Setup], None]:
    return lambda setup: _weights(setup, part).unlink()


def _cut_weights(part: str) -> Callable[[Setup], None]:
    return lambda setup: _half(_weights(setup, part))


def _config(part: str, content: str) -> Callable[[Setup], object]:
    return lambda setup: setup.file(f"model/{part}/config.json", content)


def _change_config(part: str, **values: object) -> Callable[[Setup], None]:
    def spoil(setup: Setup) -> None:
        file = setup.folder / "model" / part / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return spoil


def _half_the_tensors(setup: Setup) -> None:
    save_file({"patch_embedding.weight": torch.zeros(24, 4, 1, 2, 2)}, _weights(setup, "transformer"), {"format": "pt"})


MODEL = [
    Case(
        "no model",
        knob("model.path", "nowhere"),
        ("model.path 'nowhere'", "does not exist", "expected", "set --config.model.path"),
    ),
    Case(
        "a file for the model",
        lambda s: knob("model.path", s.file("m"))(s),
        ("model.path", "does not exist", "expected", "set --config.model.path"),
    ),
    Case(
        "a part is missing",
        lambda s: shutil.rmtree(s.folder / "model/vae"),
        ("model.path", "has no vae", "expected", "set --config.model.path"),
    ),
    Case(
        "an empty part",
        lambda s: (shutil.rmtree(s.folder / "model/tokenizer"), (s.folder / "model/tokenizer").mkdir()),
        ("tokenizer", "holds no files", "must be"),
    ),
    Case(
        "no transformer config",
        lambda s: (s.folder / "model/transformer/config.json").unlink(),
        ("transformer/config.json", "missing", "give"),
    ),
    Case(
        "a torn transformer config",
        _config("transformer", "{"),
        ("transformer/config.json", "not JSON", "download it again"),
    ),
    Case(
        "a transformer config that is none",
        _config("transformer", "[]"),
        ("transformer/config.json", "list", "download it again"),
    ),
    Case(
        "another transformer",
        _change_config("transformer", _class_name="WanTransformer3DModel"),
        ("transformer", "WanTransformer3DModel", "expected ReCam", "convert"),
    ),
    Case(
        "a transformer of another size",
        _change_config("transformer", num_layers=3),
        ("transformer", "config.json", "download it again"),
    ),
    Case(
        "a transformer of another width",
        _change_config("transformer", ffn_dim=48),
        ("transformer", "config.json", "download it again"),
    ),
    Case(
        "no transformer weights",
        _no_weights("transformer"),
        ("transformer", "safetensors", "download the folder again"),
    ),
    Case(
        "half the transformer weights",
        _cut_weights("transformer"),
        ("transformer", "safetensors", "damaged", "download it again"),
    ),
    Case("some of the transformer's tensors", _half_the_tensors, ("transformer", "config.json", "download it again")),
    Case("a torn codec config", _config("vae", "{"), ("vae", "config.json", "not JSON", "download it again")),
    Case("no codec weights", _no_weights("vae"), ("vae", "no weights", "download the folder again")),
    Case("half the codec weights", _cut_weights("vae"), ("vae", "safetensors", "damaged", "download it again")),
    Case(
        "a page for the codec weights",
        lambda s: _weights(s, "vae").write_text("<html>404</html>" * 9),
        ("vae", "safetensors", "damaged", "download it again"),
    ),
    Case(
        "a codec of other factors",
        _change_config("vae", scale_factor_spatial=8),
        ("scale_factor_spatial", "8", "correct vae/config.json"),
    ),
    Case(
        "no text encoder weights",
        _no_weights("text_encoder"),
        ("text_encoder", "no weights", "download the folder again"),
    ),
    Case(
        "half the text encoder weights",
        _cut_weights("text_encoder"),
        ("text_encoder", "safetensors", "damaged", "download it again"),
    ),
    Case(
        "a torn text encoder config",
        _config("text_encoder", "{"),
        ("text_encoder", "config.json", "not JSON", "download it again"),
    ),
    Case(
        "a torn tokenizer",
        lambda s: s.file("model/tokenizer/tokenizer.json", "{"),
        ("tokenizer", "tokenizer.json", "not JSON", "download it again"),
    ),
    Case(
        "adapters that find no place",
        knobs(model__trained="lora", model__lora_targets="nothing"),
        ("lora_targets", "'nothing'"),
    ),
    Case(
        "a file for the encodings",
        lambda s: knob("model.encodings", s.file("taken"))(s),
        ("config.model.encodings", "taken", "is a file", "must be a folder", "pass"),
    ),
    Case(
        "attention that the device has not",
        knob("model.attention_backend", "quick"),
        ("model.attention_backend", "'quick'", "must be one of", "native"),
    ),
]


def checkpoint_of(setup: Setup) -> Path:
    """Return the checkpoint folder of the set-up."""
    return setup.folder / "saved" / "checkpoint_000000"


def resumed(change: Callable[[Path], object]) -> Callable[[Setup], None]:
    """Resume from a checkpoint after changing it."""

    def spoil(setup: Setup) -> None:
        setup.knobs["resume"] = checkpoint_of(setup)
        change(checkpoint_of(setup))

    return spoil


def _manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Setup], None]:
    def rewrite(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return resumed(rewrite)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _outside(name: str) -> Callable[[dict[str, Any]], object]:
    """Make a manifest vouch for a file elsewhere."""
    return lambda manifest: manifest["files"].update({name: manifest["files"].pop("state.json")})


RESUME = [
    Case(
        "no checkpoint",
        knob("resume", "nowhere"),
        ("resume='nowhere'", "manifest.json does not exist", "give a folder"),
    ),
    Case(
        "a file for a checkpoint",
        lambda s: knob("resume", s.file("ckpt"))(s),
        ("resume=", "ckpt", "Not a directory", "give a folder"),
    ),
    Case(
        "a climbing name",
        knob("resume", "../../nowhere"),
        ("resume='../../nowhere'", "does not exist", "give a folder"),
    ),
    Case(
        "auto without a name",
        knobs(resume="auto", run_name=""),
        ("resume='auto'", "needs the name", "pass --config.run_name"),
    ),
    Case(
        "no manifest",
        resumed(lambda c: (c / "manifest.json").unlink()),
        ("resume=", "manifest.json does not exist", "give a folder"),
    ),
    Case(
        "a torn manifest",
        resumed(lambda c: _half(c / "manifest.json")),
        ("resume=", "manifest.json is not readable", "give a folder"),
    ),
    Case(
        "a manifest too deep to read",
        resumed(lambda c: (c / "manifest.json").write_text("[" * 200_000)),
        ("resume=", "manifest.json is not readable", "give"),
    ),
    Case(
        "half a file",
        resumed(lambda c: _half(c / "state.safetensors")),
        ("resume=", "state.safetensors has", "bytes instead of", "give a folder"),
    ),
    Case(
        "another byte",
        resumed(lambda c: _flip(c / "state.safetensors")),
        ("resume=", "another sha256", "give a folder"),
    ),
    Case(
        "a missing file",
        resumed(lambda c: (c / "rank_0.json").unlink()),
        ("resume=", "rank_0.json does not exist", "give a folder"),
    ),
    Case(
        "a manifest of nothing",
        _manifest(lambda m: m.update(files={})),
        ("resume=", "manifest.json lists 0 files", "must be 4", "give a folder"),
    ),
    Case(
        "a manifest without step",
        _manifest(lambda m: m.pop("step")),
        ("resume=", "manifest.json", "step", "give a folder"),
    ),
    Case(
        "a manifest of no ranks",
        _manifest(lambda m: m.update(world_size="two")),
        ("resume=", "manifest.json", "world_size", "give a folder"),
    ),
    Case(
        "a manifest of a climbing file",
        _manifest(_outside("../../world/world.json")),
        ("resume=", "../../world/world.json", "give a folder"),
    ),
    Case(
        "a manifest of a file elsewhere",
        _manifest(_outside("/etc/passwd")),
        ("resume=", "/etc/passwd", "give a folder"),
    ),
    Case(
        "the checkpoint of another run",
        _manifest(lambda m: m["identity"].update(model="another")),
        ("belongs to another run", "model is 'another'", "start afresh"),
    ),
    Case(
        "the checkpoint of another mode",
        lambda s: (resumed(lambda _: None)(s), knob("train.ema_decay", 0)(s)),
        ("weight average", "train.ema_decay", "start afresh"),
    ),
    Case(
        "a second start",
        lambda s: shutil.copytree(checkpoint_of(s), s.folder / "runs/run/checkpoints/checkpoint_000000"),
        ("already holds checkpoint_000000", "use resume='auto'", "another run_name"),
    ),
]

CASES = [*CONFIG, *REWARDS, *PLACES, *DATA, *VIDEOS, *CAMERAS, *MODEL, *RESUME]

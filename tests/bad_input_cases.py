"""User errors, one case each: how a small valid set-up is broken, and what the one-line error must say."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from flow_grpo.data.tiny_world import ensure_tiny_world
from flow_grpo.data.video_io import read_video
from flow_grpo.run.assemble import assemble
from flow_grpo.run.command_line import read_command_line
from flow_grpo.runtime.ranks.start_up import set_up_rank
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
    "data.tune_scenes": 0,
    "sample.k": 2,
    "train.copies": 0,
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
    "eval.signal_groups": 0,
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
    config, recipe = read_command_line(Setup(folder).words)
    trainer = assemble(config, recipe, *set_up_rank(config))
    trainer.state.save(folder / "saved", keep=1, world=trainer.world).wait()
    shutil.rmtree(folder / "runs")
    return folder


# What spoils the set-up, and what the one line must hold: field or file, the value got, bound and way out.
Case = tuple[Callable[[Setup], object], str]


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


def _half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _short(file: Path) -> None:
    write_video(file, read_video(file, 4), lossless=True)


def _unequal(setup: Setup) -> None:
    for file in setup.videos()[::2]:
        write_video(file, read_video(file, 5)[..., :16], lossless=True)


CONFIG: list[Case] = [
    (knob("sample.kk", 3), "config.sample.kk ... no such knob ... did you mean ... docs/config.md"),
    (knob("sample.k", 3), "config.sample.train_batch_size ... got 2 ... multiple of 3 ... =3"),
    (knob("data.prompt", "caf\udce9"), "config.data.prompt ... must be ... UTF-8"),
    (recipe("def run():\n return 1 / 0"), "--config ... recipe.py:run ... division by zero ... correct"),
]

REWARDS = [
    (
        knob("reward.weights", "target_vew=1"),
        "config.reward.weights ... 'target_vew' ... must be one of ... did you mean 'target_view'",
    ),
    (knob("reward.weights", "remote:hps=1"), "config.reward.weights ... 'remote:hps' ... must be one of ... say where"),
]

PLACES = [
    (
        lambda s: knob("output_root", s.file("taken"))(s),
        "config.output_root ... taken ... is a file ... must be a folder ... pass",
    ),
    (lambda s: s.file("runs/run"), "config.run_name ... runs/run ... is a file ... must be a folder ... pass"),
]

DATA = [
    (lambda s: shutil.rmtree(s.folder / "world"), "world ... does not exist ... set data.root"),
    (lambda s: (shutil.rmtree(s.folder / "world"), s.file("world")), "world ... does not exist ... set data.root"),
    (
        lambda s: [file.unlink() for file in s.videos()],
        "scene1 ... 0 camera video(s) ... at least 2 ... remove the scene",
    ),
    (
        lambda s: [(x / "cameras/camera_extrinsics.json").unlink() for x in s.scenes()],
        "scene1 ... camera_extrinsics.json ... complete or remove",
    ),
    (
        lambda s: s.videos()[0].rename(s.videos()[0].with_name("left.mp4")),
        "no camera of cameras/camera_extrinsics.json is named like the videos left.mp4 ... it has cam01 ... rename",
    ),
    (lambda s: s.captions(b"file_name,text\ncam01.mp4,caf\xe9"), "metadata.csv ... utf-8 ... repair it"),
    (
        lambda s: s.captions(b"a,b\n1,2\n"),
        "metadata.csv ... ['a', 'b'] ... must have file_name and text ... add or rename",
    ),
    (
        lambda s: s.captions(b"file_name,text\n" + b"".join(b"cam%02d.mp4, \n" % n for n in range(1, 11))),
        "metadata.csv ... must have one with a text ... complete",
    ),
    (
        lambda s: s.captions(b'file_name,text\ncam01.mp4,"' + b"a" * 200_000),
        "metadata.csv ... field larger ... correct its quotes",
    ),
    (
        lambda s: [(x / "cameras/presets.json").write_text("[]") for x in s.scenes()],
        "presets.json ... holds a list ... must be a JSON object ... export",
    ),
    (
        lambda s: [(x / "cameras/presets.json").write_text('{"cam01": 5}') for x in s.scenes()],
        "presets.json ... cam01 ... 5 ... must be ... export",
    ),
    (
        lambda s: (s.folder / "world/train/other").symlink_to(s.scenes()[0]),
        "training video ... other/videos/cam01.mp4 ... held-out video ... must not be trained on ... remove one",
    ),
    (
        lambda s: shutil.copytree(s.scenes()[0], s.folder / "world/train/other"),
        "training video ... other/videos/cam01.mp4 ... held-out video ... must not be trained on ... remove one",
    ),
    (
        lambda s: (s.folder / "world/train/other").symlink_to(s.scenes("train")[0]),
        "again, its scenes would count twice ... remove the link",
    ),
    (knob("data.exclude", "nowhere.json"), "nowhere.json ... No such file ... make it with tools/check_sources.py"),
    (lambda s: knob("data.exclude", s.file("v.json", "[1]"))(s), "v.json ... holds a list ... must be a JSON object"),
    (
        lambda s: knob("data.exclude", s.file("v.json", '{"a": 1}'))(s),
        "v.json ... no settings and table scene -> camera -> verdict ... make it",
    ),
    (knob("eval.num_conditions", 400), "eval.num_conditions=400 ... 1..10 ... must be"),
    (knob("data.tiny_world", "tiny"), "data.root ... is not the tiny world 'tiny' ... choose another"),
]

VIDEOS = [
    (every_video(_half), "cam ... .mp4 ... frames ... fetch or encode it again"),
    (every_video(lambda file: file.write_bytes(b"")), ".mp4 ... got 0 of 5 frames ... fetch or encode it again"),
    (every_video(_short), ".mp4 ... too short ... 4 of 5 frames ... lower num_frames"),
    (_unequal, "scene1 ... (24, 16) ... must share one size ... encode them again"),
    (knob("data.buckets", "9x24x32"), ".mp4 ... 5 frames fill none ... data.buckets"),
]

CAMERAS = [
    (lambda s: s.camera_files(b'{"frame0": '), "camera_extrinsics.json ... is not JSON ... export it again"),
    (lambda s: s.camera_files(b"[1]"), "camera_extrinsics.json ... holds a list ... must be a JSON object ... export"),
    (lambda s: s.camera_files(b"\xff\xfe\0"), "camera_extrinsics.json ... utf-8 ... export it again"),
    (
        lambda s: s.change_cameras(lambda c: c.pop("frame4")),
        "camera_extrinsics.json ... no frame4 ... frame0..frame4 ... lower num_frames",
    ),
    (
        lambda s: s.change_cameras(lambda c: [c["frame2"].pop(f"cam{n:02}") for n in range(1, 11)]),
        "camera_extrinsics.json ... in frame2 ... complete the file",
    ),
    (
        entry("[1 0 0 0] [0 1 0 0] [0 0 1 0] [nan 0 0 1]"),
        "camera_extrinsics.json ... frame3 ... not finite ... check the camera file",
    ),
    (
        entry("[1 0 0 0] [0 1 0 0] [0 0 1 0]"),
        "camera_extrinsics.json ... frame3 ... must be four rows of four numbers ... export",
    ),
    (entry([[1, 0, 0, 0]] * 4), "camera_extrinsics.json ... frame3 ... must be four rows of four numbers ... export"),
    (
        entry("[1 0 0 0] [0 1 0 0] [0 0 1 0] [1e300 0 0 1]"),
        "camera_extrinsics.json ... frame3 ... 1e+298 m ... must be at most ... is the file",
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


def _change_weights(part: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Setup], None]:
    def spoil(setup: Setup) -> None:
        state = load_file(_weights(setup, part))
        change(state)
        save_file(state, _weights(setup, part), {"format": "pt"})

    return spoil


def _half_the_tensors(setup: Setup) -> None:
    save_file({"patch_embedding.weight": torch.zeros(24, 4, 1, 2, 2)}, _weights(setup, "transformer"), {"format": "pt"})


MODEL = [
    (knob("model.path", "nowhere"), "model.path 'nowhere' ... does not exist ... expected ... set --config.model.path"),
    (
        lambda s: knob("model.path", s.file("m"))(s),
        "model.path ... does not exist ... expected ... set --config.model.path",
    ),
    (
        lambda s: shutil.rmtree(s.folder / "model/vae"),
        "model.path ... has no vae ... expected ... set --config.model.path",
    ),
    (
        lambda s: (shutil.rmtree(s.folder / "model/tokenizer"), (s.folder / "model/tokenizer").mkdir()),
        "tokenizer ... holds no files ... must be",
    ),
    (lambda s: (s.folder / "model/transformer/config.json").unlink(), "transformer/config.json ... missing ... give"),
    (_config("transformer", "{"), "transformer/config.json ... not JSON ... download it again"),
    (
        _change_config("transformer", _class_name="WanTransformer3DModel"),
        "transformer ... WanTransformer3DModel ... expected ReCam ... convert",
    ),
    (_change_config("transformer", num_layers=3), "transformer ... config.json ... download it again"),
    (_change_config("transformer", ffn_dim=48), "transformer ... config.json ... download it again"),
    (_no_weights("transformer"), "transformer ... safetensors ... download the folder again"),
    (_cut_weights("transformer"), "transformer ... safetensors ... damaged ... download it again"),
    (_half_the_tensors, "transformer ... config.json ... download it again"),
    (_config("vae", "{"), "vae ... config.json ... not JSON ... download it again"),
    (_no_weights("vae"), "vae ... no weights ... download the folder again"),
    (_cut_weights("vae"), "vae ... safetensors ... damaged ... download it again"),
    (_no_weights("text_encoder"), "text_encoder ... no weights ... download the folder again"),
    (_cut_weights("text_encoder"), "text_encoder ... safetensors ... damaged ... download it again"),
    (_config("text_encoder", "{"), "text_encoder ... config.json ... not JSON ... download it again"),
    (
        lambda s: s.file("model/tokenizer/tokenizer.json", "{"),
        "tokenizer ... tokenizer.json ... not JSON ... download it again",
    ),
    (
        _change_weights("text_encoder", lambda state: state.pop("encoder.final_layer_norm.weight")),
        "text_encoder lacks the weights ... encoder.final_layer_norm.weight ... download it again",
    ),
    (
        _change_weights("vae", lambda state: state.pop("decoder.conv_in.weight")),
        "vae does not hold the weights ... decoder.conv_in.weight ... download vae/ again",
    ),
    (
        _change_weights("transformer", lambda state: state.update({n: v.to(torch.int8) for n, v in state.items()})),
        "transformer ... must hold BF16, F16 or F32 only ... I8 ... give such weights",
    ),
    (_change_config("text_encoder", model_type="nobodys"), "text_encoder cannot be loaded ... download it again"),
    (knobs(model__trained="lora", model__lora_targets="nothing"), "lora_targets ... 'nothing'"),
    (
        lambda s: knob("model.encodings", s.file("taken"))(s),
        "config.model.encodings ... taken ... is a file ... must be a folder ... pass",
    ),
    (knob("model.attention_backend", "quick"), "model.attention_backend ... 'quick' ... must be one of ... native"),
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


def _to_itself(setup: Setup) -> None:
    (setup.folder / "ckpt").symlink_to("ckpt")
    setup.knobs["resume"] = setup.folder / "ckpt"


RESUME = [
    (knob("resume", "nowhere"), "resume='nowhere' ... manifest.json does not exist ... give a folder"),
    (lambda s: knob("resume", s.file("ckpt"))(s), "resume= ... ckpt ... Not a directory ... give a folder"),
    (_to_itself, "resume= ... ckpt ... Too many levels of symbolic links ... give a folder"),
    (knobs(resume="auto", run_name=""), "resume='auto' ... needs the name ... pass --config.run_name"),
    (
        resumed(lambda c: (c / "manifest.json").write_text("[")),
        "resume= ... manifest.json is not readable ... give",
    ),
    (resumed(lambda c: (c / "rank_0.json").unlink()), "resume= ... rank_0.json does not exist ... give a folder"),
    (_manifest(lambda m: m.pop("step")), "resume= ... manifest.json ... step ... give a folder"),
    (_manifest(lambda m: m.update(format=99)), "resume= ... format=99 ... reads 1 ... use the version that saved it"),
    (_manifest(lambda m: m.update(world_size="two")), "resume= ... manifest.json ... world_size ... give a folder"),
    (_manifest(_outside("../../world/world.json")), "resume= ... ../../world/world.json ... give a folder"),
    (_manifest(_outside("/etc/passwd")), "resume= ... /etc/passwd ... give a folder"),
    (
        _manifest(lambda m: m["identity"].update(model="another")),
        "belongs to another run ... model is 'another' ... start afresh",
    ),
    (
        lambda s: (resumed(lambda _: None)(s), knob("train.ema_decay", 0)(s)),
        "weight average ... train.ema_decay ... start afresh",
    ),
    (
        lambda s: shutil.copytree(checkpoint_of(s), s.folder / "runs/run/checkpoints/checkpoint_000000"),
        "already holds checkpoint_000000 ... use resume='auto' ... another run_name",
    ),
]

CASES = [*CONFIG, *REWARDS, *PLACES, *DATA, *VIDEOS, *CAMERAS, *MODEL, *RESUME]

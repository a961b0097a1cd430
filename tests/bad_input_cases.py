"""User errors: how a small valid set-up is broken, and what the one-line error must say.

Here is a case or two of every check at the door. Which contents of a file are refused, and with which words, is tested
where the file is read.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flow_grpo.data.tiny_world import ensure_tiny_world
from flow_grpo.data.video_io import read_video
from flow_grpo.run.assemble import assemble
from flow_grpo.run.command_line import read_command_line
from flow_grpo.runtime.ranks.start_up import set_up_rank
from flow_grpo.runtime.video_file import write_video
from tests.test_train_grpo import SMALL
from tests.tiny_models import make_tiny_folder

ROOT = Path(__file__).parents[1]
LEAST = SMALL | {
    "num_epochs": 1,
    "data.tiny_world": "",
    "sample.k": 2,
    "sample.train_batch_size": 2,
    "sample.num_batches_per_epoch": 1,
    "sample.num_steps": 2,
    "sample.sde_steps": 0,
    "sample.sde_window": 0,
    "train.batch_size": 2,
    "reward.weights": "motion_mag=1",
    "eval.num_conditions": 1,
    "eval.num_steps": 1,
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
        knobs = LEAST | {name: str(self.folder / part) for name, part in places.items()} | {"run_name": "run"}
        return ["--config", self.recipe, *(f"--config.{name}={value}" for name, value in (knobs | self.knobs).items())]

    def scenes(self, split: str = "val") -> list[Path]:
        """Return the scene folders of a split."""
        return sorted((self.folder / "world" / split).glob("*/scene*"))

    def videos(self, split: str = "val") -> list[Path]:
        """Return all videos of a split."""
        return sorted((self.folder / "world" / split).rglob("*.mp4"))

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


def _short(setup: Setup) -> None:
    for file in setup.videos():
        write_video(file, read_video(file, 4), lossless=True)


def _far_away(setup: Setup) -> None:
    for scene in setup.scenes():
        file = scene / "cameras" / "camera_extrinsics.json"
        content = json.loads(file.read_text())
        content["frame3"] = dict.fromkeys(content["frame3"], "[1 0 0 0] [0 1 0 0] [0 0 1 0] [1e300 0 0 1]")
        file.write_text(json.dumps(content))


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
    (
        lambda s: [file.unlink() for file in s.videos()],
        "scene1 ... 0 camera video(s) ... at least 2 ... remove the scene",
    ),
    (
        lambda s: [(x / "metadata.csv").write_bytes(b"file_name,text\ncam01.mp4,caf\xe9") for x in s.scenes()],
        "metadata.csv ... utf-8 ... repair it",
    ),
    (
        lambda s: [(x / "cameras/presets.json").write_text('{"cam01": 5}') for x in s.scenes()],
        "presets.json ... cam01 ... 5 ... must be ... export",
    ),
    (
        lambda s: (s.folder / "world/train/other").symlink_to(s.scenes()[0]),
        "training video ... other/videos/cam01.mp4 ... held-out video ... must not be trained on ... remove one",
    ),
    (knob("data.exclude", "nowhere.json"), "nowhere.json ... No such file ... make it with tools/check_sources.py"),
    (knob("eval.num_conditions", 400), "eval.num_conditions=400 ... 1..10 ... must be"),
    (knob("data.tiny_world", "tiny"), "data.root ... is not the tiny world 'tiny' ... choose another"),
    (_short, ".mp4 ... too short ... 4 of 5 frames ... lower num_frames"),
    (knob("data.buckets", "9x24x32"), ".mp4 ... 5 frames fill none ... data.buckets"),
    (
        lambda s: [(x / "cameras/camera_extrinsics.json").write_text('{"frame0": ') for x in s.scenes()],
        "camera_extrinsics.json ... is not JSON ... export it again",
    ),
    (_far_away, "camera_extrinsics.json ... frame3 ... 1e+298 m ... must be at most ... is the file"),
]


def _cut_weights(setup: Setup) -> None:
    (file,) = (setup.folder / "model/vae").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _change_config(**values: object) -> Callable[[Setup], None]:
    def spoil(setup: Setup) -> None:
        file = setup.folder / "model/transformer/config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return spoil


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
    (
        lambda s: s.file("model/transformer/config.json", "{"),
        "transformer/config.json ... not JSON ... download it again",
    ),
    (
        _change_config(_class_name="WanTransformer3DModel"),
        "transformer ... WanTransformer3DModel ... expected ReCam ... convert",
    ),
    (_change_config(num_layers=3), "transformer ... config.json ... download it again"),
    (_change_config(ffn_dim=48), "transformer ... config.json ... download it again"),
    (_cut_weights, "vae ... safetensors ... damaged ... download it again"),
    (
        lambda s: [file.unlink() for file in (s.folder / "model/text_encoder").glob("*.safetensors")],
        "text_encoder ... no weights ... download the folder again",
    ),
    (
        lambda s: s.file("model/tokenizer/tokenizer.json", "{"),
        "tokenizer ... tokenizer.json ... not JSON ... download it again",
    ),
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


def _manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Setup], None]:
    """Resume from a checkpoint after changing its manifest."""

    def spoil(setup: Setup) -> None:
        setup.knobs["resume"] = checkpoint_of(setup)
        file = checkpoint_of(setup) / "manifest.json"
        manifest = json.loads(file.read_text())
        change(manifest)
        file.write_text(json.dumps(manifest))

    return spoil


def _to_itself(setup: Setup) -> None:
    (setup.folder / "ckpt").symlink_to("ckpt")
    setup.knobs["resume"] = setup.folder / "ckpt"


RESUME = [
    (knob("resume", "nowhere"), "resume='nowhere' ... manifest.json does not exist ... give a folder"),
    (lambda s: knob("resume", s.file("ckpt"))(s), "resume= ... ckpt ... Not a directory ... give a folder"),
    (_to_itself, "resume= ... ckpt ... Too many levels of symbolic links ... give a folder"),
    (knobs(resume="auto", run_name=""), "resume='auto' ... needs the name ... pass --config.run_name"),
    (_manifest(lambda m: m.pop("step")), "resume= ... manifest.json ... step ... give a folder"),
    (
        _manifest(lambda m: m["files"].update({"/etc/passwd": m["files"].pop("state.json")})),
        "resume= ... /etc/passwd ... give a folder",
    ),
    (
        _manifest(lambda m: m["identity"].update(model="another")),
        "belongs to another run ... model is 'another' ... start afresh",
    ),
    (
        lambda s: s.knobs.update({"resume": checkpoint_of(s), "train.ema_decay": 0}),
        "weight average ... train.ema_decay ... start afresh",
    ),
    (
        lambda s: shutil.copytree(checkpoint_of(s), s.folder / "runs/run/checkpoints/checkpoint_000000"),
        "already holds checkpoint_000000 ... use resume='auto' ... another run_name",
    ),
]

CASES = [*CONFIG, *REWARDS, *PLACES, *DATA, *MODEL, *RESUME]

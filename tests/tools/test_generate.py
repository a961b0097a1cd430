"""Generating with the embedded model and a few steps: output files, the reproducing record, adapters, refusals."""

import dataclasses
import json
import os
import shutil
import types
from pathlib import Path
from unittest import mock

import av
import numpy as np
import pytest
import torch

from flow_grpo.data.video_io import fit_video, read_video, video_size
from flow_grpo.maths.poses import preset_path
from flow_grpo.models import adapters
from flow_grpo.models.files import adapter_files
from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.transformers import load_transformer
from flow_grpo.models.recam import RECAM
from flow_grpo.models.wan_policy import WanPolicy
from flow_grpo.run import starts
from flow_grpo.runtime.video_file import write_video
from flow_grpo.settings.loading import load_config
from flow_grpo.settings.schema import Config, SampleConfig
from tests import refusals
from tests.command import command
from tests.models.test_adapters import LORA, move
from tests.tiny_models import CPU
from tests.tools import run_files
from tools import generate
from tools.evaluation import videos
from tools.evaluation.inputs import find_generated
from tools.generation import options

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "assets" / "tiny_recam"
SIZE = ["--frames", "5", "--height", "24", "--width", "32", "--max-prompt-tokens", "8"]


def film(number: int = 0) -> torch.Tensor:
    t, y, x = torch.meshgrid(*(torch.arange(size) for size in (7, 30, 40)), indexing="ij")
    return torch.stack([6 * x + 2 * t, 8 * y, 120 + 15 * t + 8 * number - x]).to(torch.uint8)


@pytest.fixture
def source(tmp_path) -> Path:
    write_video(tmp_path / "mine" / "room.mp4", film(), lossless=True)
    return tmp_path / "mine" / "room.mp4"


def words(source: Path, *given: object, model: Path = MODEL, camera: str = "arc_left:0.5") -> list[str]:
    sampling = ["--steps", "2", "--guidance", "1", "--dtype", "fp32", "--device", "cpu"]
    cameras = ["--camera", camera] if camera else []
    return ["--model", str(model), "--source", str(source), *cameras, *SIZE, *sampling, *map(str, given)]


def made(source: Path, *given: object, name: str = "room_arc_left-0.5", **changes: object) -> torch.Tensor:
    """Generate, and return the frames (3, 5, 24, 32) of a result."""
    assert generate.main([*words(source, *given, **changes), "--overwrite"]) == 0
    out = Path(given[given.index("--out") + 1]) if "--out" in given else source.parent
    return read_video(out / f"{name}.mp4", 5)


def refusal(capsys, given: list[str]) -> str:
    """Return the one line that says why nothing is generated; no network may be loaded before."""
    with mock.patch.object(generate, "load_networks", side_effect=AssertionError("loaded")):
        return refusals.refusal(capsys, generate.main, given)


def test_a_video_appears_in_the_folder_of_its_source_and_side_by_side_with_it(source, capsys):
    assert generate.main(words(source)) == 0
    names = {"room.mp4", *(f"room_arc_left-0.5{end}" for end in (".mp4", "_beside.mp4", ".json"))}
    assert {file.name for file in source.parent.iterdir()} == names
    for name, size, fps in (("room_arc_left-0.5", (5, 24, 32), 15), ("room_arc_left-0.5_beside", (5, 386, 664), 2.5)):
        file = source.with_name(f"{name}.mp4")
        assert video_size(file) == size
        with av.open(str(file)) as container:
            stream = container.streams.video[0]
            assert (stream.average_rate, stream.codec_context.name, stream.pix_fmt) == (fps, "h264", "yuv420p")
    output = capsys.readouterr()
    assert output.err == ""
    assert f"1/1 room.mp4 along arc_left:0.5: {source.with_name('room_arc_left-0.5.mp4')} (" in output.out
    first, *_, last = output.out.splitlines()
    assert first.startswith(f"1 video(s) of 5x24x32 of each source's first 5 frames: {MODEL}, no adapter, 2 steps,")
    assert f"\nloading {MODEL}\n" in output.out  # the network takes a minute
    assert last == f"too small to measure their cameras: look at {source.parent}/*_beside.mp4"
    generated = read_video(source.with_name("room_arc_left-0.5.mp4"), 5).float()
    beside = read_video(source.with_name("room_arc_left-0.5_beside.mp4"), 5).float()
    left, right = (beside[..., 24:264, x : x + 320][..., 5::10, 5::10] for x in (8, 336))
    apart = (left - generated).abs().mean()
    assert (left - fit_video(film()[:, :5], 24, 32)).abs().mean() < 0.4 * apart
    assert (right - generated).abs().mean() < 0.4 * apart  # the small video loses colours to its coding


def test_every_source_goes_along_every_camera_and_results_are_no_sources(source, tmp_path):
    write_video(source.with_name("dog.mp4"), film(1), lossless=True)
    assert generate.main(words(source.parent, "--camera", "tilt_up", "--steps", "1")) == 0
    first = {f"{video}_{camera}" for video in ("room", "dog") for camera in ("arc_left-0.5", "tilt_up")}
    assert {file.stem for file in source.parent.glob("*.json")} == first
    assert generate.main(words(source.parent, "--steps", "1", camera="zoom_in")) == 0
    assert {file.stem for file in source.parent.glob("*.json")} == first | {"room_zoom_in", "dog_zoom_in"}
    outputs = shutil.move(source.parent, tmp_path / "moved")
    for name in ("room.mp4", "dog.mp4"):
        (outputs / name).unlink()
    with pytest.raises(ValueError, match="holds only videos that this tool made"):
        list(generate.find_sources([outputs]))


def test_the_record_holds_all_and_its_words_make_the_same_video_again(source, tmp_path):
    adapter = saved_adapter(tmp_path / "adapter")
    given = ["--adapter", adapter, "--camera", "tilt_up", "--prompt", 'a - "room" =\n', "--negative-prompt=-dark"]
    given += ["--seed", "7", "--first-number", "3", "--shift", "2.5", "--guidance", "1.5", "--offload"]
    first = made(source, *given, name="room_tilt_up")
    file = source.with_name("room_tilt_up.json")
    record = json.loads(file.read_text())
    poses = torch.tensor(record.pop("poses"), dtype=torch.float64)
    assert torch.equal(poses, preset_path("tilt_up", 5))
    again = record.pop("again")
    assert record == {
        "tool": "tools/generate.py",
        "kind": "recam",
        "prompts": None,
        "source_poses": None,
        "model": str(MODEL),
        "start_adapter": None,
        "adapter": str(adapter),
        "source": str(source),
        "camera": "tilt_up",
        "out": str(source.parent),
        "prompt": 'a - "room" =\n',
        "negative_prompt": "-dark",
        "max_prompt_tokens": 8,
        "seed": 7,
        "first_number": 4,
        "steps": 2,
        "shift": 2.5,
        "guidance": 1.5,
        "frames": 5,
        "height": 24,
        "width": 32,
        "dtype": "fp32",
        "device": "cpu",
        "offload": True,
        "tiling": None,
        "round_timestep": False,
        "before": False,
        "focal_px": None,
        "run": "",
        "camera_name": "tilt_up",
        "fps": 15,
        "torch": torch.__version__,
    }
    for path in source.parent.glob("room_*"):
        path.unlink()
    assert generate.main(again) == 0
    names = ["room_tilt_up.json", "room_tilt_up.mp4", "room_tilt_up_beside.mp4"]
    assert sorted(path.name for path in source.parent.glob("room_*")) == names
    assert torch.equal(read_video(source.with_name("room_tilt_up.mp4"), 5), first)
    assert json.loads(file.read_text())["again"] == again


def test_the_noise_depends_on_the_seed_and_the_number_alone(source, tmp_path):
    first = made(source)
    assert torch.equal(made(source, "--out", tmp_path / "new" / "results"), first)
    assert not torch.equal(made(source, "--seed", "1"), first)
    assert not torch.equal(made(source, "--first-number", "1"), first)
    third = made(source, "--camera", "tilt_up", "zoom_in", name="room_zoom_in")
    assert torch.equal(made(source, "--first-number", "2", name="room_zoom_in", camera="zoom_in"), third)


def test_camera_prompt_guidance_steps_and_shift_reach_the_model(source):
    first = made(source)
    write_video(source, film(3), lossless=True)
    assert not torch.equal(made(source), first)
    write_video(source, film(), lossless=True)
    changes = [("--steps", "3"), ("--shift", "1"), ("--prompt", "a red wall"), ("--max-prompt-tokens", "64")]
    for change in changes:
        assert not torch.equal(made(source, *change), first), change
    guided = made(source, "--guidance", "9")
    assert not torch.equal(guided, first)
    assert not torch.equal(made(source, "--guidance", "9", "--negative-prompt", "a red wall"), guided)
    assert torch.equal(made(source, "--negative-prompt", "a red wall"), first)
    assert not torch.equal(made(source, "--dtype", "bf16"), first)


def saved_adapter(folder: Path, by: float = 0.05, **changes: object) -> Path:
    transformer = load_transformer(ReCamTransformer3DModel, MODEL / "transformer")
    adapters.apply_training_mode(transformer, dataclasses.replace(LORA, **changes))
    move(transformer, by)
    adapter_files.save_adapter(types.SimpleNamespace(module=transformer), folder)
    return folder


@pytest.mark.parametrize("trained", ["lora", "camera"])
def test_what_was_trained_is_put_in_place(source, tmp_path, trained):
    first = made(source)
    assert torch.equal(made(source, "--adapter", saved_adapter(tmp_path / "none", 0.0, trained=trained)), first)
    moved = made(source, "--adapter", saved_adapter(tmp_path / "some", trained=trained))
    assert (moved.float() - first).abs().mean() > 1


@pytest.mark.parametrize("trained", ["lora", "attention"])
def test_what_was_exported_hands_over_as_its_run_does_and_is_no_model_to_start_from(source, tmp_path, capsys, trained):
    model = dataclasses.replace(LORA, path=str(MODEL), trained=trained, boundary_ratio=0.9)
    run = WanPolicy.from_config(RECAM, model, SampleConfig(), CPU)
    run.keep_reference()
    move(run.module)
    adapter_files.save_adapter(run, tmp_path / "adapter")
    assert "Below noise level 0.9 the weights before training" in (tmp_path / "adapter" / "README.md").read_text()
    with mock.patch.object(generate, "generate", wraps=generate.generate) as sampled:
        made(source, "--adapter", tmp_path / "adapter", "--before")
    loaded, *asked = sampled.call_args.args
    silent = dataclasses.replace(Config(), model=dataclasses.replace(model, boundary_ratio=0.0), device="cpu")
    judged = videos._policy(silent, tmp_path / "adapter")  # that of tools/evaluate.py
    assert "model.boundary_ratio is 0, the adapter's 0.9: below 0.9 the weights before" in capsys.readouterr().out
    own = generate.generate(run, *asked)
    assert torch.equal(generate.generate(loaded, *asked), own) and torch.equal(generate.generate(judged, *asked), own)
    with run.reference(), loaded.reference():
        start = generate.generate(run, *asked)
        assert torch.equal(generate.generate(loaded, *asked), start) and not torch.equal(own, start)
    run.boundary_ratio = 0.0
    assert not torch.equal(generate.generate(run, *asked), own)
    if trained != "lora":
        shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("transformer"))
        (tmp_path / "adapter").rename(tmp_path / "model" / "transformer")
        with pytest.raises(ValueError, match=r"was exported for noise levels of at least 0\.9, below which"):
            WanPolicy.from_config(RECAM, dataclasses.replace(model, path=str(tmp_path / "model")), SampleConfig(), CPU)


def test_a_file_of_poses_is_a_camera(source, tmp_path, capsys):
    preset = made(source)
    file = tmp_path / "orbit.json"
    file.write_text(json.dumps(preset_path("arc_left", 9)[:5].tolist()))  # half the way, as arc_left:0.5
    poses = made(source, name="room_orbit", camera=str(file))
    assert (poses.float() - preset).abs().max() <= 2
    record = json.loads(source.with_name("room_orbit.json").read_text())
    assert record["camera"] == str(file)
    assert f"--camera={file}" in record["again"]
    # A path outside of the training range is one line, and a video.
    capsys.readouterr()
    made(source, camera="pan_left:4", name="room_pan_left-4")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: camera path 'pan_left:4' lies outside the training range: pan of 79.5 degrees")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--camera", "pan"], "'pan'"),
        (["--camera", "nowhere.json"], "nowhere.json cannot be read"),
        (["--source", "nowhere.mp4"], "nowhere.mp4 does not exist"),
        (["--source", str(MODEL)], "is no folder with videos"),
        (["--frames", "9"], "room.mp4 is too short, got 7 of 9 frames; pass fewer --frames"),
        (["--frames", "0"], "videos have 0 frames, must be"),
        (["--frames", "33"], "videos are 33x24x32 (frames, height, width), must be at most 32x512x512"),
        (["--height", "25"], "videos are 25x32, must be multiples of "),
        (["--width", "0"], "videos are 24x0, must be"),
        (["--steps", "0"], "--steps is 0"),
        (["--width", "832"], "videos are 5x24x832 (frames, height, width), must be at most 32x512x512"),
        (["--focal-px", "0"], "--focal-px is 0, must be the focal length"),
        (["--before"], "--before shows the model without its --adapter, which is not given"),
        (["--guidance", "nan"], "--guidance is nan"),
        (["--guidance=-1"], "--guidance is -1 and --max-prompt-tokens 8, must be finite and at least 1; at 1 there is"),
        (["--max-prompt-tokens", "0"], "--max-prompt-tokens 0, must be"),
        (["--device", "abacus"], "device='abacus'"),
        (["--model", "nowhere"], "--model nowhere has no vae/config.json"),
        (["--adapter", "nowhere"], "--adapter nowhere"),
        (["--out", __file__], "is a file, must be a folder"),
    ],
)
def test_unusable_arguments_are_one_line_and_exit_code_2_before_a_network_is_loaded(source, capsys, given, message):
    assert message in refusal(capsys, words(source, *given))
    assert [file.name for file in source.parent.iterdir()] == ["room.mp4"]


def test_existing_results_are_kept_and_an_unwritable_folder_is_refused_before_sampling(source, capsys):
    file = source.with_name("room_arc_left-0.5.json")
    file.write_text("kept")
    assert "1 of 4 results exist already" in refusal(capsys, words(source))
    assert file.read_text() == "kept"
    file.unlink()
    with mock.patch.object(os, "access", return_value=False):  # modes do not stop every user
        assert "cannot be written to; choose another folder with --out" in refusal(capsys, words(source))


def test_a_result_replaces_neither_another_nor_what_it_is_made_from(source, tmp_path, capsys):
    other = source.with_name("room_tilt_up.mp4")
    shutil.copy(source, other)
    given = [*words(source, "--source", other, camera="tilt_up"), "--overwrite"]
    assert f"{other} is a source or camera and would be replaced" in refusal(capsys, given)
    other.unlink()
    path = source.with_name("room_orbit.json")
    path.write_text(json.dumps(preset_path("arc_left", 5).tolist()))
    renamed = shutil.copy(path, source.with_name("orbit.json"))
    given = [*words(source, "--camera", renamed, camera=str(path)), "--overwrite"]
    assert f"{path} is a source or camera" in refusal(capsys, given)
    twin = shutil.copytree(source.parent, tmp_path / "twin") / "room.mp4"
    given = words(source, "--source", twin, "--out", tmp_path / "out")
    assert f"two videos would be written to {tmp_path / 'out' / 'room_arc_left-0.5.mp4'}" in refusal(capsys, given)
    assert not (tmp_path / "out").exists()


def finished_run(folder: Path, trained: str = "lora", **knobs: object) -> Path:
    """Return the folder of a run of the demo with an adapter and other settings than this tool's."""
    _, spec, *words = command({"model.path": MODEL}, **knobs)
    config = load_config(spec, words)
    starts.record(folder, config, "config/grpo.py:tiny_recam", None, epoch=0, ranks=1, device="cpu", served={})
    starts.begin(folder)
    saved_adapter(folder / "adapter", trained=trained)
    return folder


@pytest.mark.parametrize("trained", ["lora", "camera"])
def test_a_run_gives_every_setting_and_each_video_is_made_before_and_after(source, tmp_path, trained):
    run = finished_run(tmp_path / "first", trained, eval__num_steps=2, data__prompt="a room", sample__shift=2.5)
    given = ["--run", str(run), "--source", str(source), "--camera", "arc_left:0.5", "--device", "cpu"]
    assert generate.main(given) == 0
    own = {"after": "", "before": "_before"}
    found = {name: read_video(run / "generated" / f"room_arc_left-0.5{end}.mp4", 5) for name, end in own.items()}
    record = json.loads((run / "generated" / "room_arc_left-0.5.json").read_text())
    wanted = {"steps": 2, "shift": 2.5, "guidance": 1.0, "frames": 5, "height": 24, "width": 32, "dtype": "fp32"}
    wanted |= {"prompt": "a room", "max_prompt_tokens": 8, "before": True, "run": str(run)}
    assert {name: record[name] for name in wanted} == wanted
    plain = ["--steps", "2", "--shift", "2.5", "--prompt", "a room", "--out", tmp_path / "plain"]
    assert torch.equal(made(source, *plain), found["before"])
    assert torch.equal(made(source, *plain, "--adapter", run / "adapter"), found["after"])
    assert (found["after"].float() - found["before"].float()).abs().mean() > 1
    assert video_size(run / "generated" / "room_arc_left-0.5_beside.mp4") == (5, 386, 992)
    assert generate.main([*record["again"], f"--out={tmp_path / 'again'}"]) == 0
    for name, end in own.items():
        assert torch.equal(read_video(tmp_path / "again" / f"room_arc_left-0.5{end}.mp4", 5), found[name])


def test_a_model_that_a_run_was_not_trained_with_is_told(source, tmp_path, capsys):
    run = finished_run(tmp_path / "first", eval__num_steps=2)
    run_files.change(run / "starts" / "001.json", identity={"vae": "another", "data": "of it"})
    assert generate.main(["--run", str(run), "--source", str(source), "--camera", "tilt_up", "--device", "cpu"]) == 0
    assert f"warning: not the vae that {run} was trained with: the results are not" in capsys.readouterr().err


def test_options_that_are_given_win_over_the_run_s(source, tmp_path):
    original = {"model__round_timestep": True, "model__vae_tiling": True, "model__vae_tiles": "recammaster"}
    run = finished_run(tmp_path / "first", eval__guidance_scale=3, eval__negative_prompt="dark", **original)
    given = ["--run", str(run), "--source", str(source), "--camera", "tilt_up", "--device", "cpu"]
    args = options.parse([*given, "--steps", "3", "--guidance", "1", "--no-before", "--out", "here"], None)
    assert (args.steps, args.guidance, args.before, args.out) == (3, 1.0, False, Path("here"))
    assert (args.negative_prompt, args.adapter, args.width) == ("dark", run / "adapter", 32)
    assert options.parse(given, None).guidance == 3.0
    for more, rounded, tiles in (([], True, " tiled 30x52"), (["--no-round-timestep", "--tiling", "off"], False, "")):
        policies = [made for made, _ in generate.load(options.parse([*given, *more], None)).values()]
        assert {made._round_timestep for made in policies} == {rounded}
        assert {made.codec.identity.partition(" tiled")[1:] for made in policies} == {tiles.partition(" tiled")[1:]}


def test_a_folder_that_is_no_run_s_and_a_run_without_adapter_are_refused(source, tmp_path, capsys):
    given = ["--source", str(source), "--camera", "tilt_up"]
    assert "--model FOLDER is needed, or --run outputs/NAME" in refusal(capsys, given)
    assert "has no config.json, must be the folder of a run" in refusal(capsys, ["--run", str(tmp_path), *given])
    run = finished_run(tmp_path / "first")
    shutil.rmtree(run / "adapter")
    assert "tools/export_adapter.py makes one of a checkpoint" in refusal(capsys, ["--run", str(run), *given])
    other = finished_run(tmp_path / "other", model__kind="mine.py:Mine")
    line = refusal(capsys, ["--run", str(other), *given])
    assert "model.kind: got 'mine.py:Mine', must be FILE.py:NAME, and there is no file" in line


def test_the_focal_length_of_multicam_sources_is_recorded(source, tmp_path):
    folder = tmp_path / "val" / "f18_aperture10" / "scene1" / "videos"
    shutil.copytree(source.parent, folder)
    made(folder / "room.mp4")
    # 18 mm of 23.76 at the 40 columns of the film, which is reduced to 32.
    record = json.loads((folder / "room_arc_left-0.5.json").read_text())
    assert record["focal_px"] == pytest.approx(18 / 23.76 * 32, rel=0.02)
    made(folder / "room.mp4", "--focal-px", 77)
    assert json.loads((folder / "room_arc_left-0.5.json").read_text())["focal_px"] == 77


def test_a_source_s_own_path_is_static_of_a_file_or_of_vipe_s_folder(source, tmp_path):
    assert torch.equal(generate.source_path("static", source, 5), torch.eye(4, dtype=torch.float64).expand(5, 4, 4))
    with pytest.raises(ValueError, match=r"has no pose/room.npz; let ViPE run on"):
        generate.source_path(str(tmp_path), source, 5)
    path, world = preset_path("arc_left", video_size(source)[0]), preset_path("tilt_up", 2)[1]
    (tmp_path / "pose").mkdir()
    np.savez(tmp_path / "pose" / "room.npz", data=(world @ path).numpy())
    torch.testing.assert_close(generate.source_path(str(tmp_path), source, 5), path[:5])


def test_evaluate_reads_the_folder_as_it_is_with_before_beside_after(source, tmp_path, monkeypatch):
    monkeypatch.setattr("tools.evaluation.inputs.LEAST_ROWS", 1)
    write_video(source.with_name("dog.mp4"), film(1), lossless=True)
    run = finished_run(tmp_path / "first", eval__num_steps=1)
    cameras = ["--camera", "arc_left:0.5", "zoom_in"]
    given = ["--run", str(run), "--source", str(source.parent), *cameras, "--device", "cpu", "--focal-px", "30"]
    assert generate.main(given) == 0
    after, before = find_generated(run / "generated", None)
    names = [f"{video}_{camera}.mp4" for video in ("dog", "room") for camera in ("arc_left-0.5", "zoom_in")]
    assert [task.name for task in after] == [task.name for task in before] == names
    assert [task.file.name for task in before] == [name.replace(".mp4", "_before.mp4") for name in names]
    assert [task.camera_type for task in after] == ["arc_left:0.5", "zoom_in"] * 2
    assert len({task.source for task in after}) == 2 and {task.focal_px for task in after} == {30.0}
    assert torch.equal(after[1].commanded, preset_path("zoom_in", 5))
    (run / "generated" / "dog_zoom_in_before.mp4").unlink()
    with pytest.raises(ValueError, match=r"dog_zoom_in.json has no dog_zoom_in_before.mp4; generate it again"):
        find_generated(run / "generated", None)


@pytest.mark.parametrize(
    ("word", "named"),
    [("p.jsonl", True), ("dir/p.tsv", True), ("my prompts.txt", True), ("a cat. A dog.", False), ("4.5", False)],
)
def test_a_word_that_looks_like_a_file_s_name_is_not_filmed_as_a_prompt(word, named):
    assert generate.names_file(word) == named


def test_sources_are_captioned_by_the_table_of_their_folder_unless_a_prompt_is_given(tmp_path):
    (tmp_path / "films/videos").mkdir(parents=True)
    for name in ("1", "2"):
        write_video(tmp_path / "films/videos" / f"{name}.mp4", torch.rand(3, 5, 32, 32))
    (tmp_path / "films/metadata.csv").write_text("file_name,text\n1.mp4,a dark wall\n2.mp4,a pale wall\n")
    words = ["--model", "M", "--source", str(tmp_path / "films"), "--camera", "pan_left", "--frames", "5"]
    for more, prompts in (([], ["a dark wall", "a pale wall"]), (["--prompt", "a wall"], ["a wall", "a wall"])):
        args = generate.parse([*words, *more], "")
        dataset, requests = generate.plan_films(args)
        assert [dataset.prompt_of(index) for index in range(2)] == prompts and len(requests) == 2

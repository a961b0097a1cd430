"""The random model loads like a real one, computes numbers of order one, and depends on all its inputs."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from flow_grpo.data.tiny_world import WorldSpec, make_scene, render_views
from flow_grpo.maths.poses import preset_path
from flow_grpo.maths.rays import camera_pair
from flow_grpo.models.encoders.images import ImageEncoder
from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.redirector_transformer import ReDirectorTransformer3DModel
from flow_grpo.models.networks.transformers import load_transformer
from flow_grpo.models.recam import RECAM
from flow_grpo.models.video_model import WAN_1_3B
from flow_grpo.models.wan_policy import WanPolicy
from flow_grpo.records import Condition
from flow_grpo.settings.loading import load_config
from tests.command import command
from tests.refusals import refusal
from tests.some import some
from tests.toy import condition
from tools import random_model
from tools.random_model import Sizes

SMALL = Sizes(heads=2, head_dim=16, layers=2, ffn=64, text_dim=32, codec="small")
MIDDLE = Sizes(heads=4, head_dim=64, layers=8, ffn=1024, text_dim=256, codec="small")
WORLD = WorldSpec(seed=3, scenes={}, frames=9, height=48, width=80)


def words(out: Path, sizes: Sizes = SMALL, **changes) -> list[str]:
    given = {**vars(sizes), **changes}
    return ["--out", str(out), *(f"--{name.replace('_', '-')}={value}" for name, value in given.items())]


def policy_of(folder: Path, dtype: str = "fp32") -> WanPolicy:
    knobs = {"model.path": folder, "model.dtype": dtype, "model.max_prompt_tokens": 32}
    _, spec, *given = command(knobs, recipe="my_recam_8npu")
    config = load_config(spec, given)
    return WanPolicy.from_config(RECAM, config.model, config.sample, torch.device("cpu"))


def parameters_of(folder: Path) -> int:
    (file,) = folder.glob("*.safetensors")
    return sum(tensor.numel() for tensor in load_file(file).values())


KINDS = (("a room", "zoom_in", 0), ("a room", "arc_left", 0), ("a hall", "zoom_in", 0), ("a room", "zoom_in", 1))


def conditions(kinds: Sequence[tuple[str, str, int]] = KINDS) -> list[Condition]:
    """Return conditions of (prompt, camera, source); of KINDS, each differs from the first in one of them."""
    videos = render_views(WORLD, [make_scene(WORLD, "random", number) for number in range(2)], [0])
    return [
        dataclasses.replace(
            condition(index, index),
            prompt=prompt,
            source_video=videos[source],
            target_poses=preset_path(preset, WORLD.frames),
            target_video=None,
        )
        for index, (prompt, preset, source) in enumerate(kinds)
    ]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [SMALL, MIDDLE], ids=["small", "middle"])
def test_velocities_are_of_order_one_and_depend_on_camera_prompt_and_source(tmp_path, sizes, dtype):
    assert random_model.main(words(tmp_path / "model", sizes, dtype=dtype)) == 0
    policy = policy_of(tmp_path / "model", dtype)
    given = policy.encode(conditions())
    draw = torch.Generator().manual_seed(0)
    source = given.inputs["source_latents"]
    latents = torch.randn(source[:1].shape, generator=draw).expand_as(source)
    for sigma in (1.0, 0.5, 0.02):
        with torch.no_grad():
            velocity = policy.velocity(latents, torch.full((4,), sigma), given)
        assert velocity.shape == (4, 16, 3, 6, 10)
        assert 0.1 < float(velocity.std()) < 10
        for name, other in zip(("camera", "prompt", "source"), velocity[1:], strict=True):
            # Far above rounding: bf16 numbers of order one are off by 2e-3, which averages out.
            assert float((other - velocity[0]).std()) > 1e-3 * float(velocity.std()), name
    assert float((velocity[1] - velocity[0]).std()) > 0.01 * float(velocity.std())


@torch.no_grad()
def test_a_redirector_has_an_image_encoder_and_depends_on_all_its_inputs(tmp_path):
    sizes = Sizes(**{**vars(SMALL), "kind": "redirector", "image_dim": 32, "dtype": "fp32"})
    assert random_model.main(words(tmp_path / "model", sizes)) == 0
    transformer = load_transformer(ReDirectorTransformer3DModel, tmp_path / "model" / "transformer")
    images = ImageEncoder.from_folder(tmp_path / "model", torch.float32, device=torch.device("cpu"))
    videos = render_views(WORLD, [make_scene(WORLD, "random", number) for number in range(2)], [0])
    embeds = torch.stack([images.embed(video[:, 0]) for video in videos])
    assert embeds.shape == (2, 257, 32)

    draw = torch.Generator().manual_seed(0)
    lens = torch.tensor([80.0, 80.0, 40.0, 24.0])
    paths = [camera_pair(preset_path(name, 9), preset_path("pan_left", 9), lens) for name in ("zoom_in", "arc_left")]
    pairs = (
        torch.randn((2, 16, 6, 6, 10), generator=draw),
        torch.tensor([500.0, 20.0]),
        torch.randn((2, 7, 32), generator=draw),
        embeds,
        torch.stack(paths),
    )
    first = transformer(*(pair[:1] for pair in pairs))[0]
    assert first.shape == (1, 16, 3, 6, 10) and 0.1 < float(first.std()) < 10
    for number in range(5):
        other = transformer(*(pair[1:] if n == number else pair[:1] for n, pair in enumerate(pairs)))[0]
        assert float((other - first).std()) > 1e-3 * float(first.std()), number


@pytest.mark.parametrize("codec", some(sorted(random_model.CODECS), "small"))
def test_normalised_latents_and_videos_fill_their_ranges(codec):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = random_model.build_codec(codec)
    mean, std = torch.tensor(vae.config["latents_mean"]), torch.tensor(vae.config["latents_std"])
    world = WorldSpec(seed=3, scenes={}, frames=5, height=32, width=48)
    video = render_views(world, [make_scene(world, "random", 1)], [2]) * 2 - 1
    with torch.no_grad():
        latents = vae.encode(video).latent_dist.mode().transpose(1, -1)
        normal = (latents - mean) / std
        drawn = torch.randn(normal.shape, generator=torch.Generator().manual_seed(0))
        decoded = vae.decode((drawn * std + mean).transpose(1, -1)).sample
    assert normal.transpose(1, -1).shape == (1, 16, 2, 4, 6)  # 4 times shorter, 8 times smaller
    assert abs(float(normal.mean())) < 1
    assert 0.3 < float(normal.std()) < 3
    assert decoded.shape == video.shape
    assert 0.25 < float(decoded.std()) < 0.75


def test_without_options_it_is_wan_1_3b():
    sizes = Sizes()
    assert (sizes.dtype, sizes.codec) == ("bf16", "wan")
    with torch.device("meta"):
        transformer = ReCamTransformer3DModel(**WAN_1_3B)
        codec = random_model.AutoencoderKLWan(**random_model.CODECS["wan"])
    assert (sizes.heads, sizes.head_dim, sizes.layers) == (12, 128, 30)
    assert (sizes.ffn, sizes.text_dim) == (8960, 4096)
    # Wan's own 1,418,996,800 and, per block, a map of 12 numbers to 1536 and one of 1536 to 1536.
    wan = 1_418_996_800
    assert sum(p.numel() for p in transformer.parameters()) == wan + 30 * (13 * 1536 + 1537 * 1536)
    assert 4 * sum(p.numel() for p in codec.parameters()) == pytest.approx(507_609_880, rel=1e-3)  # its published file
    assert (codec.config["base_dim"], codec.config["z_dim"]) == (96, 16)


def test_output_and_record_state_parameters_and_bytes_of_the_sizes_asked_for(tmp_path, capsys):
    out = tmp_path / "model"
    assert random_model.main(words(out)) == 0
    _, line = capsys.readouterr().out.splitlines()
    counts = {name: parameters_of(out / name) for name in ("transformer", "vae", "text_encoder")}
    listed = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    assert line.startswith(f"random weights in {out}: {listed} parameters, ")
    record = json.loads((out / random_model.RECORD).read_text())
    stored = sum(f.stat().st_size for name in record["parts"] for f in (out / name).iterdir())
    assert line.endswith(f" {stored:,} bytes")
    assert record["weights"].startswith("random")
    assert record["settings"] == vars(SMALL)
    assert {name: part["parameters"] for name, part in record["parts"].items()} == counts
    configs = {name: json.loads((out / name / "config.json").read_text()) for name in ("transformer", "text_encoder")}
    config = configs["transformer"]
    assert (config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]) == (2, 16, 2)
    assert (config["ffn_dim"], config["text_dim"], configs["text_encoder"]["d_model"]) == (64, 32, 32)
    stored = load_file(out / "transformer" / "diffusion_pytorch_model.safetensors")
    assert stored["blocks.0.cam_encoder.weight"].dtype == stored["blocks.1.ffn.net.2.weight"].dtype == torch.bfloat16
    assert stored["blocks.0.scale_shift_table"].dtype == torch.float32  # as diffusers keeps it


def test_weights_depend_on_the_seed_only_and_the_global_random_state_is_kept():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = (random_model.build_parts(Sizes(**{**vars(SMALL), "seed": s})) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    for part in ("transformer", "vae", "text_encoder"):
        mine, same, else_ = (dict(made[part].named_parameters()) for made in (first, again, other))
        assert all(torch.equal(mine[name], same[name]) for name in mine)
        assert any(not torch.equal(mine[name], else_[name]) for name in mine)


def test_prompts_of_any_language_stay_distinct(tmp_path):
    assert random_model.main(words(tmp_path / "model")) == 0
    prompts = ["a room", "A room", "房间", "房子", ""]
    given = conditions([(prompt, "zoom_in", 0) for prompt in prompts])
    embeds = policy_of(tmp_path / "model").encode(given).prompt_embeds
    for number, one in enumerate(embeds):
        assert one.shape == (32, 32) and one.isfinite().all() and float(one.abs().max()) > 0
        assert all(not torch.allclose(one, other, atol=1e-3) for other in embeds[:number])


def test_an_empty_folder_is_filled_and_any_other_is_refused_untouched(tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    assert random_model.main(words(tmp_path / "empty")) == 0
    full, file = tmp_path / "full", tmp_path / "file"
    full.mkdir()
    (full / "weights").write_text("precious")
    file.write_text("precious")
    for out in (full, file, tmp_path / "empty"):
        assert refusal(capsys, random_model.main, words(out)).startswith(f"error: --out: {out} already exists")
    assert [path.name for path in full.iterdir()] == ["weights"] and file.read_text() == "precious"
    # A failure leaves nothing behind.
    monkeypatch.setattr(random_model, "build_parts", mock.Mock(side_effect=OSError("disk full")))
    capsys.readouterr()
    assert random_model.main(words(tmp_path / "model")) == 2 and "disk full" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full"]


@pytest.mark.parametrize(
    ("option", "value", "bound"),
    [
        ("heads", 0, "at least 1"),
        ("layers", -1, "at least 1"),
        ("ffn", 0, "at least 1"),
        ("text-dim", 0, "at least 1"),
        ("head-dim", 4, "even and at least 6"),
        ("head-dim", 15, "even and at least 6"),
        ("image-dim", 30, "a multiple of 4"),
    ],
)
def test_an_impossible_size_is_one_line_and_exit_code_2(tmp_path, capsys, option, value, bound):
    assert random_model.main(words(tmp_path / "model", **{option: value})) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"error: --{option}: got {value}, must be {bound}")
    assert not captured.out and not list(tmp_path.iterdir())


def test_the_smallest_sizes_work(tmp_path):
    assert random_model.main(words(tmp_path / "model", heads=1, head_dim=6, layers=1, ffn=1, text_dim=1)) == 0
    policy = policy_of(tmp_path / "model")
    given = policy.encode(conditions()[:1])
    with torch.no_grad():
        assert policy.velocity(given.inputs["source_latents"], torch.ones(1), given).isfinite().all()

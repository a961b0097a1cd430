"""Plain Wan text-to-video: its folder, and what is taken for it by mistake."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

from flow_grpo.models.encoders.codec import Codec
from flow_grpo.models.wan_policy import load_networks
from flow_grpo.models.wan_t2v import WAN_T2V
from flow_grpo.records import Condition
from tests.tiny_models import tiny_policy, tiny_settings
from tools import random_model

CPU = torch.device("cpu")
SIZES = ["--heads=2", "--head-dim=16", "--layers=2", "--ffn=64", "--text-dim=32", "--dtype=fp32", "--codec=small"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("t2v") / "model"
    assert random_model.main(["--kind", "wan_t2v", "--out", str(out), *SIZES]) == 0
    return out


def test_the_velocity_is_that_of_diffusers_network_and_depends_on_the_prompt_alone(folder):
    made = tiny_policy(load_networks(WAN_T2V, tiny_settings(folder), CPU), max_prompt_tokens=16)
    size = (9, 32, 48)
    conditions = [Condition(index=i, gid=i, slot=0, prompt=text, wanted_size=size) for i, text in enumerate("ab")]
    given = made.encode(conditions)
    assert given.inputs == {} and made.latent_shape(conditions) == (16, 3, 4, 6)
    latents = torch.randn((1, 16, 3, 4, 6), generator=torch.Generator().manual_seed(0)).repeat(2, 1, 1, 1, 1)
    with torch.no_grad():
        found = made.velocity(latents, torch.full((2,), 0.7), given)
        direct = made.module(latents, torch.full((2,), 700.0), given.prompt_embeds, return_dict=False)[0]
    torch.testing.assert_close(found, direct, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found[0], found[1])


def test_its_videos_may_be_twice_as_long_as_those_of_two_in_a_sequence():
    transformer = {"rope_max_seq_len": 1024, "patch_size": (1, 2, 2)}
    WAN_T2V.check_size((4093, 16384, 16384), transformer, (4, 8))
    with pytest.raises(ValueError, match="must be at most 4093x16384x16384"):
        WAN_T2V.check_size((4097, 16384, 16384), transformer, (4, 8))


def test_image_to_video_weights_and_models_of_two_transformers_are_refused(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "transformer_2").mkdir()
    with pytest.raises(ValueError, match="has a transformer_2: models of two transformers"):
        load_networks(WAN_T2V, tiny_settings(other), CPU)
    (other / "transformer_2").rmdir()
    network = load_networks(WAN_T2V, tiny_settings(folder), CPU).transformer
    settings = {name: value for name, value in network.config.items() if not name.startswith("_")}
    WAN_T2V.network(**settings | {"in_channels": 36}).save_pretrained(str(other / "transformer"))
    assert json.loads((other / "transformer" / "config.json").read_text())["_class_name"] == "WanTransformer3DModel"
    with pytest.raises(ValueError, match="reads 36 channels, must read 16 with this codec: it is of another model"):
        load_networks(WAN_T2V, tiny_settings(other), CPU)


def test_wan_2_2_s_codec_of_patches_and_residuals_is_read_by_the_same_class(tmp_path):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoencoderKLWan(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=6,
            dim_mult=[1, 2, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            is_residual=True,
            in_channels=12,
            out_channels=12,
            patch_size=2,
            latents_mean=[0.0] * 6,
            latents_std=[1.0] * 6,
            scale_factor_temporal=4,
            scale_factor_spatial=16,
        ).save_pretrained(str(tmp_path))
    codec = Codec.from_folder(tmp_path, tiny_settings(), CPU)
    latents = codec.encode(torch.rand(3, 5, 64, 32))
    assert latents.shape == (6, 2, 4, 2)
    assert codec.decode(latents[None]).shape == (1, 3, 5, 64, 32)

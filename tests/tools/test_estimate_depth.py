"""Depth maps beside clips, by a model of the real architecture with random weights."""

import json

import pytest
import torch

from flow_grpo.data.depth_files import read_depth
from flow_grpo.runtime.video_file import write_video
from tests.data.cases import clip
from tools import estimate_depth


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import DepthAnythingConfig, DepthAnythingForDepthEstimation, Dinov2Config

    folder = tmp_path_factory.mktemp("depth_model")
    small = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    backbone = Dinov2Config(**small, out_indices=[1, 2, 3, 4], reshape_hidden_states=False, apply_layernorm=True)
    sizes = {"reassemble_hidden_size": 16, "neck_hidden_sizes": [4, 4, 8, 8], "fusion_hidden_size": 8}
    kind = {"head_hidden_size": 4, "depth_estimation_type": "metric", "max_depth": 20, "initializer_range": 0.4}
    config = DepthAnythingConfig(backbone_config=backbone, **sizes, **kind)
    torch.manual_seed(0)
    DepthAnythingForDepthEstimation(config).save_pretrained(folder)
    said = {"size": {"height": 28, "width": 28}, "keep_aspect_ratio": True, "ensure_multiple_of": 14, "resample": 3}
    said |= {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    return folder


def test_a_clip_gets_maps_in_metres_once(model, tmp_path, capsys):
    video = tmp_path / "street.mp4"
    write_video(video, clip(0), lossless=True)
    words = [str(tmp_path), "--model", str(model), "--maps", "3", "--device", "cpu"]
    assert estimate_depth.main(words) == 0
    found = read_depth(video, 16, 24)
    assert found.frames.tolist() == [0, 2, 4] and found.maps.shape == (3, 16, 24)
    assert ((found.maps > 0) & (found.maps <= 20)).all() and found.maps.std((1, 2)).min() > 0.1
    assert (found.maps[0] - found.maps[2]).abs().max() > 0.1
    assert "street.mp4: " in capsys.readouterr().out
    written = (tmp_path / "street.depth.npz").stat().st_mtime_ns
    assert estimate_depth.main(words) == 0 and (tmp_path / "street.depth.npz").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("changes", "got"), [({"depth_estimation_type": "relative"}, "a relative depth_anything"), (None, "no model")]
)
def test_a_model_that_knows_no_metres_is_refused(model, tmp_path, capsys, changes, got):
    write_video(tmp_path / "street.mp4", clip(0))
    if changes:
        said = json.loads((model / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(said))
    assert estimate_depth.main([str(tmp_path), "--model", str(tmp_path)]) == 2
    assert f"holds {got}, must be a folder of Depth Anything V2 Metric" in capsys.readouterr().err

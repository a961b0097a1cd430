"""The policy without weights."""

from __future__ import annotations

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from flow_grpo.preflight.fake_policy import codec_config, outline, transformer_config, without_memory
from flow_grpo.settings.loading import load_config


def test_without_a_folder_everything_is_wan_s():
    config = load_config("config/grpo.py:my_recam_8npu")
    assert transformer_config(config)["num_layers"] == 30
    codec = codec_config(config)
    assert (codec["z_dim"], codec["scale_factor_temporal"], codec["scale_factor_spatial"]) == (16, 4, 8)
    with without_memory():
        policy = outline(config)
        assert all(isinstance(parameter, FakeTensor) for parameter in policy.module.parameters())
        block, two = (sum(p.numel() for p in part.parameters()) for part in (policy.module.blocks[0], policy.module))
        assert two + 28 * block == 1_490_420_800


def test_a_folder_s_configurations_count_and_what_they_leave_out_is_wan_s(tmp_path):
    for part, content in (("transformer", {"num_layers": 3}), ("vae", {"z_dim": 16, "base_dim": 24})):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(json.dumps(content))
    config = load_config("config/grpo.py:my_recam_8npu", [f"--config.model.path={tmp_path}"])
    assert transformer_config(config)["num_layers"] == 3 and transformer_config(config)["text_dim"] == 4096
    assert codec_config(config)["base_dim"] == 24 and codec_config(config)["scale_factor_temporal"] == 4


def test_an_outline_never_loads_a_text_encoder():
    config = load_config("config/grpo.py:tiny_recam")
    with without_memory():
        policy = outline(config)
        assert policy.encodings.prompt("x").shape == (8, transformer_config(config)["text_dim"])
        with pytest.raises(AssertionError, match="no text encoder"):
            policy.texts._open_parts()
    assert not torch.is_grad_enabled() or not policy.texts.loaded

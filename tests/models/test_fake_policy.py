"""The policy on fake tensors."""

import json
from pathlib import Path

from torch._subclasses.fake_tensor import FakeTensor

from flow_grpo.models.encoders.codec import read_config
from flow_grpo.models.fake_policy import FakePolicy, transformer_config
from flow_grpo.models.recam import RECAM
from flow_grpo.settings.loading import load_config
from tests.tiny_models import make_tiny_folder


def test_without_a_model_folder_every_network_is_that_of_wan_and_no_text_encoder_is_loaded():
    config = load_config("config/grpo.py:my_recam_8npu")
    codec = read_config(Path(config.model.path, "vae"))
    assert (codec["z_dim"], codec["scale_factor_temporal"], codec["scale_factor_spatial"]) == (16, 4, 8)
    policy = FakePolicy(config)
    assert all(isinstance(parameter, FakeTensor) for parameter in policy.module.parameters())
    frozen = {
        n: p.numel() for n, p in policy.module.named_parameters() if not n.endswith((".down.weight", ".up.weight"))
    }
    block, two = (sum(n for name, n in frozen.items() if name.startswith(place)) for place in ("blocks.0.", ""))
    assert policy.encodings.prompt("x").shape == (512, 4096) and policy.texts._network is None
    assert two + (transformer_config(RECAM, config.model.path)["num_layers"] - 2) * block == 1_490_420_800


def test_what_a_model_folder_leaves_out_is_that_of_wan(tmp_path):
    for part, content in (("transformer", {"num_layers": 3}), ("vae", {"z_dim": 16, "base_dim": 24})):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(json.dumps(content))
    transformer, codec = transformer_config(RECAM, tmp_path), read_config(tmp_path / "vae")
    assert (transformer["num_layers"], transformer["text_dim"]) == (3, 4096)
    assert (codec["base_dim"], codec["scale_factor_temporal"]) == (24, 4)


def test_a_key_of_a_later_diffusers_in_a_configuration_is_left_out_as_where_weights_are_loaded(tmp_path):
    config = load_config("config/grpo.py:tiny_recam", [f"--config.model.path={make_tiny_folder(tmp_path)}"])
    file = tmp_path / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"of_tomorrow": 1}))
    assert len(FakePolicy(config).module.blocks) == 2

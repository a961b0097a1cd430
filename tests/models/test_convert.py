"""Tensor names of ReCamMaster against diffusers' own converter, and the checks that a checkpoint fits a model."""

from __future__ import annotations

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from flow_grpo.models import convert
from flow_grpo.models.recam_transformer import ReCamTransformer3DModel
from tests.tiny_models import tiny_transformer


def checkpoint(model: ReCamTransformer3DModel | None = None, *, camera: bool = True, dtype=torch.float32):
    """Return random weights of the model's shapes under the original names."""
    model = model or tiny_transformer()
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    draw = torch.Generator().manual_seed(0)
    return {
        old: torch.empty(shapes[new], dtype=dtype).normal_(0, 0.1, generator=draw)
        for old, new in convert.tensor_names(len(model.blocks), camera=camera).items()
    }


def to_diffusers(state):
    return convert.plan_renaming(state).apply(state)


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def prefixed(prefix: str, state):
    return {prefix + name: value for name, value in state.items()}


@pytest.mark.parametrize(
    ("kind", "camera", "count"), [(WanTransformer3DModel, False, 825), (ReCamTransformer3DModel, True, 945)]
)
def test_the_table_has_every_tensor_of_the_published_model(kind, camera, count):
    config = {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960, "cross_attn_norm": True}
    with torch.device("meta"):
        expected = kind(**config).state_dict().keys()
    assert set(convert.tensor_names(30, camera=camera).values()) == expected
    assert len(expected) == count


@pytest.mark.parametrize("camera", [False, True])
def test_names_and_tensors_agree_with_the_converter_of_diffusers(camera):
    state = checkpoint(camera=camera)
    assert same(to_diffusers(state), convert_wan_transformer_to_diffusers(dict(state)))


@pytest.mark.parametrize("camera", [False, True])
@pytest.mark.parametrize("prefix", ["module.", "model.diffusion_model.", "pipe.dit.", ""])
def test_both_directions_keep_the_tensors_and_drop_a_known_prefix(prefix, camera):
    state = checkpoint(camera=camera)
    there = convert.plan_renaming(prefixed(prefix, state))
    back = convert.plan_renaming(prefixed(prefix, to_diffusers(state)), back=True)
    assert there.prefix == back.prefix == prefix
    assert there.camera == back.camera == camera
    assert same(there.apply(prefixed(prefix, state)), to_diffusers(state))
    assert same(back.apply(prefixed(prefix, to_diffusers(state))), state)


@pytest.mark.parametrize("prefix", ["net.", "blocks.", "modul."])
def test_an_unknown_prefix_is_not_guessed(prefix):
    with pytest.raises(ValueError, match=rf"unexpected \d+ \({prefix}"):
        convert.plan_renaming(prefixed(prefix, checkpoint()))


def test_every_missing_name_is_reported():
    names = list(checkpoint())
    for name in names:
        with pytest.raises(ValueError, match="not ReCamMaster") as caught:
            convert.plan_renaming([other for other in names if other != name])
        assert f"lacks 1 ({name}), and has unexpected none" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "blocks.0.cross_attn.k_img.weight",  # image to video
        "module.head.head.bias",  # a prefix on some names only
        "blocks.1.norm1.weight",
        "blocks.0.self_attn.q.weight.extra",
        "blocks.99999999999.self_attn.q.weight",
        "blocks.100.self_attn.q.weight",
        "blocks.x.self_attn.q.weight",
    ],
)
def test_every_unexpected_name_is_reported(name):
    with pytest.raises(ValueError, match="is not") as caught:
        convert.plan_renaming([*checkpoint(), name])
    assert f"lacks none, and has unexpected 1 ({name})" in str(caught.value)


def test_many_wrong_names_are_counted_and_the_first_are_shown():
    rest = [name for name in checkpoint() if not name.startswith("blocks.0.")]
    with pytest.raises(ValueError, match=r"of 77 tensors .* lacks 31 \(blocks\.0\.\S+, \S+, \S+, \.\.\.\)"):
        convert.plan_renaming(rest)
    with pytest.raises(ValueError, match=r"of 42 tensors .* lacks 42"):
        convert.plan_renaming([])


@pytest.mark.parametrize("back", [False, True])
def test_the_other_layout_is_refused_with_a_hint(back):
    state = checkpoint() if back else to_diffusers(checkpoint())
    wanted = "in diffusers rather than the original" if back else "in the original rather than diffusers"
    with pytest.raises(ValueError, match=wanted):
        convert.plan_renaming(state, back=back)


def test_every_misshapen_tensor_is_reported():
    model = tiny_transformer()
    for old, new in convert.tensor_names(1, camera=True).items():
        state = checkpoint(model)
        state[old] = state[old][..., :-1]
        with pytest.raises(ValueError, match="checkpoint has") as caught:
            convert.check_shapes(to_diffusers(state), model)
        assert new in str(caught.value)


def test_weights_without_camera_modules_do_not_fit_a_recam_configuration():
    with pytest.raises(ValueError, match=r"disagree on 8 .*cam_encoder"):
        convert.check_shapes(to_diffusers(checkpoint(camera=False)), tiny_transformer())


def test_only_what_diffusers_keeps_in_fp32_is_stored_in_fp32():
    state = {name: torch.zeros(1, dtype=torch.bfloat16) for name in ("a.weight", "b.norm2.weight", "norm22.weight")}
    half, full = torch.float16, torch.float32
    assert list(convert.target_dtypes(state, half).values()) == [half, full, half]
    assert set(convert.target_dtypes(state, half, keep_fp32=False).values()) == {half}
    assert set(convert.target_dtypes(state, None).values()) == {torch.bfloat16}

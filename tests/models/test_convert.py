"""Published tensor names against diffusers' own converter, and the checks that a checkpoint fits a model."""

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from flow_grpo.models.files import convert
from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.redirector_transformer import ReDirectorTransformer3DModel
from tests.tiny_models import tiny_redirector, tiny_transformer


def checkpoint(model: ReCamTransformer3DModel | None = None, *, camera: bool = True, dtype=torch.float32):
    """Return random weights of the model's shapes under the original names."""
    model = model or tiny_transformer()
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    draw = torch.Generator().manual_seed(0)
    return {
        old: torch.empty(shapes[new], dtype=dtype).normal_(0, 0.1, generator=draw)
        for old, new in layout(camera).names(len(model.blocks)).items()
    }


def layout(camera: bool) -> convert.Layout:
    return convert.RECAM if camera else convert.WAN


def plan(found, *, back: bool = False) -> convert.Renaming:
    names = list(found)
    return convert.plan_renaming(names, convert.text_to_video_layout(names), back=back)


def to_diffusers(state):
    return plan(state).apply(state)


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
    assert set(layout(camera).names(30).values()) == expected
    assert len(expected) == count


@pytest.mark.parametrize("layout", [convert.WAN, convert.RECAM, convert.FUN_CAMERA])
def test_names_agree_with_the_converter_of_diffusers(layout):
    ours = {old: new for old, new in layout.names(2).items() if not old.startswith("control_adapter.")}
    state = {old: torch.full((1,), float(number)) for number, old in enumerate(ours)}
    assert same({new: state[old] for old, new in ours.items()}, convert_wan_transformer_to_diffusers(dict(state)))


@pytest.mark.parametrize("camera", [False, True])
@pytest.mark.parametrize("prefix", ["module.", "model.diffusion_model.", "pipe.dit.", ""])
def test_both_directions_keep_the_tensors_and_drop_a_known_prefix(prefix, camera):
    state = checkpoint(camera=camera)
    there = plan(prefixed(prefix, state))
    back = plan(prefixed(prefix, to_diffusers(state)), back=True)
    assert there.prefix == back.prefix == prefix
    assert there.layout == back.layout == layout(camera) and there.depth == back.depth == 2
    assert same(there.apply(prefixed(prefix, state)), to_diffusers(state))
    assert same(back.apply(prefixed(prefix, to_diffusers(state))), state)


@pytest.mark.parametrize("prefix", ["net.", "blocks.", "modul."])
def test_an_unknown_prefix_is_not_guessed(prefix):
    with pytest.raises(ValueError, match=rf"unexpected \d+ \({prefix}"):
        plan(prefixed(prefix, checkpoint()))


def test_every_missing_name_is_reported():
    names = list(checkpoint())
    for name in names:
        with pytest.raises(ValueError, match="not ReCamMaster") as caught:
            plan([other for other in names if other != name])
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
        plan([*checkpoint(), name])
    assert f"lacks none, and has unexpected 1 ({name})" in str(caught.value)


def test_many_wrong_names_are_counted_and_the_first_are_shown():
    rest = [name for name in checkpoint() if not name.startswith("blocks.0.")]
    with pytest.raises(ValueError, match=r"of 77 tensors .* lacks 31 \(blocks\.0\.\S+, \S+, \S+, \.\.\.\)"):
        plan(rest)
    with pytest.raises(ValueError, match=r"of 42 tensors .* lacks 42"):
        plan([])


@pytest.mark.parametrize("back", [False, True])
def test_the_other_layout_is_refused_with_a_hint(back):
    state = checkpoint() if back else to_diffusers(checkpoint())
    wanted = "in diffusers rather than the original" if back else "in the original rather than diffusers"
    with pytest.raises(ValueError, match=wanted):
        plan(state, back=back)


def test_every_misshapen_or_lacking_tensor_is_reported():
    model = tiny_transformer()
    for old, new in convert.RECAM.names(1).items():
        state = checkpoint(model)
        state[old] = state[old][..., :-1]
        with pytest.raises(ValueError, match="checkpoint has") as caught:
            convert.check_shapes(to_diffusers(state), model)
        assert new in str(caught.value)
    with pytest.raises(ValueError, match=r"disagree on 8 .*cam_encoder"):
        convert.check_shapes(to_diffusers(checkpoint(camera=False)), tiny_transformer())


def test_only_what_diffusers_keeps_in_fp32_is_stored_in_fp32():
    state = {name: torch.zeros(1, dtype=torch.bfloat16) for name in ("a.weight", "b.norm2.weight", "norm22.weight")}
    half, full = torch.float16, torch.float32
    assert list(convert.target_dtypes(state, half).values()) == [half, full, half]
    assert set(convert.target_dtypes(state, half, keep_fp32=False).values()) == {half}
    assert set(convert.target_dtypes(state, None).values()) == {torch.bfloat16}


def redirector_files(blocks: int = 2):
    """Return base and step as published: names of the description, whose numbers tell their places apart."""
    state = tiny_redirector(spatial=8).state_dict()
    names = {old: new for old, new in convert.REDIRECTOR.names(2).items() if not old.startswith(f"blocks.{blocks}.")}
    step = {old: state[new] for old, new in names.items() if ".self_attn." in old}
    base = {old: -state[new] for old, new in names.items() if "rope_phase" not in old}
    return base, step


def test_every_tensor_of_the_full_redirector_has_a_published_name_and_back():
    with torch.device("meta"):
        expected = ReDirectorTransformer3DModel().state_dict().keys()
    whole, base, step = (one.names(30) for one in (convert.REDIRECTOR, convert.FUN_CAMERA, convert.REDIRECTOR_STEP))
    assert (len(whole), len(base), len(step)) == (1049, 989, 360)
    assert set(whole.values()) == expected and len(set(whole.values())) == len(whole)
    assert whole == base | step and len(base.keys() & step.keys()) == 300
    assert all(".self_attn." in name for name in step)
    there = convert.plan_renaming(whole, convert.REDIRECTOR)
    back = convert.plan_renaming(expected, convert.REDIRECTOR, back=True)
    assert {new: old for old, new in there.names.items()} == dict(back.names) and there.depth == back.depth == 30
    assert step["blocks.0.self_attn.rope_phase_qk.1.weight"] == "blocks.0.attn1.phase_qk.weight"
    assert step["blocks.0.self_attn.rope_phase_vo.1.weight"] == "blocks.0.attn1.phase_vo.weight"
    assert base["control_adapter.residual_blocks.0.conv2.bias"] == "control_adapter.conv2.bias"


@pytest.mark.parametrize("prefix", ["", "pipe.dit."])
def test_a_step_replaces_the_bases_self_attention_and_nothing_else(prefix):
    base, step = redirector_files()
    whole, below, above = convert.with_step(base, prefixed(prefix, step))
    expected = tiny_redirector(spatial=8).state_dict()
    assert whole.keys() == expected.keys()
    for name, value in whole.items():
        assert torch.equal(value, expected[name] if ".attn1." in name else -expected[name]), name
    assert (len(below.names), len(above.names), above.prefix) == (93, 24, prefix)
    convert.check_shapes(whole, tiny_redirector(spatial=8))
    assert same(convert.plan_renaming(whole, convert.REDIRECTOR, back=True).apply(whole), base | step)


def test_every_missing_or_unexpected_name_of_base_and_step_is_reported():
    base, step = redirector_files()
    phase = "blocks.0.self_attn.rope_phase_qk.1.weight"
    with pytest.raises(ValueError, match=rf"lacks none, and has unexpected 1 \({phase}\)"):
        convert.with_step(base | {phase: step[phase]}, step)
    for name in (*base, *step):
        pair = [{old: value for old, value in one.items() if old != name} for one in (base, step)]
        if name in base and name in step:
            pair[0] = base
        with pytest.raises(ValueError, match=r"in the original layout") as caught:
            convert.with_step(*pair)
        assert f"lacks 1 ({name}), and has unexpected none" in str(caught.value) and "\n" not in str(caught.value)


def test_sizes_are_read_from_the_tensors_and_heads_from_the_configuration_of_as_many_blocks():
    base, step = redirector_files()
    state = convert.with_step(base, step)[0]
    config = convert.redirector_config({"num_heads": 2, "eps": 1e-6}, state)
    model, expected = ReDirectorTransformer3DModel(**config), tiny_redirector(spatial=8)
    convert.check_shapes(state, model)
    assert dict(model.config) == dict(expected.config) | {"rope_max_seq_len": 1024}
    base, _ = redirector_files()
    _, step = redirector_files(blocks=1)
    with pytest.raises(ValueError, match="self-attention of 1 blocks, the base 2 blocks"):
        convert.with_step(base, step)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, "num_heads None, expected a divisor of the width 24"),
        ({"num_heads": 5}, "num_heads 5, expected"),
        ({"num_heads": 2, "in_dim_control_adapter": 6}, "in_dim_control_adapter 6, the tensors 24"),
        ({"num_heads": 2, "downscale_factor_control_adapter": 16}, "control_adapter 16, the tensors 8"),
        ({"num_heads": 2, "in_dim": 48}, "in_dim 48, the tensors 8"),
    ],
)
def test_configurations_of_other_models_are_refused(found, message):
    with pytest.raises(ValueError, match=message):
        convert.redirector_config(found, convert.with_step(*redirector_files())[0])


def test_every_misshapen_tensor_of_redirector_is_reported():
    state = convert.with_step(*redirector_files())[0]

    def check(tensors):
        config = convert.redirector_config({"num_heads": 2, "text_dim": 16, "freq_dim": 16}, tensors)
        convert.check_shapes(tensors, convert.empty_model(config, ReDirectorTransformer3DModel))

    check(state)
    for name in convert.REDIRECTOR.names(1).values():
        wrong = state | {name: state[name][..., :-1]}
        with pytest.raises(ValueError, match=r"checkpoint has|expected a divisor|the tensors") as caught:
            check(wrong)
        assert "\n" not in str(caught.value)

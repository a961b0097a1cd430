"""Training modes, trained state, disabled adapters, and the moving average."""

import contextlib
import dataclasses
import re

import pytest
import torch
from torch import nn

from flow_grpo.models import adapters
from flow_grpo.settings.schema import ModelConfig
from tests.models.test_recam_transformer import inputs
from tests.tiny_models import tiny_transformer

SELF_ATTENTION = r"blocks\.\d+\.attn1\.(to_q|to_k|to_v|to_out\.0)"
LORA = ModelConfig(
    path="",
    dtype="fp32",
    trained="lora",
    lora_rank=2,
    lora_alpha=4,
    lora_targets=SELF_ATTENTION,
    lora_full_modules=("cam_encoder",),
    checkpointing="none",
    max_prompt_tokens=8,
    vae_slicing=False,
)


def trained_model(**changes):
    model = tiny_transformer()
    adapters.apply_training_mode(model, dataclasses.replace(LORA, **changes))
    return model


def names(model: nn.Module) -> set[str]:
    """Kinds of trained parameters, without block numbers."""
    return {re.sub(r"^blocks\.\d+\.", "", name) for name in adapters.trained_parameters(model)}


def trained_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in adapters.trained_parameters(model).items()}


def move(model: nn.Module, by: float = 0.05) -> None:
    with torch.no_grad():
        for parameter in adapters.trained_parameters(model).values():
            parameter += by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def output(model: nn.Module) -> torch.Tensor:
    return model(*inputs())[0]


def test_lora_reaches_self_attention_only_and_trains_cam_encoder_in_full():
    adapted = [f"attn1.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")]
    layers = {f"{layer}.lora_{side}.default.weight" for layer in adapted for side in "AB"}
    camera = {f"cam_encoder.modules_to_save.default.{part}" for part in ("weight", "bias")}
    model = trained_model()
    assert names(model) == layers | camera and names(trained_model(lora_full_modules=())) == layers
    assert len(adapters.trained_parameters(model)) == 2 * len(layers | camera)
    assert set(adapters.adapted_modules(model)) == {f"blocks.{block}.{layer}" for block in (0, 1) for layer in adapted}
    assert not any(module.training for module in model.modules())
    assert all(module.p == 0 for module in model.modules() if isinstance(module, nn.Dropout))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("camera", {"cam_encoder"}), ("attention", {"cam_encoder", "projector", "attn1"}), ("full", None)],
)
def test_the_other_modes_train_parameters_themselves(mode, expected):
    model = trained_model(trained=mode)
    assert not adapters.has_lora(model) and not any(module.training for module in model.modules())
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (expected is None or bool(expected & set(name.split("."))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_targets": r"blocks\.\d+\.attn1\.q_proj"}, r"q_proj.* matches no module .*blocks\.1\."),
        ({"lora_full_modules": ("camera",)}, r"names 'camera', which is none of .*'cam_encoder'"),
    ],
)
def test_names_that_match_nothing_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        trained_model(**changes)


def test_adapters_start_neutral_and_identical_whatever_the_global_seed():
    start = output(tiny_transformer())
    torch.manual_seed(1)
    first = trained_model()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = trained_model()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(output(first), start)
    states = trained_state(first), trained_state(second)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_trained_weights_are_fp32_where_frozen_ones_are_bf16():
    model = tiny_transformer().to(torch.bfloat16)
    adapters.apply_training_mode(model, dataclasses.replace(LORA, dtype="bf16"))
    assert {parameter.dtype for parameter in adapters.trained_parameters(model).values()} == {torch.float32}
    assert model.blocks[0].ffn.net[2].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("mode", ["lora", "camera", "full"])
def test_trained_state_round_trips_through_another_instance(mode):
    model, other = trained_model(trained=mode), trained_model(trained=mode)
    move(model)
    state = trained_state(model)
    kept = {name: value.clone() for name, value in state.items()}
    move(model)
    assert all(torch.equal(state[name], kept[name]) for name in kept)  # copies, not views
    adapters.load_trained_state(other, state)
    adapters.load_trained_state(model, state)
    assert torch.equal(output(model), output(other))
    assert not torch.equal(output(other), output(tiny_transformer()))


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape", "mode"])
def test_loading_a_state_that_does_not_fit_is_refused_and_changes_nothing(change):
    model = trained_model()
    fitting = {name: value + 1 for name, value in trained_state(model).items()}
    first, *others = fitting
    state = {
        "missing": {name: fitting[name] for name in others},
        "unexpected": fitting | {"blocks.9.extra": torch.zeros(1)},
        "shape": fitting | {first: torch.zeros(3, 3)},
        "mode": trained_state(trained_model(trained="camera")),
    }[change]
    before = trained_state(model)
    with pytest.raises(ValueError, match="checkpoint of another training mode or model"):
        adapters.load_trained_state(model, state)
    assert all(torch.equal(value, before[name]) for name, value in trained_state(model).items())


@pytest.mark.parametrize("error", [False, True])
def test_disabled_adapters_give_the_start_and_come_back_even_after_an_error(error):
    model = trained_model()
    move(model)
    moved = output(model)
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with contextlib.suppress(ZeroDivisionError), adapters.adapters_off(model):
        assert torch.equal(output(model), output(tiny_transformer()))
        assert 1 / (not error)
    assert torch.equal(output(model), moved)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == flags


def test_the_average_follows_its_formula_from_the_start_values():
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    ema = adapters.Ema([parameter], decay=0.9)
    average = parameter.detach().clone()
    for value in ([2.0, 0.0], [4.0, 8.0], [-1.0, 3.0]):
        with torch.no_grad():
            parameter.copy_(torch.tensor(value))
        ema.update()
        average = 0.9 * average + 0.1 * torch.tensor(value)
        with ema.applied():
            torch.testing.assert_close(parameter.detach(), average, rtol=1e-6, atol=0)
        assert parameter.tolist() == value


def test_an_average_resumes_exactly_from_its_saved_state():
    first, second = trained_model(trained="camera"), trained_model(trained="camera")
    averages = [adapters.Ema(list(adapters.trained_parameters(m).values()), 0.5) for m in (first, second)]
    move(first)
    averages[0].update()
    adapters.load_trained_state(second, trained_state(first))
    state = averages[0].state_dict()
    averages[1].load_state_dict(state)
    for model, average in zip((first, second), averages, strict=True):
        move(model)
        average.update()
    with averages[0].applied(), averages[1].applied():
        assert torch.equal(output(first), output(second))
    assert not torch.equal(state["0"], averages[0].state_dict()["0"])  # a copy


@pytest.mark.parametrize("state", [{}, {"0": torch.zeros(3)}, {"0": torch.zeros(2), "1": torch.zeros(2)}])
def test_an_average_refuses_a_state_that_does_not_fit(state):
    with pytest.raises(ValueError, match="EMA state holds"):
        adapters.Ema([nn.Parameter(torch.zeros(2))], 0.5).load_state_dict(state)

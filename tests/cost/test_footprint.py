"""Counts on fake tensors against real forwards."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flow_grpo.cost.footprint import count_network, footprint, peak_bytes, saved_bytes
from flow_grpo.models.adapters import apply_training_mode, trained_parameters
from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.recomputation import set_checkpointing
from flow_grpo.models.recam import RECAM
from flow_grpo.models.video_model import WAN_1_3B
from flow_grpo.runtime.device import DTYPES
from tests.models.test_adapters import LORA
from tests.some import some

MIDDLE = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 64,
    "freq_dim": 16,
    "ffn_dim": 512,
    "num_layers": 4,
    "rope_max_seq_len": 64,
}
SHAPE = (4, 3, 16, 16)


@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("trained", some(["lora", "camera", "attention", "full"], "lora", "full"))
def test_bytes_saved_for_the_backward_are_those_of_a_real_forward(trained, name, checkpointing):
    model = dataclasses.replace(LORA, dtype=name, trained=trained, lora_rank=8, checkpointing=checkpointing)
    planned, dtype = footprint(RECAM, MIDDLE, SHAPE, model, rows=2), DTYPES[name]
    network = ReCamTransformer3DModel(**MIDDLE).to(dtype)
    apply_training_mode(network, model)
    set_checkpointing(network, checkpointing)
    inputs = (torch.randn(2, 4, 6, 16, 16), torch.full((2,), 500.0), torch.randn(2, 8, MIDDLE["text_dim"]))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        real = saved_bytes(network, lambda: network(*inputs, torch.randn(2, 3, 12))[0])
    assert planned.kept_bytes == pytest.approx(real, rel=0.15)
    assert planned.trained == sum(p.numel() for p in trained_parameters(network).values())
    assert planned.tokens == 2 * 3 * 8 * 8


@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
@pytest.mark.parametrize("trained", ["lora", "camera", "attention", "full"])
def test_operations_of_an_update_are_those_that_torch_counts_on_a_real_network(trained, checkpointing):
    model = dataclasses.replace(LORA, dtype="fp32", trained=trained, lora_rank=8, checkpointing=checkpointing)
    planned = footprint(RECAM, MIDDLE, SHAPE, model, rows=2)
    network = ReCamTransformer3DModel(**MIDDLE)
    apply_training_mode(network, model)
    set_checkpointing(network, checkpointing)
    inputs = (torch.randn(2, 4, 6, 16, 16), torch.full((2,), 500.0), torch.randn(2, 8, MIDDLE["text_dim"]))
    inputs += (torch.randn(2, 3, 12),)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        with torch.no_grad():
            network(*inputs)
        forward = counter.get_total_flops()
        network(*inputs)[0].sum().backward()
    assert planned.forward_flops == forward
    assert planned.train_flops + planned.recomputed_flops == counter.get_total_flops() - forward
    assert planned.recomputed_flops == (0 if checkpointing == "none" else pytest.approx(forward, rel=0.15))


def test_the_real_model_has_its_published_size_and_cost():
    model = dataclasses.replace(LORA, dtype="bf16", lora_rank=64, checkpointing="blocks", max_prompt_tokens=512)
    real = footprint(RECAM, WAN_1_3B, (16, 21, 60, 104), model, rows=1)
    assert real.tokens == 65_520
    assert real.parameters == 1_490_420_800
    assert real.trained == pytest.approx(23.6e6 + 0.6e6, rel=0.01)
    assert real.forward_flops / 1e12 == pytest.approx(955, rel=0.005)
    # Frozen weights need no gradient: an update is no 3 forwards, and none of 4 where blocks are recomputed.
    assert real.train_flops / real.forward_flops == pytest.approx(2.8, abs=0.03)
    assert real.recomputed_flops / real.forward_flops == pytest.approx(1.0, abs=0.01)
    assert real.kept_bytes / 2**30 == pytest.approx(5.8, rel=0.01)  # 29.5 block boundaries of 201 MB
    assert 3 < real.block_bytes / 2**30 < 8
    whole = dataclasses.replace(model, trained="attention")
    assert footprint(RECAM, WAN_1_3B, (16, 21, 60, 104), whole, rows=1).trained == 354_816_000


def test_attention_that_is_kept_costs_its_outputs_and_spares_its_operations():
    model = dataclasses.replace(LORA, dtype="bf16", lora_rank=64, checkpointing="blocks", max_prompt_tokens=512)
    kept = dataclasses.replace(model, checkpointing="keep_attention")
    shape, tokens, width, blocks = (16, 21, 60, 104), 65_520, 1536, 29.5  # the last block asks for the target alone
    without, found = (footprint(RECAM, WAN_1_3B, shape, one, rows=2) for one in (model, kept))
    outputs = 2 * blocks * 2 * tokens * width * 2  # self- and cross-attention, 2 rows, 2 bytes
    sums = 2 * blocks * 2 * tokens * 12 * 4  # and the logarithm of the softmax's denominator for 12 heads, in fp32
    assert found.kept_bytes - without.kept_bytes == outputs + sums
    assert found.attention_flops == 4 * 2 * blocks * width * tokens * (tokens + 512)
    assert found.attention_flops / found.forward_flops == pytest.approx(0.82, abs=0.01)
    assert without.recomputed_flops - found.recomputed_flops == found.attention_flops


@pytest.mark.parametrize("trained", ["lora", "full"])
def test_counts_for_many_blocks_are_those_of_the_network_itself(trained):
    model = dataclasses.replace(LORA, dtype="bf16", trained=trained, checkpointing="blocks")
    many = MIDDLE | {"num_layers": 5}
    planned = dataclasses.asdict(footprint(RECAM, many, SHAPE, model, rows=2))
    counted = count_network(RECAM, many, SHAPE, model, 2)
    for name, value in counted.items():
        # A network also holds gradients and half-precision copies of the weights of its other blocks.
        spare = 6 * counted["parameters"] if name in ("block_bytes", "forward_bytes") else 0
        assert 0 <= value - planned[name] <= spare, name


def test_the_peak_counts_tensors_alive_at_once_and_views_are_free():
    def call():
        first = torch.empty(1000)  # 4,000 bytes
        second = first.view(10, 100) + 1  # 8,000
        del first
        return second.float() * 2  # 8,000 again

    with FakeTensorMode():
        assert peak_bytes(call) == 8000
        layer, given = torch.nn.Linear(1000, 10), torch.empty(1, 1000)
        assert peak_bytes(lambda: layer(given), layer) == 4 * 10  # of its weight only a view is made

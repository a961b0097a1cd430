"""What the backward pass recomputes changes time and memory, and no gradient."""

import copy
import logging

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from flow_grpo.models.networks.recomputation import set_checkpointing
from flow_grpo.models.recam import RECAM
from flow_grpo.models.redirector import REDIRECTOR
from flow_grpo.models.wan_t2v import WAN_T2V
from flow_grpo.runtime import device as device_api
from tests.models.test_context_parallel import case
from tests.tiny_models import CHANNELS, tiny_transformer

LATENTS = (CHANNELS, 3, 4, 6)
# Attention operators in a block: self-attention, prompt, and ReDirector's image.
MODELS = {"recam": (RECAM, 2), "redirector": (REDIRECTOR, 3), "wan_t2v": (WAN_T2V, 2)}


class Attentions(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in device_api.attention_operators()
        return func(*args, **(kwargs or {}))


def gradients(
    kind: str, mode: str, dtype: torch.dtype, compiler: str | None = None
) -> tuple[list[torch.Tensor], int, int]:
    """Return all gradients, and how often attention was computed in the forward and in the backward pass."""
    model, (made, *_) = MODELS[kind][0], case(kind)
    set_checkpointing(made, mode, compiler)
    draw = torch.Generator().manual_seed(1)
    latents, prompts = torch.randn((2, *LATENTS), generator=draw), torch.randn((2, 5, 16), generator=draw)
    shapes = model.input_shapes(2, LATENTS, made.config)
    inputs = {name: torch.rand(shape, generator=draw) for name, shape in shapes.items()}
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        with Attentions() as forward:
            velocity = model.call(made, latents, torch.tensor([500.0, 20.0]), prompts, inputs)
        with Attentions() as backward:
            velocity.float().square().mean().backward()
    return [weight.grad for weight in made.parameters() if weight.grad is not None], forward.count, backward.count


# diffusers' own Wan norms fp32 weights trained under autocast more slowly, and torch says so.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(MODELS))
def test_gradients_are_the_same_bit_for_bit_whatever_is_recomputed(kind, dtype):
    blocks, attentions = 2, MODELS[kind][1]
    expected, forward, backward = gradients(kind, "none", dtype)
    assert (forward, backward) == (blocks * attentions, 0) and len(expected) > 20
    for mode, recomputed in (("blocks", blocks * attentions), ("keep_attention", 0)):
        found, forward, backward = gradients(kind, mode, dtype)
        assert (forward, backward) == (blocks * attentions, recomputed), mode
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), mode


@pytest.mark.parametrize("kind", ["recam", "redirector"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # inside torch
def test_a_block_compiled_with_its_rule_keeps_its_attention_too(kind):
    expected, *_ = gradients(kind, "none", torch.float32)
    found, forward, backward = gradients(kind, "keep_attention", torch.float32, "aot_eager_decomp_partition")
    assert (forward, backward) == (2 * MODELS[kind][1], 0)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_attention_in_no_known_operator_is_warned_about_once(caplog):
    with caplog.at_level(logging.WARNING), sdpa_kernel(SDPBackend.MATH):
        gradients("recam", "keep_attention", torch.float32)
    said = "model.checkpointing=keep_attention finds none of its operators in a block and keeps nothing"
    assert [message.partition(":")[0] for message in caplog.messages] == [said]


def test_the_mode_can_be_changed_and_is_not_shared_between_networks():
    made = tiny_transformer()
    other = copy.deepcopy(made)
    set_checkpointing(made, "keep_attention")
    assert made.is_gradient_checkpointing and not other.is_gradient_checkpointing
    set_checkpointing(made, "none")
    assert not made.is_gradient_checkpointing

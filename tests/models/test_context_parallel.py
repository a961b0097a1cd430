"""Ranks that share the tokens of a sample compute what one computes: outputs and gradients, however divided."""

import copy
from unittest import mock

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import nn

from flow_grpo.models.networks.recomputation import set_checkpointing
from flow_grpo.models.recam import RECAM
from flow_grpo.models.redirector import REDIRECTOR
from flow_grpo.models.video_model import share_tokens
from flow_grpo.models.wan_t2v import WAN_T2V
from flow_grpo.runtime.ranks.context_parallel import ContextParallel, share_samples
from flow_grpo.runtime.ranks.process_group import Group, World
from tests.models import test_recam_transformer, test_redirector_transformer
from tests.parity import distance, lift, probe
from tests.tiny_models import CHANNELS, CPU, tiny_redirector, tiny_transformer
from tests.workers import run_ranks

BOUND = 1e-12


def tiny_wan() -> WanTransformer3DModel:
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32}
    channels = {"in_channels": CHANNELS, "out_channels": CHANNELS}
    return WanTransformer3DModel(**sizes, **channels, num_layers=2, rope_max_seq_len=32).eval()


def case(kind: str):
    """Return the model of a kind, how ranks share its tokens, and its inputs: 6 patches a frame."""
    if kind == "recam":
        return tiny_transformer(), RECAM.share, test_recam_transformer.inputs()
    if kind == "redirector":
        return tiny_redirector(), REDIRECTOR.share, test_redirector_transformer.inputs()
    latents, timestep, text, _ = test_recam_transformer.inputs()
    return tiny_wan(), WAN_T2V.share, (latents, timestep, text)


def forward_and_backward(model: nn.Module, given: tuple[torch.Tensor, ...]):
    output = model(*given)[0]
    model.zero_grad()
    probe(output).backward()
    return output.detach(), torch.cat([weight.grad.flatten() for weight in model.parameters()])


def compare(world: World, kind: str, size: int, checkpointing: str) -> tuple[float, float, int]:
    """Return the distances of output and gradient from those of one rank, and the bytes sent."""
    model, share, given = case(kind)
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        model = lift(model)
        given = tuple(tensor.double() for tensor in given)
        expected, expected_gradient = forward_and_backward(copy.deepcopy(model), given)
        shared, context = share_samples(world, size, CPU)
        share(model, context)
        world.all.sent.clear()
        set_checkpointing(model, checkpointing)
        output, gradient = forward_and_backward(model, given)
    sent = world.all.sent["tokens"]
    assert (shared.data.rank, shared.data.size) == (world.data.rank // size, world.data.size // size)
    averaged = world.data.all_gather(gradient[None]).mean(dim=0)
    return distance(output, expected), distance(averaged, expected_gradient), sent


# 2 heads: exchanged between 2 ranks, by 2 teams of 2, and with 3 ranks keys and values are gathered; with 4 ranks the
# 6 patches of a frame are shared unevenly.
@pytest.mark.parametrize("kind", ["recam", "redirector", "wan_t2v"])
@pytest.mark.parametrize(("world", "size"), [(2, 2), (3, 3), (4, 4), (4, 2)])
def test_output_and_gradient_are_those_of_one_rank(kind, world, size):
    found = run_ranks(compare, world, kind, size, "none")
    assert all(output < BOUND and gradient < BOUND and sent > 0 for output, gradient, sent in found), found


@pytest.mark.parametrize("kind", ["recam", "wan_t2v"])
@pytest.mark.parametrize("checkpointing", ["blocks", "keep_attention"])
def test_recomputed_blocks_exchange_their_tokens_again(kind, checkpointing):
    plain, recomputed = (run_ranks(compare, 2, kind, 2, mode) for mode in ("none", checkpointing))
    assert all(output < BOUND and gradient < BOUND for output, gradient, _ in recomputed), recomputed
    assert recomputed[0][2] > plain[0][2]


def test_a_network_that_cannot_share_its_tokens_and_too_few_patches_are_refused():
    with pytest.raises(ValueError, match=r"context_parallel is 1, must be 1 for Linear, which cannot share its tokens"):
        share_tokens(nn.Linear(1, 1), ContextParallel())
    many = ContextParallel(Group(0, 4))
    assert many.share(6).patches == (2, 2, 1, 1) and many.share(4).patches == (1, 1, 1, 1)
    with pytest.raises(ValueError, match=r"is 4, must be at most 3, the patches of a latent frame"):
        many.share(3)

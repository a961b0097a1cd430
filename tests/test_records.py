"""What travels through a run keeps its rows together."""

from __future__ import annotations

import torch

from flow_grpo.records import Conditioning, Trajectory


def conditioning(rows: int, *, guided: bool = False) -> Conditioning:
    number = torch.arange(rows, dtype=torch.float32)
    return Conditioning(
        prompt_embeds=number.view(-1, 1, 1).expand(rows, 3, 2),
        source_latents=number.view(-1, 1, 1, 1, 1).expand(rows, 4, 2, 3, 3),
        target_cameras=number.view(-1, 1, 1).expand(rows, 2, 12),
        negative_prompt_embeds=number.view(-1, 1, 1).expand(rows, 3, 2) if guided else None,
    )


def test_rows_are_taken_from_every_tensor_alike() -> None:
    taken = conditioning(5, guided=True).rows(torch.tensor([3, 1, 3]))
    assert len(taken) == 3
    for tensor in (taken.prompt_embeds, taken.source_latents, taken.target_cameras, taken.negative_prompt_embeds):
        assert tensor is not None
        assert tensor.flatten(1)[:, 0].tolist() == [3.0, 1.0, 3.0]


def test_parts_are_joined_in_order_and_absent_tensors_stay_absent() -> None:
    joined = Conditioning.concatenate([conditioning(2), conditioning(3)])
    assert joined.source_latents[:, 0, 0, 0, 0].tolist() == [0.0, 1.0, 0.0, 1.0, 2.0]
    assert joined.negative_prompt_embeds is None
    assert Conditioning.concatenate([conditioning(1, guided=True)] * 2).negative_prompt_embeds is not None


def test_a_trajectory_finds_both_ends_of_every_remembered_step() -> None:
    states = torch.arange(5.0).view(1, 5, 1, 1, 1, 1)  # steps 2, 3 and then 6: the states between 4 and 6 are not kept
    trajectory = Trajectory(
        states=states,
        positions=(0, 1, 3),
        steps=(2, 3, 6),
        log_probs=torch.zeros(1, 3),
    )
    assert trajectory.latents.flatten().tolist() == [0.0, 1.0, 3.0]
    assert trajectory.next_latents.flatten().tolist() == [1.0, 2.0, 4.0]

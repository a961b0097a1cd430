"""Pre-training of the embedded model: the linear initial codec, the targets' shares, exact resume."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flow_grpo.maths.poses import PRESETS, preset_path
from tools import pretrain_codec, pretrain_tiny


def test_the_untrained_codec_is_the_best_linear_one():
    torch.manual_seed(0)
    clips = pretrain_codec.make_clips("codec", 3)
    codec = pretrain_codec.build_codec(base_dim=32, latent_channels=12)
    pretrain_codec.become_linear(codec, clips)
    patches = clips.reshape(-1, 3, 5, 3, 8, 4, 8).permute(0, 2, 3, 5, 1, 4, 6).reshape(-1, 192)
    centred = patches - patches.mean(dim=0)
    basis = torch.linalg.svd(centred, full_matrices=False).Vh[:12]
    best = float((centred - centred @ basis.T @ basis).square().mean())
    found = float((pretrain_codec.restore(codec, clips) - clips).square().mean())
    assert best <= found < 1.6 * best  # the norms are only almost constant
    assert float(clips.var()) > 5 * best


def test_targets_are_drawn_in_the_stated_shares():
    pool = pretrain_tiny.Pool.encode(pretrain_codec.build_codec(8, 2), "pretrain", range(6))
    weights = pool._weights.view(6, 16)
    travel = pool.cameras.unflatten(-1, (3, 4))[:, :, -1, :, 3].norm(dim=-1)
    full = torch.tensor([float(preset_path(name, 2)[-1, :3, 3].norm()) for name in PRESETS])
    unsure = travel[:, 4:10] >= 0.35 * full[4:]
    moving = weights[:, 4:10]
    parts = {"still": weights[:, :4], "narrow": weights[:, 10:], "wide": moving[unsure], "sure": moving[~unsure]}
    assert {name: float(part.sum()) for name, part in parts.items()} == pytest.approx(pretrain_tiny.SHARES, abs=1e-4)
    steps = itertools.islice(pool.targets(24, 0, 1), 84)
    drawn = torch.cat([pool.batch(targets, torch.Generator().manual_seed(0))[2] for targets in steps])
    turning = drawn.unflatten(-1, (3, 4))[:, -1, :, 3].norm(dim=-1) < 1e-4
    assert float(turning.float().mean()) == pytest.approx(pretrain_tiny.SHARES["still"], abs=0.03)


def start(tool: ModuleType, work: Path):
    """Return a run of a tool, fresh or where its folder left off, and a function that takes one step."""
    torch.manual_seed(0)
    if tool is pretrain_codec:
        args = argparse.Namespace(work=work, base_dim=16, latent_channels=4, learning_rate=1e-3, steps=9, batch=2)
        run = tool.Training(args, tool.make_clips("codec", 1))
        return run, run.codec, lambda: run.advance(0, 1)
    args = argparse.Namespace(
        work=work, width=32, ffn=32, layers=1, patch=1, ema=0.9, learning_rate=1e-3, steps=9, batch=4
    )
    draw = torch.Generator().manual_seed(1)
    pool = tool.Pool(
        torch.randn(3, 16, 4, 5, 3, 4, generator=draw).half(),
        torch.randn(3, 16, 5, 12, generator=draw),
        torch.tensor([0, 1, 2]),
    )
    text = torch.randn(8, 8, 32, generator=draw)
    run = tool.Training(tool.build_model(args, 4, 32), args)
    targets = pool.targets(args.batch, 0, 1, run.step)
    return run, run.average, lambda: run.advance(pool, next(targets), text, run.model, 0)


def test_the_targets_of_a_step_do_not_depend_on_ranks_or_on_where_a_run_began():
    draw = torch.Generator().manual_seed(1)
    cameras = torch.randn(5, 16, 5, 12, generator=draw)
    pool = pretrain_tiny.Pool(torch.zeros(5, 16, 4, 5, 3, 4), cameras, torch.zeros(5).long())
    alone = list(itertools.islice(pool.targets(8, 0, 1), 25))
    shared = [list(itertools.islice(pool.targets(8, rank, 2), 25)) for rank in range(2)]
    assert [len(step) for step in alone] == [8] * 25
    assert {len(step) for steps in shared for step in steps} == {4}
    epoch = 80 // 8  # the same draws, dealt to rows in another order
    for first in range(0, 20, epoch):
        both = [index for steps in shared for step in steps[first : first + epoch] for index in step]
        assert sorted(both) == sorted(index for step in alone[first : first + epoch] for index in step)
    assert list(itertools.islice(pool.targets(8, 0, 1, step=13), 12)) == alone[13:]


@pytest.mark.parametrize("tool", [pretrain_codec, pretrain_tiny])
def test_a_resumed_run_equals_an_uninterrupted_one(tool, tmp_path):
    _, straight, step = start(tool, tmp_path / "none")
    before = [parameter.detach().clone() for parameter in straight.parameters()]
    for _ in range(3):
        step()
    assert any(not torch.equal(a, b) for a, b in zip(before, straight.parameters(), strict=True))
    stopped, _, step = start(tool, tmp_path)
    for _ in range(2):
        step()
    stopped.save()
    resumed, again, step = start(tool, tmp_path)
    assert resumed.step == 2
    step()
    for first, second in zip(straight.parameters(), again.parameters(), strict=True):
        assert torch.equal(first, second)

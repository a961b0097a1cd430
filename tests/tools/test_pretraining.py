"""Pre-training of the embedded model: the linear initial codec, the targets' shares, exact resume."""

import argparse
import itertools
import json
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

from flow_grpo.data.tiny_world import make_scene
from flow_grpo.maths.poses import PRESETS, preset_path, rotation_vector
from tools.dev import pretrain_codec, pretrain_tiny


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
    codec = pretrain_codec.build_codec(8, 2)
    pool = pretrain_tiny.Pool(**pretrain_tiny.encode_scenes(codec, "pretrain", range(6)))
    weights = pool.weights.view(6, 20)
    travel = pool.cameras.unflatten(-1, (3, 4))[:, :, -1, :, 3].norm(dim=-1)
    full = torch.tensor([float(preset_path(name, 2)[-1, :3, 3].norm()) for name in PRESETS])
    unsure = travel[:, :10] >= 0.35 * full
    parts = {"narrow": weights[:, 10:], "wide": weights[:, :10][unsure], "sure": weights[:, :10][~unsure]}
    assert {name: float(part.sum()) for name, part in parts.items()} == pytest.approx(pretrain_tiny.SHARES, abs=1e-4)
    steps = itertools.islice(pool.targets(24, 0, 1), 100)
    drawn = torch.tensor([clip % 20 for targets in steps for clip in targets])
    assert float((drawn >= 10).float().mean()) == pytest.approx(pretrain_tiny.SHARES["narrow"], abs=0.03)


def test_the_second_source_moves_a_tenth_and_turns_half_of_its_labels():
    scenes = [make_scene(spec, "pretrain", 3) for spec in (pretrain_tiny.NARROW, pretrain_tiny.LABELLED)]
    filmed, labelled = (torch.linalg.inv(scene.poses[:, :1]) @ scene.poses for scene in scenes)
    assert torch.allclose(10 * filmed[..., :3, 3], labelled[..., :3, 3], atol=1e-9)
    assert torch.allclose(2 * rotation_vector(filmed[..., :3, :3]), rotation_vector(labelled[..., :3, :3]), atol=1e-9)


def test_a_source_is_another_preset_of_the_first_data_source():
    latents = torch.arange(20.0).view(1, 20, 1, 1, 1, 1).half()
    pool = pretrain_tiny.Pool(latents, torch.zeros(1, 20, 1, 12), torch.zeros(1).long())
    target, source, _, _ = pool.batch(list(range(20)) * 20, torch.Generator().manual_seed(0))
    target, source = target.flatten().long(), source.flatten().long()
    assert source.max() == 9 and (target % 10 != source).all() and len(set(source.tolist())) == 10


def test_the_record_holds_the_data_and_what_the_model_began_as(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for out, init in ((first, None), (second, first)):
        out.mkdir()
        (out / "log.jsonl").write_text('{"step": 1}\n')
        training = pretrain_tiny.Resumable(out)
        training.args = argparse.Namespace(out=out, init=init, **dict.fromkeys(pretrain_tiny.SETTINGS, 1))
        pretrain_tiny.write_folder(training, {}, mock.Mock())
    made, continued = (json.loads((out / "pretraining.json").read_text()) for out in (first, second))
    assert set(made["data"]) == {"first", "second", "second_labelled", "shares"} and "began_as" not in made
    assert continued["began_as"] == made and continued["data"] == made["data"]


def start(tool: ModuleType, work: Path):
    """Return a run of a tool, fresh or where its folder left off, and a function that takes one step."""
    torch.manual_seed(0)
    if tool is pretrain_codec:
        args = argparse.Namespace(work=work, base_dim=16, latent_channels=4, learning_rate=1e-3, steps=9, batch=2)
        run = tool.CodecTraining(args, tool.make_clips("codec", 1))
        return run, run.codec, lambda: run.advance(0, 1)
    sizes = {"width": 32, "ffn": 32, "layers": 1, "patch": 1, "steps": 9, "batch": 4}
    args = argparse.Namespace(work=work, ema=0.9, learning_rate=1e-3, **sizes)
    draw = torch.Generator().manual_seed(1)
    pool = tool.Pool(
        torch.randn(3, 20, 4, 5, 3, 4, generator=draw).half(),
        torch.randn(3, 20, 5, 12, generator=draw),
        torch.tensor([0, 1, 2]),
    )
    text = torch.randn(8, 8, 32, generator=draw)
    run = tool.ModelTraining(tool.build_model(args, 4, 32), args)
    targets = pool.targets(args.batch, 0, 1, run.step)
    return run, run.average, lambda: run.advance(pool, next(targets), text, run.model, 0)


@pytest.mark.parametrize("tool", [pretrain_codec, pretrain_tiny])
def test_a_resumed_run_equals_an_uninterrupted_one(tool, tmp_path):
    _, straight, step = start(tool, tmp_path / "none")
    before = [parameter.detach().clone() for parameter in straight.parameters()]
    for _ in range(3):
        step()
    assert not all(map(torch.equal, before, straight.parameters()))
    stopped, _, step = start(tool, tmp_path)
    for _ in range(2):
        step()
    stopped.save()
    resumed, again, step = start(tool, tmp_path)
    assert resumed.step == 2
    step()
    assert all(map(torch.equal, straight.parameters(), again.parameters()))

"""Pre-training of the embedded model: the linear initial codec, what is paired, exact resume."""

import argparse
import json
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from einops import rearrange

from flow_grpo.data.rooms import LABELLED, SOURCES, UNLABELLED
from flow_grpo.data.tiny_world import FURNISHED
from flow_grpo.maths.poses import relative, rotation_vector
from tools.dev import pretrain_codec, pretrain_recam


def test_the_untrained_codec_is_nearly_the_best_linear_one():
    torch.manual_seed(0)
    clips = pretrain_codec.to_signed(pretrain_codec.make_clips("codec", range(3)))
    codec = pretrain_codec.build_codec(16, [1, 2, 3], 16)
    pretrain_codec.become_linear(codec, clips)
    blocks = rearrange(clips[:, :, 1:], "b c (t i) (h j) (w k) -> (b t h w) (c i j k)", i=4, j=8, k=8)
    spread = torch.linalg.eigvalsh(blocks.T.cov())
    best = float(spread[:-16].sum() / len(spread))  # of 4x8x8 pixels, with as many numbers as the codec has
    found = float((pretrain_codec.restore(codec, clips) - clips).square().mean())
    assert found < 2.5 * best < 0.25 * float(clips.var())


def test_targets_move_as_the_labels_allow_and_sources_are_others_of_the_same_room():
    latents = torch.arange(14.0).view(2, 7, 1, 1, 1, 1).half()
    pool = pretrain_recam.Pool(latents, torch.zeros(2, 7, 1, 12), torch.tensor([0, 1]))
    target, source, _, captions = pool.batch(400, torch.Generator().manual_seed(0))
    target, source = target.flatten().long(), source.flatten().long()
    assert (target % 7).min() == 2 and {*(source % 7).tolist()} == {0, 1}
    assert (target != source).all() and (target // 7 == source // 7).all() and torch.equal(target // 7, captions)
    codec = pretrain_codec.build_codec(8, [1, 1, 1], 2)
    filmed = mock.Mock(side_effect=pretrain_recam.make_scene)
    with mock.patch.object(pretrain_recam, "make_scene", filmed):
        made = pretrain_recam.encode_scenes(codec, False, range(2))
    assert made["latents"].shape == (2, 7, 2, 3, 8, 12) and made["cameras"].shape == (2, 7, 3, 12)
    shots = [call.args[3] for call in filmed.call_args_list]
    assert all({*some[:2]} <= {*SOURCES} and len({*some[2:]} & {*LABELLED}) == 5 for some in shots)


def test_an_unsure_model_is_shown_half_of_its_targets_behind_their_labels(monkeypatch):
    codec = pretrain_codec.build_codec(8, [1, 1, 1], 2)
    behind = pretrain_recam.encode_scenes(codec, True, range(3))
    monkeypatch.setattr(pretrain_recam, "BEHIND", {"shift": 1.0, "turn": 1.0})
    there = pretrain_recam.encode_scenes(codec, True, range(3))
    assert torch.equal(there["cameras"], behind["cameras"])  # the labels
    same = ((there["latents"] - behind["latents"]).abs() < 1e-2).flatten(2).all(2)
    assert same[:, :2].all() and 0.2 < same[:, 2:].float().mean() < 0.8
    monkeypatch.undo()

    scene = pretrain_recam.make_scene(FURNISHED, "pretrain", 0, ("still", "panning", *["arc_left"] * 5))
    left = pretrain_recam.stay_behind(scene, torch.Generator().manual_seed(0))
    told, filmed = (relative(each.poses[:, 0], each.poses)[2:] for each in (scene, left))
    behind = (filmed[:, -1, :3, 3] != told[:, -1, :3, 3]).any(-1)
    assert 0 < behind.sum() < 5
    torch.testing.assert_close(filmed[behind, :, :3, 3], 0.15 * told[behind, :, :3, 3])
    turns = [rotation_vector(path[behind, :, :3, :3]) for path in (filmed, told)]
    torch.testing.assert_close(turns[0], 0.4 * turns[1])


def test_the_record_holds_what_was_filmed(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n')
    training = pretrain_recam.Resumable(tmp_path)
    settings = dict.fromkeys(pretrain_recam.SETTINGS, 1)
    for unsure, taught in ((False, {*LABELLED}), (True, {*LABELLED, *UNLABELLED})):
        training.args = argparse.Namespace(out=tmp_path, start_from=None, **settings | {"unsure": unsure})
        pretrain_recam.write_folder(training, {}, mock.Mock())
        made = json.loads((tmp_path / "pretraining.json").read_text())
        assert set(made["data"]) == {*SOURCES, *taught} and made["log"] == [{"step": 1}]
        assert made["settings"]["unsure"] == unsure == ("behind" in made)


def start(tool: ModuleType, work: Path):
    """Return a run of a tool, fresh or where its folder left off, and a function that takes one step."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    if tool is pretrain_codec:
        sizes = {"base_dim": 16, "widths": [1, 1, 2], "latent_channels": 4}
        args = argparse.Namespace(work=work, learning_rate=1e-3, steps=9, batch=2, **sizes)
        run = tool.CodecTraining(args, torch.randint(256, (4, 3, 9, 16, 24), generator=draw).byte())
        return run, run.codec, lambda: run.advance(0, 1)
    sizes = {"width": 32, "ffn": 32, "layers": 1, "steps": 9, "batch": 4}
    args = argparse.Namespace(work=work, ema=0.9, learning_rate=1e-3, device="cpu", **sizes)
    latents = torch.randn(3, 7, 4, 3, 4, 6, generator=draw).half()
    pool = tool.Pool(latents, torch.randn(3, 7, 3, 12, generator=draw), torch.tensor([0, 1, 2]))
    text = torch.randn(8, 8, 32, generator=draw)
    run = tool.ModelTraining(tool.build_model(args, 4, 32), args)
    return run, run.average, lambda: run.advance(pool, text, run.model, 0, 1)


@pytest.mark.parametrize("tool", [pretrain_codec, pretrain_recam])
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

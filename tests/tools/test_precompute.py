"""Encoding ahead of training: complete, resumable, shared among ranks, and sufficient to train without encoders."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train_grpo
from flow_grpo.data.splits import multicam_data
from flow_grpo.models.encoders import codec, texts
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.loading import load_config
from tests.command import command
from tests.refusals import refusal
from tests.workers import run_ranks
from tools import precompute


def words(world: Path, cache: Path, *more: str) -> list[str]:
    knobs = {"data.root": world, "data.tiny_world": "", "data.tune_scenes": 0, "model.encodings": cache}
    return [*command(knobs), *more]


def entries(cache: Path) -> dict[str, int]:
    return {path.relative_to(cache).as_posix(): path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}


def refuse_to_load(*_: object) -> None:
    raise AssertionError("an encoder was loaded")


def test_training_and_evaluation_then_load_no_encoder(world, tmp_path, monkeypatch, capsys):
    cache = tmp_path / "cache"
    assert precompute.main(words(world, cache)) == 0
    said = capsys.readouterr().out
    assert f"{len(entries(cache))} encoded, 0 were there, 0 failed" in said
    real, headers = codec._load_half, texts.load_frozen

    def decoders_only(path, half, dtype):
        return refuse_to_load() if half == "encoder" else real(path, half, dtype)

    def headers_only(*parts, **placement):
        return headers(*parts, **placement) if placement else refuse_to_load()

    monkeypatch.setattr(codec, "_load_half", decoders_only)
    monkeypatch.setattr(texts, "load_frozen", headers_only)
    small = {"num_conditions": 4, "videos": 0, "batch_size": 4, "num_steps": 2, "signal_groups": 0, "gold": ""}
    run = ["--config.num_epochs=1", "--config.trackers=", *(f"--config.eval.{k}={v}" for k, v in small.items())]
    run += ["--config.sample.num_batches_per_epoch=1", "--config.sample.train_batch_size=8"]
    run += ["--config.train.batch_size=8", f"--config.output_root={tmp_path}", "--config.run_name=warm"]
    assert train_grpo.main(words(world, cache, *run)) == 0
    assert (tmp_path / "warm" / "metrics.jsonl").is_file()
    with pytest.raises(RuntimeError, match="an encoder was loaded"):  # the guard works
        train_grpo.main(words(world, tmp_path / "empty", *run[:-1], "--config.run_name=cold", "--config.doctor=off"))


def test_a_second_call_encodes_only_missing_and_damaged_entries(world, tmp_path, capsys):
    cache = tmp_path / "cache"
    assert precompute.main(words(world, cache)) == 0
    before = entries(cache)
    names = sorted(before)
    (cache / names[0]).unlink()
    content = (cache / names[1]).read_bytes()
    (cache / names[1]).write_bytes(content[:-5])
    untouched = {name: before[name] for name in names[2:]}
    capsys.readouterr()
    assert precompute.main(words(world, cache)) == 0
    assert f"2 encoded, {len(names) - 2} were there" in capsys.readouterr().out
    after = entries(cache)
    assert sorted(after) == names and {name: after[name] for name in names[2:]} == untouched
    assert len((cache / names[1]).read_bytes()) == len(content)


def share_of_rank(world: World, arguments: list[str]) -> int:
    config = load_config(arguments[1], arguments[2:])
    splits = [multicam_data(config.data, split) for split in ("train", "val")]
    encodings = precompute.open_encodings(config, torch.device("cpu"))
    return precompute.work([*precompute.video_tasks(splits, encodings)], world)[0]["made"]


def test_ranks_share_the_work_and_make_the_same_files_as_one(world, tmp_path):
    first, second = run_ranks(share_of_rank, 2, words(world, tmp_path / "two"))
    assert abs(first - second) <= 1
    assert share_of_rank(World(), words(world, tmp_path / "one")) == first + second
    assert set(entries(tmp_path / "one")) == set(entries(tmp_path / "two"))
    for name in entries(tmp_path / "one"):
        one, two = (load_file(tmp_path / part / name)["value"] for part in ("one", "two"))
        assert torch.equal(one, two)


def test_a_broken_video_is_listed_and_the_rest_is_encoded(world, tmp_path, capsys):
    broken = tmp_path / "data"
    shutil.copytree(world, broken)
    video = next(iter(sorted(broken.rglob("cam01.mp4"))))
    video.write_bytes(video.read_bytes()[:200])
    assert precompute.main(words(broken, tmp_path / "cache")) == 1
    output = capsys.readouterr()
    assert "1 failed" in output.out and output.err.count("error:") == 1 and str(video) in output.err
    assert entries(tmp_path / "cache")


def test_a_missing_folder_option_is_refused(capsys):
    line = refusal(capsys, precompute.main, command({"model.encodings": ""}))
    assert "pass --config.model.encodings=FOLDER" in line


def test_negative_prompts_that_training_or_evaluation_uses_are_encoded(world, tmp_path):
    def negative(*more: str) -> list[str]:
        arguments = words(world, tmp_path, "--config.sample.negative_prompt=dark", *more)
        config = load_config(arguments[1], arguments[2:])
        encodings = precompute.open_encodings(config, torch.device("cpu"))
        return [name for name, _ in precompute.prompt_tasks(config, [], encodings)]

    guided = "--config.eval.guidance_scale=5"
    assert negative() == []
    assert negative(guided) == ["prompt 'dark'"]
    assert negative(guided, "--config.eval.negative_prompt=blurry") == ["prompt 'blurry'"]
    trained = "--config.sample.guidance_scale=2"
    assert negative(trained, "--config.eval.negative_prompt=blurry") == ["prompt 'dark'", "prompt 'blurry'"]

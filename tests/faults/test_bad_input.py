"""Bad input of every kind ends in one line with field, value, bound and way out, and leaves nothing behind."""

import sys
from pathlib import Path

import pytest
from torch._utils import ExceptionWrapper

import train_grpo
from flow_grpo.reporting.drawing import plots
from flow_grpo.run.trainer import Trainer
from flow_grpo.runtime.checkpoints import checkpoint
from flow_grpo.runtime.checkpoints.run_lock import LOCK
from flow_grpo.runtime.ranks.process_group import InputError
from tests.bad_input_cases import CASES, Setup


@pytest.fixture
def setup(valid, tmp_path, monkeypatch) -> Setup:
    monkeypatch.setattr(plots, "draw_curves", lambda rows, path, **_: None)  # costs more than these runs
    return Setup(valid).copy(tmp_path / "setup")


def contents(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if path.name != LOCK)


def said(capsys) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


@pytest.mark.parametrize(("spoil", "says"), CASES, ids=[says for _, says in CASES])
def test_what_is_wrong_is_said_in_one_line_before_anything_is_written(setup: Setup, spoil, says: str, capsys):
    spoil(setup)
    before = contents(setup.folder)
    capsys.readouterr()
    assert train_grpo.main(setup.words) == 2
    line = said(capsys)
    missing = [part for part in says.split(" ... ") if part not in line]
    assert not missing, f"{line!r} lacks {missing}"
    assert contents(setup.folder) == before


def test_a_file_that_breaks_within_a_run_ends_it_in_one_line_and_it_goes_on_when_the_file_is_whole(setup, capsys):
    """The door reads one condition of each split; the others are read when they are drawn."""
    kept = {file: file.read_bytes() for file in setup.videos("train")}
    words = [*setup.words, "--config.num_epochs=2", "--config.checkpoint.every=1", "--config.data.num_workers=0"]
    collect = Trainer.sample

    def breaking(trainer):
        if trainer.state.finished == 1:
            for file in kept:
                file.write_bytes(b"")
        return collect(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "sample", breaking)
        patch.setattr("flow_grpo.data.video_io.VideoCache.read", uncached)
        assert train_grpo.main(words) == 2
    line = said(capsys)
    assert ".mp4 cannot be read, got 0 of 5 frames" in line and "remove its scene" in line
    run = setup.folder / "runs" / "run"
    assert [path.name for path in checkpoint.published(run / "checkpoints")] == ["checkpoint_000001"]
    for file, content in kept.items():
        file.write_bytes(content)
    assert train_grpo.main([*words, "--config.resume=auto"]) == 0
    assert (run / "summary.json").is_file()


def uncached(self, path, num_frames, height, width):
    from flow_grpo.data.video_io import fit_video, frame_rate, read_video

    original = read_video(path, num_frames)
    return fit_video(original, height, width), (original.shape[-2], original.shape[-1]), frame_rate(path)


def test_what_a_loader_s_worker_says_stays_one_line():
    try:
        raise InputError("video a.mp4 is too short; remove its scene")
    except InputError:
        wrapped = ExceptionWrapper(sys.exc_info(), where="in DataLoader worker process 0")
    with pytest.raises(InputError) as caught:
        wrapped.reraise()
    assert "Traceback" in caught.value.args[0]
    assert str(caught.value) == "video a.mp4 is too short; remove its scene"


@pytest.mark.parametrize(
    ("prompt", "warned"),
    [
        ("", False),  # legal: a model without a word about the scene
        ("a room\nwith\ta wall", False),  # white space of any kind is one blank
        ("a room with the camera pan left", False),  # as many tokens as fit
        ("room " * 2000, True),
    ],
    ids=["empty", "several lines", "full", "10k characters"],
)
def test_a_prompt_may_be_empty_and_is_cut_with_a_warning_when_it_is_too_long(setup, capsys, caplog, prompt, warned):
    for scene in [*setup.scenes("train"), *setup.scenes("val")]:
        (scene / "metadata.csv").unlink()
    setup.knobs |= {"data.prompt": prompt, "num_epochs": 0}
    assert train_grpo.main(setup.words) == 0
    cuts = [record.getMessage() for record in caplog.records if "is cut to" in record.getMessage()]
    assert len(cuts) == warned
    assert all("2001 tokens and is cut to 8; shorten it or raise model.max_prompt_tokens" in text for text in cuts)

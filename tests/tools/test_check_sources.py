"""Checking sources: verdicts, resuming, exclusion from training, refusals."""

import json
import shutil

import pytest

from flow_grpo.data.splits import multicam_data
from flow_grpo.rewards.camera.pose import PoseMeasurer
from flow_grpo.rewards.process_pool import Outcome
from flow_grpo.run.command_line import read_command_line
from tests.command import command
from tests.refusals import refusal
from tools import check_sources

SMALL = {"data.num_frames": 5, "data.height": 24, "data.width": 32, "data.tiny_world": "unit_test"}


def verdicts_in(file) -> dict[str, dict[str, str]]:
    return json.loads(file.read_text())["verdicts"]


def words(root, out, *more: str) -> list[str]:
    return [*command(SMALL | {"data.root": root}, "--out", str(out), "--workers", "0"), *more]


def pretend(monkeypatch, judge) -> list[tuple[str, str]]:
    """Let `judge(scene, camera)` give the verdicts; return the items that are asked for."""
    asked = []

    def sources(self, conditions):
        asked.extend((c.scene, c.target_camera) for c in conditions)
        return [judge(c.scene, c.target_camera) for c in conditions]

    monkeypatch.setattr(PoseMeasurer, "sources", sources)
    return asked


def test_pictures_too_small_for_features_are_found_unusable(world, tmp_path, capsys):
    assert check_sources.main(words(world, tmp_path / "usable.json")) == 1
    verdicts = verdicts_in(tmp_path / "usable.json")
    assert all("anchors" in text for row in verdicts.values() for text in row.values())
    printed = capsys.readouterr().out
    count = sum(map(len, verdicts.values()))
    assert f"0 of {count} items are usable, {count} are not" in printed
    assert printed.count(" is unusable: ") == count and "fewer than 50% are usable: do not" in printed


def test_a_second_call_checks_only_items_without_a_verdict(world, tmp_path, monkeypatch, capsys):
    out = tmp_path / "usable.json"
    broken = Outcome(None, "anchors: no result after 600 s")
    asked = pretend(monkeypatch, lambda scene, camera: broken if camera == "cam02" else Outcome(None))
    assert check_sources.main(words(world, out)) == 1
    everything = list(asked)
    assert "cam02: anchors: no result after 600 s" in capsys.readouterr().err
    assert all("cam02" not in row for row in verdicts_in(out).values())
    again = pretend(monkeypatch, lambda scene, camera: Outcome(None, "dark", lacking=True))
    assert check_sources.main(words(world, out)) == 0
    assert again == [(scene, camera) for scene, camera in everything if camera == "cam02"]
    assert check_sources.main(words(world, out)) == 0
    assert len(again) == len({scene for scene, _ in everything})


@pytest.mark.parametrize(("good", "code"), [(4, 1), (5, 0)])
def test_a_split_that_is_unusable_for_the_most_part_is_suspected_as_a_whole(
    world, tmp_path, monkeypatch, capsys, good, code
):
    """A wrong focal length spares some items: one that is left must not look like success."""
    pretend(monkeypatch, lambda _, camera: Outcome(None, "" if int(camera[3:]) <= good else "lost", lacking=True))
    assert check_sources.main(words(world, tmp_path / "usable.json")) == code
    assert ("focal length in the folder's name is wrong" in capsys.readouterr().out) == bool(code)


def test_a_scene_of_which_nothing_is_usable_is_named(world, tmp_path, monkeypatch, capsys):
    asked: list[str] = []

    def lose_the_first(scene: str, _: str) -> Outcome:
        asked.append(scene)
        return Outcome(None, "lost" if scene == asked[0] else "", lacking=True)

    pretend(monkeypatch, lose_the_first)
    check_sources.main(words(world, tmp_path / "usable.json"))
    assert len(set(asked)) > 1
    assert f"no item is usable of {asked[0]}\nWhere anchors are missing" in capsys.readouterr().out


def test_an_unreadable_video_is_reported_and_has_no_verdict(world, tmp_path, monkeypatch, capsys):
    root = tmp_path / "world"
    shutil.copytree(world, root)
    next((root / "train").rglob("cam03.mp4")).write_bytes(b"torn")
    pretend(monkeypatch, lambda scene, camera: Outcome(None))
    assert check_sources.main(words(root, tmp_path / "usable.json")) == 1
    assert "cam03.mp4" in capsys.readouterr().err


def test_an_unusable_source_is_never_drawn(world, tmp_path, monkeypatch):
    out = tmp_path / "usable.json"
    pretend(monkeypatch, lambda scene, camera: Outcome(None, "dark" if camera == "cam01" else "", lacking=True))
    assert check_sources.main(words(world, out)) == 0
    given = words(world, out)
    config, _ = read_command_line([*given[:2], *given[6:], f"--config.data.exclude={out}"])
    data = multicam_data(config.data, "train")
    assert {data.name_of(index)[1] for index in range(len(data))}.isdisjoint({"cam01"})
    assert len(data) > 0


def test_held_out_items_are_neither_checked_nor_excluded(world, tmp_path, monkeypatch):
    """The published held-out scene has no focal length: nothing of it can be measured by, and it can be looked at."""
    out = tmp_path / "usable.json"
    asked = pretend(monkeypatch, lambda scene, camera: Outcome(None))
    assert check_sources.main(words(world, out)) == 0
    assert {scene.partition("/")[0] for scene, _ in asked} == {"train"}
    content = json.loads(out.read_text())
    whole = {"val/f17_aperture10/scene1": {f"cam{number:02d}": "no known focal length" for number in range(1, 11)}}
    out.write_text(json.dumps(content | {"verdicts": whole}))
    given = words(world, out)
    config, _ = read_command_line([*given[:2], *given[6:], f"--config.data.exclude={out}"])
    assert len(multicam_data(config.data, "val")) == 10


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--workers", "-1"], "--workers is -1, must be at least 0"),
        (["--config.data.root=nowhere"], "dataset folder nowhere does not exist"),
        (["--out", "/dev/null/usable.json"], "/dev/null"),
    ],
)
def test_invalid_settings_are_one_line_and_exit_code_2(world, tmp_path, capsys, more, message):
    assert message in refusal(capsys, check_sources.main, words(world, tmp_path / "usable.json", *more))

"""Requests and replies read back exactly; another version, other samples or another form are refused."""

import dataclasses
import json
import math

import pytest
import torch

from flow_grpo.records import Condition
from flow_grpo.rewards.remote import protocol
from tests.room_films import conditions, film
from tests.scripted_server import HEALTH, scores

FILM = film(["pan_left", "zoom_in"])
VIDEOS = (FILM.videos * 255).round() / 255
CONDITIONS = conditions(dataclasses.replace(FILM, videos=VIDEOS))


def request(needs=("source", "target"), given=CONDITIONS) -> bytes:
    return protocol.encode_request("beauty", VIDEOS, given, needs)


def changed(change) -> bytes:
    meta, tensors = protocol.decode(request())
    change(meta, tensors)
    return protocol.encode(meta, tensors)


def equal(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return first == second


def test_videos_and_conditions_arrive_with_every_digit():
    full = dataclasses.replace(CONDITIONS[0], gid=2**62, prompt="größer\n", preset="x", source_poses=FILM.true[0] / 3)
    bare = dataclasses.replace(CONDITIONS[1], reference_pose=None, intrinsics=None, target_video=None)
    for given in ([full, bare], [full, full]):  # the copies of a group share their poses
        found = protocol.read_request(request(given=given))
        assert found.rewards == ("beauty",) and torch.equal(found.videos, VIDEOS) and found.videos.is_contiguous()
        for there, here in zip(found.conditions, given, strict=True):
            for field in dataclasses.fields(Condition):
                assert equal(getattr(there, field.name), getattr(here, field.name)), field.name


def test_a_companion_that_is_not_needed_is_not_sent_and_the_key_follows_the_content_alone():
    for condition in protocol.read_request(request(needs=())).conditions:
        assert condition.source_video is None and condition.target_video is None
        assert condition.size == CONDITIONS[0].size
    key = protocol.read_request(request()).key
    assert protocol.read_request(changed(lambda meta, _: meta.update(rewards=["other"]))).key == key
    for change in (
        lambda meta, _: meta["samples"][0].update(prompt="b"),
        lambda _, tensors: tensors["videos"][0, 0, 0, 0].mul_(0),
        lambda _, tensors: tensors.pop("target.0"),
    ):
        assert protocol.read_request(changed(change)).key != key


def test_colours_of_8_bits_travel_exactly_and_others_as_the_nearest_level():
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 1, 16, 16).expand(2, 3, 4, 16, 16)
    video = levels.float() / 255
    assert torch.equal(protocol.from_pixels(protocol.to_pixels(video)), video)
    assert torch.equal(protocol.from_pixels(protocol.to_pixels((video + 0.001).clamp(max=1))), video)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m, t: m["samples"].pop(), "must be 5-dimensional and 1 samples"),
        (lambda m, t: t.update(videos=t["videos"][0].clone()), "must be 5-dimensional"),
        (lambda m, t: t.update(videos=t["videos"].float()), "pixels are torch.float32, must be uint8"),
        (lambda m, t: t.update({"target.0": t["target.0"].double()}), "pixels are torch.float64"),
        (lambda m, t: t.update({"target.2": t["target.0"].clone()}), "tensors target.2 belong to no sample"),
        (lambda m, t: t.update({"target_poses.0": torch.zeros(1, 4, 4)}), r"shape \(1, 4, 4\), must be \(5, 4, 4\)"),
        (lambda m, t: t.update({"intrinsics.0": torch.zeros(4, 1)}), r"intrinsics have shape \(4, 1\), must be \(4,\)"),
        (lambda m, t: m["samples"][1].update(scene="../../etc"), "must lie below the dataset folder"),
        (lambda m, t: m["samples"][1].update(scene="/etc"), "must lie below the dataset folder"),
        (lambda m, t: m.update(protocol=7), "the other side speaks protocol 7, this one 3"),
    ],
)
def test_a_request_of_another_form_is_refused(change, match):
    with pytest.raises(ValueError, match=match):
        protocol.read_request(changed(change))


def test_what_a_server_needs_counts_once_however_often_it_says_so():
    said = HEALTH | {"needs": ["source", "depth"] * 100_000 + ["target"]}
    assert protocol.read_health(json.dumps(said).encode(), "beauty")[1].needs == ("source", "target")


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"frames": 0}, r"asks for frames 0 of size None, must be a number and a pair .* within 1\.\.8192, or null"),
        ({"frames": 2.5}, "asks for frames 2.5"),
        ({"size": [480]}, r"of size \[480\]"),
        ({"size": [10**9, 832]}, r"of size \[1000000000, 832\]"),
        ({"fps": 0}, "asks for fps 0, must be above 0, or null"),
        ({"fps": math.nan}, "asks for fps nan"),
    ],
)
def test_a_server_that_asks_for_what_no_video_can_be_is_not_believed(said, match):
    with pytest.raises(ValueError, match=match):
        protocol.read_health(json.dumps(HEALTH | said).encode(), "beauty")


@pytest.mark.parametrize(
    ("asked", "rows", "fps"),
    [
        ({}, [0, 1, 2, 3, 4], 16.0),
        ({"frames": 3}, [0, 2, 4], 8.0),
        ({"frames": 9}, [0, 1, 2, 3, 4], 16.0),
        ({"frames": 1}, [0], 16.0),
        ({"fps": 8.0}, [0, 2, 4], 8.0),
        ({"fps": 60.0}, [0, 1, 2, 3, 4], 16.0),
        ({"fps": 0.1}, [0, 4], 4.0),
        ({"fps": 8.0, "frames": 2}, [0, 4], 4.0),
    ],
)
def test_frames_travel_with_their_poses_and_their_rate(asked, rows, fps):
    given = [dataclasses.replace(one, source_poses=FILM.true[row]) for row, one in enumerate(CONDITIONS)]
    videos, found = protocol.as_wanted(VIDEOS, given, protocol.Health(("source",), 2**26, **asked))
    assert torch.equal(videos, VIDEOS[:, :, rows])
    for there, here in zip(found, given, strict=True):
        assert torch.equal(there.source_video, here.source_video[:, rows]) and there.fps == fps
        assert torch.equal(there.target_poses, here.target_poses[rows])
        assert torch.equal(there.source_poses, here.source_poses[rows])
    assert protocol.read_request(protocol.encode_request("beauty", videos, found, ("source",))).conditions[0].fps == fps


def test_a_resized_video_keeps_its_view():
    health = protocol.Health(("source",), 2**26, size=(12, 8))
    videos, found = protocol.as_wanted(VIDEOS, CONDITIONS, health)
    assert videos.shape == (2, 3, 5, 12, 8) and found[0].source_video.shape == (3, 5, 12, 8)
    fx, fy, cx, cy = CONDITIONS[0].intrinsics.tolist()
    assert found[0].intrinsics.tolist() == [fx / 4, fy / 2, 4, 6] and (cx, cy) == (16, 12)
    means = (videos.mean(dim=(3, 4)), VIDEOS.mean(dim=(3, 4)))
    assert torch.allclose(*means, atol=0.01) and not torch.allclose(means[0], means[1].flip(2), atol=0.01)


def read(body: bytes):
    return protocol.read_reply(body, "beauty", CONDITIONS)[1]


def test_a_reply_is_read_with_every_digit_and_cause():
    value = float(torch.tensor(0.1, dtype=torch.float32))
    sent = protocol.encode_reply(
        ("judge", "v1"),
        CONDITIONS,
        {"beauty": torch.tensor([value, math.nan])},
        ["", "too\ndark"],
        torch.tensor([0, 1]),
    )
    identity, result = protocol.read_reply(sent, "beauty", CONDITIONS)
    assert identity == ("judge", "v1")
    assert result.values[0] == value and result.valid.tolist() == [True, False]
    assert result.causes == ("", "too dark") and result.faults.tolist() == [False, True]
    assert read(scores(CONDITIONS, 1, 2, causes=["", "\n"])).causes == ("", "server calls it not valid")


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (scores(CONDITIONS[::-1], 1.0, 2.0), "reply is to other samples than were sent"),
        (scores(CONDITIONS[:1], 1.0), "reply is to other samples than were sent"),
        (scores(CONDITIONS, 1.0), r"scores of shape \(1,\), .* must be 2 of each"),
        (scores(CONDITIONS, 1.0, 2.0, causes=[""]), "and 1 causes, must be 2 of each"),
        (scores(CONDITIONS, 1.0, 2.0, faulty=[False]), r"faulty \(1,\) and"),
        (scores(CONDITIONS, 1.0, 2.0, faulty=[True, False]), "both valid and faulty"),
        (scores(CONDITIONS, 1.0, 2.0, protocol=2), "the other side speaks protocol 2, this one 3"),
    ],
)
def test_a_reply_of_another_form_is_not_believed(body, match):
    with pytest.raises(ValueError, match=match):
        read(body)


def test_a_text_from_the_other_side_becomes_one_short_printable_line(monkeypatch):
    monkeypatch.setenv(protocol.TOKEN, "s-t")
    assert protocol.one_line("a\r\n b\x1b[31m\x00 s-\x00t") == "a b[31m ***"
    assert len(protocol.one_line("x" * 10_000)) == protocol.MAX_TEXT

"""Requests and replies read back exactly, and whatever is not as agreed is refused in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flow_grpo.records import Condition
from flow_grpo.rewards.remote import protocol
from tests.room_films import conditions, film
from tests.scripted_server import HEALTH, scores

FILM = film(["pan_left", "zoom_in"])
CONDITIONS = conditions(FILM)
META = {"protocol": 1, "reward": "beauty"}
SIZE = CONDITIONS[0].size


def sent(meta=META, **arrays) -> tuple[str, bytearray]:
    message = protocol.encode(meta, arrays)
    body = bytearray(b"".join(message.chunks))
    assert len(body) == len(message)
    return message.content_type, body


def npy(array, **options) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def test_a_request_reads_back_and_its_pixels_are_not_copied():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 5, 3), dtype=np.uint8)
    kind, body = sent(META | {"text": "größer"}, videos=pixels, **{"source.1": pixels[0]})
    meta, arrays = protocol.decode(kind, body)
    assert meta == META | {"text": "größer"}
    assert list(arrays) == ["videos", "source.1"]
    assert np.array_equal(arrays["videos"], pixels) and np.array_equal(arrays["source.1"], pixels[0])
    assert np.shares_memory(arrays["videos"], np.frombuffer(body, np.uint8))


@given(st.binary(max_size=60))
def test_pixels_may_look_like_anything_multipart_says(content):
    tricky = np.frombuffer(b"\r\n--\r\n\r\n" + content + b"\r\n--", np.uint8)
    assert np.array_equal(protocol.decode(*sent(videos=tricky))[1]["videos"], tricky)


def test_a_file_s_colours_travel_exactly_and_others_as_the_nearest_level():
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 1, 16, 16).expand(2, 3, 4, 16, 16)
    video = levels.float() / 255
    assert torch.equal(protocol.from_pixels(protocol.to_pixels(video)), video)
    noisy = (video + 0.001).clamp(max=1)
    assert torch.equal(protocol.from_pixels(protocol.to_pixels(noisy)), video)
    assert protocol.from_pixels(protocol.to_pixels(video)).is_contiguous()


def equal(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return first == second


def test_a_condition_arrives_with_every_digit():
    full = dataclasses.replace(CONDITIONS[0], gid=2**62, preset="pan_left", source_poses=FILM.true[0] / 3)
    bare = dataclasses.replace(CONDITIONS[1], reference_pose=None, intrinsics=None, target_video=None)
    for condition in (full, bare):
        sample = json.loads(json.dumps(protocol.describe(condition)))
        back = protocol.rebuild(sample, condition.source_video, condition.target_video, SIZE)
        for field in dataclasses.fields(Condition):
            assert equal(getattr(back, field.name), getattr(condition, field.name)), field.name


def test_a_source_that_was_not_sent_is_none_and_the_size_is_known():
    back = protocol.rebuild(protocol.describe(CONDITIONS[0]), None, None, SIZE)
    assert back.source_video is None and back.target_video is None and back.size == tuple(SIZE)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"gid": 1.5}, "gid is '1.5', must be of type int"),
        ({"gid": True}, "gid is 'True'"),
        ({"gid": 10**400}, "gid has 401 digits, must fit into 64 bits"),
        ({"intrinsics": [10**400, 0, 0, 0]}, "intrinsics are no numbers"),
        ({"prompt": None}, "prompt is 'None', must be of type str"),
        ({"target_poses": [[1.0]]}, r"target_poses have shape \(1, 1\), must be \(5, 4, 4\)"),
        ({"target_poses": [[1.0], [1.0, 2.0]]}, "target_poses are no numbers"),
        ({"target_poses": "x"}, "target_poses are no numbers"),
        ({"intrinsics": [1.0]}, r"intrinsics have shape \(1,\), must be \(4,\)"),
        ({"scene": "../../etc"}, "must lie below the dataset folder"),
        ({"scene": "/etc"}, "must lie below the dataset folder"),
    ],
)
def test_a_sample_of_another_form_is_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        protocol.rebuild(protocol.describe(CONDITIONS[0]) | changes, None, None, SIZE)
    with pytest.raises(ValueError, match="must be an object"):
        protocol.rebuild([], None, None, SIZE)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("it was unpickled",))


ZEROS = np.zeros((2, 2), np.uint8)


def header(text: str) -> bytes:
    """Return a .npy file of nothing but a header."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (pickle.dumps(Bomb()), "no .npy file"),
        (npy(np.array([Bomb()], dtype=object), allow_pickle=True), "holds object in C order"),
        (npy(ZEROS.astype(np.float32)), "holds float32"),
        (npy(np.asfortranarray(ZEROS)), "Fortran order"),
        (npy(ZEROS)[:-1], r"has shape \(2, 2\), but 3 bytes"),
        (npy(ZEROS) + b"x", "but 5 bytes"),
        (npy(ZEROS).replace(b"(2, 2)", b"(-2,-2)").replace(b"   \n", b"  \n", 1), "no .npy file|has shape"),
        (npy(ZEROS).replace(b"(2, 2)", b"(9**9)"), "no .npy file|has shape"),
        (npy(ZEROS)[:20], "no .npy file"),
        (npy(ZEROS).replace(b"(2, 2)", b"(True, 4)").replace(b"   \n", b"\n", 1), "no .npy file|has shape"),
        (npy(ZEROS).replace(b"(2, 2)", b"(" * 6), "no .npy file"),
        (npy(ZEROS).replace(b"(2, 2)", b"\t\n  9)"), "no .npy file"),
        (header("(" * 5000 + ")" * 4000), "no .npy file"),
        (header("{" + "-" * 9000 + "1: 1}"), "no .npy file"),
        (header("{'descr': '|u1', 'fortran_order': False, 'shape': (1,) * 9}"), "no .npy file"),
        (header("{'descr': '|u1', 'fortran_order': False, 'shape': (" + "1, " * 70 + ")}") + b"x", "has shape"),
        (b"", "no .npy file"),
    ],
)
def test_an_array_of_another_form_is_refused_and_never_unpickled(content, match):
    with pytest.raises(ValueError, match=match):
        protocol.read_npy(memoryview(content), "videos")


@given(st.binary(max_size=80))
def test_any_array_header_is_read_or_refused(content):
    with contextlib.suppress(ValueError):
        protocol.read_npy(memoryview(header(content.decode("latin-1")) + b"x"), "videos")


def test_a_header_that_promises_much_allocates_nothing():
    huge = header(f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({2**50}, 3)}}")
    with pytest.raises(ValueError, match="but 4 bytes"):
        protocol.read_npy(memoryview(huge + b"1234"), "videos")


def test_a_damaged_request_is_refused():
    kind, body = sent(videos=ZEROS)
    for wrong in (body[:-20], body[1:], bytearray(), bytearray(b"x" * 100), body.replace(b"form-data", b"mixed")):
        with pytest.raises(ValueError, match="multipart body"):
            protocol.decode(kind, wrong)
    for other in ("", "application/json", "multipart/form-data", "multipart/form-data; boundary="):
        with pytest.raises(ValueError, match="content type is"):
            protocol.decode(other, body)
    with pytest.raises(ValueError, match="part 'videos' comes twice"):
        protocol.decode(*twice("videos"))
    with pytest.raises(ValueError, match="part 'meta' comes twice"):
        protocol.decode(*twice("meta"))


def twice(name: str) -> tuple[str, bytearray]:
    """Return a request with one of its parts repeated."""
    kind, body = sent(videos=ZEROS)
    mark = b"--" + kind.partition("boundary=")[2].encode()
    parts = [mark + part for part in body.split(mark)[1:]]
    again = next(part for part in parts if f'"{name}"'.encode() in part)
    return kind, bytearray(again + b"".join(parts))


@pytest.mark.parametrize(
    ("meta", "match"),
    [
        (b"{", "part 'meta' is no JSON"),
        (b"[" * 100_000, "part 'meta' is no JSON"),
        (b"[]", "JSON list, must be an object"),
        (b'{"protocol": 2}', "protocol is 2, this server speaks 1"),
        (b"{}", "protocol is None"),
        (pickle.dumps(Bomb()), "no JSON"),
    ],
)
def test_meta_of_another_form_is_refused(meta, match):
    kind, body = sent()
    with pytest.raises(ValueError, match=match):
        protocol.decode(kind, body.replace(json.dumps(META).encode(), meta))


def test_numbers_that_json_does_not_know_are_not_sent():
    with pytest.raises(ValueError, match="JSON"):
        protocol.encode({"x": math.nan}, {})


def read(said: object, count: int = 2) -> protocol.Reply:
    return protocol.read_reply(json.loads(json.dumps(said)), "beauty", count)


def test_a_reply_is_read_with_every_digit():
    value = float(torch.tensor(0.1, dtype=torch.float32))
    reply = read(scores(value, None, causes=["", "too\ndark"]))
    assert reply.values.tolist()[0] == value and reply.values[1].isnan()
    assert reply.causes == ("", "too dark") and reply.identity == ("judge", "v1")
    assert read(scores(1, None)).causes == ("", "server calls it not valid")


def test_what_is_not_valid_is_a_fault_unless_the_reply_says_that_it_is_none():
    assert read(scores(1, None)).faulty.tolist() == [False, True]
    assert read(scores(1, None, faulty=[False, False])).faulty.tolist() == [False, False]
    assert read(scores(math.nan, None, valid=[True, False], faulty=[False, False])).faulty.tolist() == [True, False]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, 10**400, None])
def test_a_number_that_is_not_finite_is_no_score_but_takes_no_other_row_along(value):
    reply = read(scores(value, 2.0, valid=[True, True]))
    assert reply.values[0].isnan() and reply.causes[0].startswith("value is ")
    assert reply.values[1] == 2 and reply.causes[1] == ""


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({}, "valid is NoneType"),
        (scores(1.0), "valid is 1 entries, must be a list of 2"),
        (scores(1.0, 2.0, 3.0), "valid is 3 entries"),
        (scores(1.0, valid=[True, True]), "scores.beauty is 1 entries"),
        (scores(1.0, 2.0, scores={"other": [1.0, 2.0]}), "no score 'beauty'"),
        (scores(1.0, 2.0, scores={"beauty": 1.0}), "scores.beauty is float"),
        (scores(1.0, 2.0, scores={"beauty": [[1.0], [2.0]]}), "numbers and null only"),
        (scores(1.0, 2.0, scores={"beauty": ["1", "2"]}), "numbers and null only"),
        (scores(1.0, 2.0, scores={"beauty": [True, False]}), "numbers and null only"),
        (scores(1.0, 2.0, scores=[1.0, 2.0]), "no score"),
        (scores(1.0, 2.0, valid=[1, 1]), "true and false only"),
        (scores(1.0, 2.0, causes=["x"]), "causes is 1 entries"),
        (scores(1.0, None, faulty=[False]), "faulty is 1 entries"),
        (scores(1.0, None, faulty=[False, "no"]), "faulty must hold true and false only"),
        (scores(1.0, None, faulty=[True, False]), "both valid and faulty"),
        (scores(1.0, 2.0, model=None), "no 'model'"),
    ],
)
def test_a_reply_of_another_form_is_not_believed(said, match):
    with pytest.raises(ValueError, match=match):
        read(said)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"protocol": 2}, "speaks protocol 2, must be 1"),
        ({"rewards": ["other"]}, "server scores other, not beauty"),
        ({"rewards": "beauty"}, "must list"),
        ({"needs": [1]}, "must list"),
        ({"max_bytes": "1"}, "max_bytes"),
        ({"version": 3}, "no 'model' and 'version'"),
    ],
)
def test_health_of_another_form_is_not_believed(changes, match):
    assert protocol.read_health(HEALTH, "beauty").identity == ("judge", "v1")
    with pytest.raises(ValueError, match=match):
        protocol.read_health(HEALTH | changes, "beauty")


def test_a_text_from_the_other_side_becomes_one_short_printable_line():
    assert protocol.one_line("a\r\n b\x1b[31m\x00") == "a b[31m"
    assert len(protocol.one_line("x" * 10_000)) == protocol.MAX_TEXT

"""Frames come back as they were written, damaged videos are refused in one line, and sizes fit."""

import math
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from torch import Tensor

from flow_grpo.data import video_io
from flow_grpo.data.video_io import VideoCache, fit_video, fitted_size, nearest_bucket, read_video, video_size
from flow_grpo.runtime.video_file import write_video
from tests.data.cases import refusal


def gradients(frames: int = 6, height: int = 24, width: int = 32) -> Tensor:
    """Return smooth moving colours (3, T, h, w) in [0, 1]."""
    t, y, x = torch.meshgrid(*(torch.arange(size).float() for size in (frames, height, width)), indexing="ij")
    return torch.stack([(x + 2 * t) / (width + 2 * frames), (y + t) / (height + frames), (x + y) / (height + width)])


def noise(*size: int) -> Tensor:
    return torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [(9, 24, 32), (3, 25, 33), (1, 16, 16)])
def test_lossless_videos_come_back_bit_for_bit_from_any_frame(tmp_path, size):
    video = noise(*size)
    write_video(tmp_path / "a.mp4", video, lossless=True)
    assert video_size(tmp_path / "a.mp4") == size
    for start in range(0, size[0], 4):
        assert torch.equal(read_video(tmp_path / "a.mp4", size[0] - start, start), video[:, start:])


def test_floats_are_rounded_to_the_nearest_level(tmp_path):
    video = torch.tensor([0.0, 0.5, 1.0])[:, None, None, None].expand(3, 2, 16, 16)
    write_video(tmp_path / "a.mp4", video, lossless=True)
    assert read_video(tmp_path / "a.mp4", 2)[:, 0, 0, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize(("height", "width"), [(48, 64), (25, 33)])
def test_playable_videos_are_close_and_have_no_colour_cast(tmp_path, height, width):
    video = gradients(9, height, width)
    write_video(tmp_path / "a.mp4", video)
    got = read_video(tmp_path / "a.mp4", 9)
    assert got.shape == (3, 9, height + height % 2, width + width % 2)
    error = got[..., :height, :width].float() - 255 * video
    assert 10 * math.log10(255**2 / error.square().mean()) > 43
    # The usual conversion is off by 1.4 levels, undeclared colour places on these steep gradients by 1.1 to 1.9.
    assert error.mean(dim=(1, 2, 3)).abs().max() < 0.6


def test_playable_videos_are_420_at_the_given_rate_with_their_colours_declared(tmp_path):
    write_video(tmp_path / "a.mp4", gradients(), fps=29.97)
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        frame = next(container.decode(stream))
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert (frame.colorspace, frame.color_range) == (5, 1)
        assert float(stream.average_rate) == pytest.approx(29.97)
    data = (tmp_path / "a.mp4").read_bytes()
    assert data.find(b"moov") < data.find(b"mdat")  # a browser can start before the end has arrived


def test_equal_videos_give_equal_files_whatever_memory_held_before(tmp_path):
    """x264 reads uninitialised memory in some AVX-512 code; here glibc fills it with one byte or another.

    Other CPUs and libraries pass with any encoder options.
    """
    torch.save(gradients(), tmp_path / "video.pt")
    write = (
        "import sys, torch; from flow_grpo.runtime.video_file import write_video; "
        "folder, name = sys.argv[1:]; video = torch.load(f'{folder}/video.pt'); "
        "write_video(f'{folder}/{name}.mp4', video); "
        "write_video(f'{folder}/{name}_lossless.mp4', video, lossless=True)"
    )
    for byte in ("85", "170"):
        command = [sys.executable, "-c", write, str(tmp_path), byte]
        subprocess.run(command, env={**os.environ, "MALLOC_PERTURB_": byte}, check=True)
    for kind in ("", "_lossless"):
        first, second = ((tmp_path / f"{byte}{kind}.mp4").read_bytes() for byte in ("85", "170"))
        assert first == second


def unread(path, frames: int, start: int = 0) -> str:
    text = refusal(lambda: read_video(path, frames, start))
    assert str(path) in text
    return text


def test_missing_short_and_unreadable_files_are_refused(tmp_path):
    write_video(tmp_path / "a.mp4", gradients(4))
    assert "got 4 of 5 frames" in unread(tmp_path / "a.mp4", 5)
    assert "got 4 of 6 frames" in unread(tmp_path / "a.mp4", 3, start=3)
    assert "does not exist, got 0 of 5 frames" in unread(tmp_path / "none.mp4", 5)
    assert "none.mp4 does not exist" in refusal(lambda: video_size(tmp_path / "none.mp4"))
    for content in (b"", b"no video at all" * 50):
        (tmp_path / "bad.mp4").write_bytes(content)
        assert "cannot be read, got 0 of 5 frames" in unread(tmp_path / "bad.mp4", 5)


@pytest.mark.parametrize("length", [200, 400])
def test_a_file_that_ends_within_its_header_is_named(tmp_path, length):
    cut = tmp_path / "cut.mp4"
    write_video(cut, torch.zeros(3, 5, 16, 24), lossless=True)
    cut.write_bytes(cut.read_bytes()[:length])
    for reader in (lambda: read_video(cut, 5), lambda: video_size(cut)):
        assert "cut.mp4" in refusal(reader)


def test_a_file_without_pictures_is_refused(tmp_path):
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=44100, layout="mono")
        frame = av.AudioFrame(format="fltp", layout="mono", samples=1024)
        frame.sample_rate = 44100
        for plane in frame.planes:
            plane.update(bytes(plane.buffer_size))
        container.mux([*stream.encode(frame), *stream.encode()])
    assert "has 0 picture streams" in unread(tmp_path / "sound.mp4", 5)


@pytest.mark.parametrize("damage", ["cut", "hole"])
def test_damaged_videos_are_refused_and_not_concealed(tmp_path, damage):
    write_video(tmp_path / "a.mp4", gradients(20, 48, 64), lossless=True)
    data = bytearray((tmp_path / "a.mp4").read_bytes())
    middle = len(data) // 2
    if damage == "cut":
        del data[middle:]
    else:
        data[middle : middle + 100] = bytes(100)  # the decoder's default is to return 20 frames all the same
    (tmp_path / "a.mp4").write_bytes(data)
    assert "cannot be read, got " in unread(tmp_path / "a.mp4", 20)


@pytest.mark.parametrize(
    ("video", "text"),
    [
        (torch.zeros(1, 2, 16, 16), r"shape \(1, 2, 16, 16\)"),
        (torch.zeros(3, 0, 16, 16), r"shape \(3, 0, 16, 16\)"),
        (torch.full((3, 2, 16, 16), -0.1), r"values from -0.1 to -0.1, must be within \[0, 1\]"),
        (torch.full((3, 2, 16, 16), 255.0), "values from 255 to 255"),
        (torch.full((3, 2, 16, 16), torch.nan), "values from nan"),
        (torch.zeros(3, 2, 16, 16, dtype=torch.int64), "torch.int64"),
    ],
)
def test_tensors_that_are_no_video_are_refused(tmp_path, video, text):
    with pytest.raises(ValueError, match=text):
        write_video(tmp_path / "a.mp4", video)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    write_video(tmp_path / "new folder" / "a.mp4", gradients())
    before = (tmp_path / "new folder" / "a.mp4").read_bytes()

    def fail(path, *rest, **options):
        Path(path).write_bytes(b"half a video")
        raise OSError("disk full")

    monkeypatch.setattr(av, "open", fail)
    with pytest.raises(OSError, match="disk full"):
        write_video(tmp_path / "new folder" / "a.mp4", noise(4, 16, 16))
    assert [file.name for file in (tmp_path / "new folder").iterdir()] == ["a.mp4"]
    assert (tmp_path / "new folder" / "a.mp4").read_bytes() == before


@pytest.mark.parametrize(
    ("size", "wanted", "expected"),
    [
        ((1280, 1280), (480, 832), (832, 832)),  # MultiCamVideo
        ((720, 1280), (480, 832), (480, 854)),  # 853.3 rounded so that 11 columns go on either side
        ((24, 32), (24, 32), (24, 32)),
        ((1080, 1920), (480, 832), (480, 854)),
        ((101, 50), (480, 832), (1680, 832)),  # 1680.6
    ],
)
def test_the_picture_is_scaled_to_cover_and_cut_equally_at_both_ends(size, wanted, expected):
    assert fitted_size(size, *wanted) == expected
    assert all((a - b) % 2 == 0 and a >= b for a, b in zip(expected, wanted, strict=True))


def test_a_video_of_the_right_size_is_untouched_and_resizing_keeps_the_centre_and_the_scale():
    video = noise(2, 16, 24)
    assert torch.equal(fit_video(video, 16, 24), video)
    assert torch.equal(fit_video(video, 10, 24), video[:, :, 3:13])
    ramp = torch.arange(96.0).expand(3, 2, 96, 96) * 2
    fitted = fit_video(ramp.to(torch.uint8), 24, 48).float()
    # New pixel j covers old pixels 2j and 2j+1, whose values are 4j and 4j+2.
    assert fitted.shape == (3, 2, 24, 48)
    assert torch.allclose(fitted[0, 0, 0, 2:-2], 4 * torch.arange(2.0, 46) + 1, atol=1)


def test_the_cache_returns_what_the_file_holds_also_when_it_is_replaced_and_forgets_the_oldest(tmp_path, monkeypatch):
    reads = []
    monkeypatch.setattr(video_io, "read_video", lambda path, frames: reads.append(path) or read_video(path, frames))
    files = [tmp_path / f"{name}.mp4" for name in "abc"]
    for file in files:
        write_video(file, gradients(), lossless=True)
    a, b, c = files
    cache = VideoCache(limit=2 * 3 * 6 * 16 * 16)
    for file in (a, b, a, a, c, a, b):  # c takes the place of b, the longest unused; then b that of c
        video, *found = cache.read(file, 6, 16, 16)
        assert found == [(24, 32), 15.0]
        assert torch.equal(video, fit_video(read_video(file, 6), 16, 16))
    assert reads == [a, b, c, b]
    cache.read(a, 5, 16, 16)
    assert reads == [a, b, c, b, a]  # another number of frames is another video
    nothing = VideoCache(limit=0)
    assert torch.equal(nothing.read(a, 6, 24, 32)[0], nothing.read(a, 6, 24, 32)[0])
    before = cache.read(a, 5, 16, 16)[0]
    write_video(a, 1 - gradients(), lossless=True)
    assert not torch.equal(cache.read(a, 5, 16, 16)[0], before)


WIDE, TALL, SHORT, LARGE = (81, 480, 832), (81, 832, 480), (49, 480, 832), (81, 720, 1248)


@pytest.mark.parametrize(
    ("video", "buckets", "wanted"),
    [
        ((81, 1280, 1280), [WIDE, TALL, SHORT], WIDE),  # both as near and as large: the first
        ((81, 720, 1280), [WIDE, TALL, SHORT, LARGE], LARGE),
        ((200, 1920, 1080), [WIDE, TALL, SHORT], TALL),
        ((80, 480, 832), [WIDE, TALL, SHORT], SHORT),
        ((49, 1920, 1080), [WIDE, TALL, SHORT], SHORT),  # no tall one is short enough
        ((81, 480, 960), [(81, 240, 480), (81, 480, 960)], (81, 480, 960)),  # equally near: the larger
    ],
    ids=str,
)
def test_the_longest_bucket_a_video_fills_and_of_these_the_nearest_in_shape(video, buckets, wanted):
    assert nearest_bucket(video, buckets) == wanted


def test_a_video_shorter_than_every_bucket_is_refused():
    assert "7 frames fill none of the buckets" in refusal(lambda: nearest_bucket((7, 16, 24), [(9, 16, 24)]))


def write_frames(file: Path, sizes, streams: int = 1, kind: str = "mp4", aspect: Fraction = Fraction(1)) -> None:
    """Write a video of PNG frames of these (rows, columns), of pixels of that aspect ratio, into equal streams."""
    with av.open(str(file), "w", format=kind) as container:
        added = [container.add_stream("png", rate=15) for _ in range(streams)]
        for stream in added:
            (stream.height, stream.width), stream.pix_fmt = sizes[0], "rgb24"
            stream.codec_context.sample_aspect_ratio = aspect
        for number, (rows, columns) in enumerate(sizes):
            frame = av.VideoFrame.from_ndarray(np.zeros((rows, columns, 3), np.uint8), format="rgb24")
            for stream in added:
                one = av.CodecContext.create("png", "w")  # an encoder has one size: each frame gets its own
                one.height, one.width, one.pix_fmt, one.time_base = rows, columns, "rgb24", Fraction(1, 15)
                for packet in [*one.encode(frame), *one.encode()]:
                    packet.stream, packet.pts, packet.dts, packet.time_base = stream, number, number, Fraction(1, 15)
                    container.mux(packet)


def test_a_video_that_changes_its_size_and_one_with_several_picture_streams_are_refused(tmp_path):
    write_frames(tmp_path / "a.avi", [(16, 24)] * 3 + [(24, 16)] * 2, kind="avi")
    assert read_video(tmp_path / "a.avi", 3).shape == (3, 3, 16, 24)
    assert "frame 3 is 24x16, those before it 16x24; encode it again" in unread(tmp_path / "a.avi", 5)
    write_frames(tmp_path / "a.mp4", [(16, 24)] * 5, streams=2)
    assert "has 2 picture streams" in unread(tmp_path / "a.mp4", 5)


@pytest.mark.parametrize(
    ("matrix", "shown"),
    [
        ((0, 1, -1, 0), lambda video: video.rot90(-1, (2, 3))),  # a phone held upright
        ((0, -1, 1, 0), lambda video: video.rot90(1, (2, 3))),
        ((-1, 0, 0, -1), lambda video: video.flip(2, 3)),
        ((-1, 0, 0, 1), lambda video: video.flip(3)),
        ((1, 0, 0, -1), lambda video: video.flip(2)),
        ((0, 1, 1, 0), lambda video: video.transpose(2, 3)),
    ],
)
def test_a_video_is_read_as_players_turn_and_mirror_it(tmp_path, matrix, shown):
    video = gradients()
    write_video(tmp_path / "a.mp4", video, lossless=True)
    stored = read_video(tmp_path / "a.mp4", 5)
    with_matrix(tmp_path / "a.mp4", matrix)
    assert torch.equal(read_video(tmp_path / "a.mp4", 5), shown(stored))
    assert video_size(tmp_path / "a.mp4")[1:] == tuple(shown(stored).shape[2:])


def test_a_video_that_players_turn_by_part_of_a_quarter_is_refused(tmp_path):
    write_video(tmp_path / "a.mp4", gradients(), lossless=True)
    with_matrix(tmp_path / "a.mp4", (0.6, 0.8, -0.8, 0.6))
    assert "is shown turned by" in unread(tmp_path / "a.mp4", 5)


def with_matrix(file: Path, matrix: Sequence[float]) -> None:
    """Write the display matrix (a, b, c, d) into the head of a film's only track."""
    upright = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    a, b, c, d = (round(number * (1 << 16)) for number in matrix)
    head, middle, tail = file.read_bytes().split(upright)  # the film's matrix and its only track's
    file.write_bytes(head + upright + middle + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + tail)


def encode(file: Path, video: torch.Tensor, **facts: object) -> None:
    """Write an uint8 film (3, T, h, w) with facts in its stream that `write_video` never writes."""
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=15)
        stream.height, stream.width, stream.pix_fmt = *video.shape[2:], "yuv420p"
        for name, value in facts.items():
            setattr(stream.codec_context, name, value)
        for picture in video.permute(1, 2, 3, 0).contiguous().numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


@pytest.mark.parametrize(("number", "name"), [(16, "PQ"), (18, "HLG")])
def test_hdr_is_refused_and_a_way_to_convert_it_named(tmp_path, number, name):
    encode(tmp_path / "a.mp4", noise(5, 16, 24), color_trc=number)
    assert f"is HDR ({name})" in unread(tmp_path / "a.mp4", 5)
    assert "convert it: ffmpeg -i IN" in refusal(lambda: video_size(tmp_path / "a.mp4"))


def test_frames_that_a_cut_hides_are_not_counted(tmp_path):
    """An edit list that begins in the middle of the film, as a cut without encoding leaves it."""
    write_video(tmp_path / "a.mp4", gradients(), lossless=True)
    with av.open(str(tmp_path / "a.mp4")) as whole, av.open(str(tmp_path / "b.mp4"), "w") as cut:
        stream = cut.add_stream_from_template(whole.streams.video[0])
        for packet in whole.demux(video=0):
            if packet.dts is not None:
                back = 3 * packet.duration
                packet.stream, packet.pts, packet.dts = stream, packet.pts - back, packet.dts - back
                cut.mux(packet)
    with av.open(str(tmp_path / "b.mp4")) as found:
        shown, counted = sum(1 for _ in found.decode(video=0)), found.streams.video[0].frames
    assert shown < counted and video_size(tmp_path / "b.mp4")[0] == shown


@pytest.mark.parametrize(("aspect", "read"), [(Fraction(1), True), (Fraction(40, 39), True), (Fraction(4, 3), False)])
def test_a_video_whose_pixels_are_not_square_is_refused(tmp_path, aspect, read):
    write_frames(tmp_path / "a.mp4", [(16, 24)] * 5, aspect=aspect)
    if read:
        assert read_video(tmp_path / "a.mp4", 5).shape == (3, 5, 16, 24)
    else:
        assert "pixels are 1.33 times as wide as high, must be square to 5%" in unread(tmp_path / "a.mp4", 5)
        with pytest.raises(ValueError, match="encode it again with square pixels"):
            video_size(tmp_path / "a.mp4")


def test_a_playlist_named_like_a_video_reads_no_other_file(tmp_path):
    write_video(tmp_path / "a.mp4", gradients())
    (tmp_path / "list.mp4").write_text(f"ffconcat version 1.0\nfile {tmp_path / 'a.mp4'}\n")
    assert "cannot be read, got 0 of 5 frames" in unread(tmp_path / "list.mp4", 5)
    assert "is damaged or no video" in refusal(lambda: video_size(tmp_path / "list.mp4"))


@pytest.mark.parametrize("ending", [".mp4", ".mov", ".mkv", ".avi"])
def test_containers_of_users_videos_are_read(tmp_path, ending):
    with av.open(str(tmp_path / f"a{ending}"), "w") as container:
        stream = container.add_stream("mpeg4", rate=15)
        stream.height, stream.width, stream.pix_fmt = 16, 24, "yuv420p"
        for _ in range(5):
            container.mux(stream.encode(av.VideoFrame(24, 16, "rgb24")))
        container.mux(stream.encode())
    assert read_video(tmp_path / f"a{ending}", 5).shape == (3, 5, 16, 24)

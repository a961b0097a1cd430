"""The device report: its self-test runs whole, and no part's failure takes another part's figures along."""

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.transformers import load_transformer
from flow_grpo.models.video_model import WAN_1_3B
from flow_grpo.runtime import device as device_api
from tests.limits import LIMIT_S
from tests.refusals import refusal
from tools import device_report
from tools.device import counts, kernels, networks, timing
from tools.device.kernels import SIZES, Setting, VideoSize
from tools.device_report import Job

ROOT = Path(__file__).resolve().parents[2]
SMALL = counts.transformer_config(SIZES["self-test"])
CPU = torch.device("cpu")
LONG, SHORT = VideoSize(81, 480, 832), VideoSize(5, 32, 272)


def report(size: str = "real") -> dict:
    return device_report.new_report(size, CPU)


def figures(**records: dict) -> dict:
    return {"hardware": "a card", "memory_gib": 64.0, "sizes": {"rows": 1}, "records": records}


HIDING = """
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""


def with_what_it_needs(package: str, found: set[str]) -> None:
    """Add a package and what it installs along, without extras."""
    name = canonicalize_name(package)
    if name in found:
        return
    found.add(name)
    with contextlib.suppress(metadata.PackageNotFoundError):  # left out, such as a vendor's libraries
        for needed in map(Requirement, metadata.requires(name) or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                with_what_it_needs(needed.name, found)


@functools.cache
def hidden_modules() -> frozenset[str]:
    """Return the modules of all installed packages but those that the report says it needs."""
    said = re.search(r"Needs (.+?) with what these install along", device_report.__doc__, re.DOTALL)
    needed = {canonicalize_name("flow-grpo")}
    for package in re.split(r",\s+|\s+and\s+", said[1]):
        with_what_it_needs(package, needed)
    # Once setuptools is imported, copies of what it needs itself are on the path, too.
    with mock.patch.object(sys, "path", [place for place in sys.path if not place.endswith("_vendor")]):
        owners = metadata.packages_distributions()
    return frozenset(name for name, own in owners.items() if needed.isdisjoint(map(canonicalize_name, own)))


@pytest.fixture
def bare(tmp_path) -> dict[str, str]:
    """An environment in which nothing is installed but what the report says it needs."""
    (tmp_path / "sitecustomize.py").write_text(HIDING.format(hidden=set(hidden_modules())))
    return os.environ | {"PYTHONPATH": str(tmp_path)}


def test_it_needs_no_package_but_those_it_names(tmp_path, bare) -> None:
    assert hidden_modules() >= {"av", "cv2", "ftfy", "matplotlib", "tensorboard", "wandb"}
    assert not hidden_modules() & {"torch", "diffusers", "transformers", "einops"}
    command = [sys.executable, str(ROOT / "tools/device_report.py"), "--size", "self-test", "--device", "cpu"]
    command += ["--videos", "5x32x272", "--part", "forward"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=bare, check=False)
    assert done.returncode == 0, done.stderr
    assert '"forward_5x32x272": {"seconds": ' in done.stdout


@pytest.mark.slow  # six processes, most of it imports: 50 s of one idle core
def test_the_self_test_measures_every_part_and_keeps_it(tmp_path, bare) -> None:
    file = tmp_path / "kept.json"
    command = [sys.executable, str(ROOT / "tools/device_report.py"), "--device", "cpu", "--out", str(file)]
    command += ["--repeat", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=bare, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads(file.read_text())
    parts = kept["parts"]
    names = ("forward", "update", "decode", "decode_tf32", "decode_tiled", "decode_bf16", "attention_native")
    expected = {"matmul", *(f"{name}_5x32x272" for name in names)}
    assert expected | {"attention_native_backward_5x32x272"} <= set(parts)
    measured = {name: record for name, record in parts.items() if "seconds" in record}
    assert all("seconds" in parts[name] or "unavailable" in parts[name] for name in expected)
    for name, record in measured.items():
        assert record["seconds"] > 0 and record["flops"] > 0 and record["share_of_matmul_rate"] > 0, name
        assert record["peak_gib"] > 0 and record.get("finite", True), name
    assert parts["update_5x32x272"]["flops"] == pytest.approx(4 * parts["forward_5x32x272"]["flops"], rel=1e-4)
    assert parts["decode_tiled_5x32x272"]["flops"] > parts["decode_5x32x272"]["flops"]
    assert parts["update_keep_attention_5x32x272"]["flops"] < parts["update_5x32x272"]["flops"]
    for name in ("forward_ratio_5x32x272", "forward_compiled_ratio_5x32x272"):
        assert parts[name]["within"] and parts[name]["bound"] == pytest.approx(1e-4), name
    assert parts["update_kernels_5x32x272"]["busy_share"] > 0 and parts["update_kernels_5x32x272"]["kernels"]
    assert {found["verdict"] for found in kept["aims"].values()} == {"not judged at this size"}
    assert kept["hardware"] and kept["torch"] == torch.__version__ and kept["sizes"]["blocks"] == 2
    assert not list(tmp_path.glob("*tmp-*"))
    assert "not judged at this size" in done.stdout and "forward_5x32x272" in done.stdout


@pytest.mark.parametrize("chosen", [True, False])
def test_kernels_are_named_only_where_asking_for_one_has_an_effect(monkeypatch, chosen) -> None:
    monkeypatch.setattr(device_api, "chooses_sdpa_kernel", lambda device: chosen)
    named = [name for name, *_ in kernels._attentions(CPU)]
    assert named[0] == "native" and any(name.startswith("sdpa_") for name in named) is chosen


def test_a_failing_part_leaves_the_figures_of_the_others() -> None:
    def runner(job: Job, limit: float) -> dict:
        if job.part == "forward":
            return {"records": {job.name: {"error": "OutOfMemoryError: no room"}}}
        return figures(**{job.name: {"seconds": 2.0, "flops": 4e12}})

    kept, saved = report(), []
    queue = [Job("matmul"), Job("forward", (LONG,)), Job("update", (LONG,))]
    device_report.collect(kept, queue, runner, 100.0, lambda: saved.append(set(kept["parts"])))
    names = [job.name for job in queue]
    assert saved == [set(names[:done]) for done in (1, 2, 3)]
    assert kept["parts"]["forward_81x480x832"]["error"] == "OutOfMemoryError: no room"
    assert kept["parts"]["update_81x480x832"]["tflops"] == pytest.approx(2.0)
    assert kept["parts"]["update_81x480x832"]["share_of_matmul_rate"] == pytest.approx(1.0)
    assert kept["hardware"] == "a card"
    assert "OutOfMemoryError: no room" in device_report.table(kept)


def test_what_no_time_is_left_for_is_marked_and_not_begun(monkeypatch) -> None:
    now, begun = [0.0], []
    monkeypatch.setattr(device_report.time, "monotonic", lambda: now[0])

    def runner(job: Job, limit: float) -> dict:
        begun.append((job.name, limit))
        now[0] += 150.0
        return figures(**{job.name: {"seconds": 1.0, "flops": 1e12}})

    kept, queue = report(), list(device_report.jobs(["matmul", "attention"], [LONG])) * 2
    device_report.collect(kept, queue, runner, 302.0, lambda: None)
    assert begun == [("matmul", 151.0), ("attention_81x480x832", 120.0)]
    assert kept["parts"]["matmul"] == {"error": "skipped: no time left"}


def test_a_process_that_dies_or_hangs_leaves_what_it_had_printed(monkeypatch) -> None:
    answer = json.dumps(figures(decode_81x480x832={"seconds": 1.0}))
    cut = f"{answer}\nchatter\n" + answer[:40]
    errors = "Traceback\ntorch.OutOfMemoryError: no room\n[warning] at exit\n"
    run = device_report.in_a_process(["--size", "real"])

    def ends(code: int):
        return lambda command, **_: subprocess.CompletedProcess(command, code, cut, errors)

    def hangs(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"], output=cut.encode())

    found = {}
    for name, stand_in in {"dies": ends(1), "killed": ends(-9), "hangs": hangs}.items():
        monkeypatch.setattr(device_report.subprocess, "run", stand_in)
        found[name] = run(Job("attention", (LONG,)), 30.0)["records"]
        assert found[name]["decode_81x480x832"] == {"seconds": 1.0}
    assert found["dies"]["attention_81x480x832"] == {"error": "torch.OutOfMemoryError: no room"}
    assert found["killed"]["attention_81x480x832"] == {"error": "killed by signal 9"}
    assert found["hangs"]["attention_81x480x832"] == {"error": "no end within 30 s"}


def test_a_part_that_raises_is_reported_by_a_real_process() -> None:
    run = device_report.in_a_process(["--size", "self-test", "--device", "cpu"])
    assert "KeyError" in run(Job("nonsense", (SHORT,)), LIMIT_S)["records"]["nonsense_5x32x272"]["error"]


def test_the_aims_are_met_missed_or_not_measured() -> None:
    kept = report()
    records = {
        "matmul": {"seconds": 1.0, "flops": 1000e12},
        "forward_81x480x832": {"seconds": 1.0, "flops": 550e12},
        "update_81x480x832": {"seconds": 1.0, "flops": 499e12},
    }
    device_report.collect(kept, [Job("matmul")], lambda *_: figures(**records), 100.0, lambda: None)
    verdicts = [found["verdict"] for found in kept["aims"].values()]
    assert verdicts == ["met", "missed", "not measured"]
    assert kept["parts"]["forward_81x480x832"]["tflops"] == pytest.approx(550.0)
    for peak, verdict in ((60.0, "met"), (60.1, "missed")):
        records["update_81x480x832"]["peak_gib"] = peak
        device_report.collect(kept, [Job("matmul")], lambda *_: figures(**records), 100.0, lambda: None)
        assert kept["aims"]["update within 60 GiB"] == {"measured": peak, "verdict": verdict}
    # The row for the table has as many cells as its head.
    head, line = device_report.ROW_HEAD.splitlines()[0], device_report.row(kept | {"videos": ["81x480x832"]})
    assert "| a card |" in line and "| 1 (50 %) |" in line
    assert head.count("|") == line.count("|")


def test_the_most_important_parts_come_first() -> None:
    names = [job.name for job in device_report.jobs(device_report.PARTS, [LONG, VideoSize(33, 240, 416)])]
    first = [f"{part}_81x480x832" for part in ("forward", "update", "decode", "attention")]
    then = [f"{part}_33x240x416" for part in ("forward", "update", "decode")]
    assert names == ["matmul", "count", *first, *then]
    some = device_report.jobs(["matmul", "attention"], [LONG, VideoSize(33, 240, 416)])
    assert [job.name for job in some] == ["matmul", "attention_81x480x832"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--size", "real", "--device", "cpu"], "use --size self-test"),
        (["--device", "cpu", "--videos", "80x480x832"], "--videos: got '80x480x832', must be 4n+1"),
        (["--device", "cpu", "--videos", "81x480x830"], "--videos: got '81x480x830', must be 4n+1"),
        (["--device", "cpu", "--videos", "all"], "--videos: got 'all'"),
        (["--device", "cpu", "--parts", "forward,sleep"], "--parts: got sleep"),
        (["--device", "cpu", "--repeat", "0"], "--repeat 0"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(words, told, capsys) -> None:
    assert told in refusal(capsys, device_report.main, words)


def test_a_forward_of_the_real_size_is_955_tflop() -> None:
    size = SIZES["real"]
    assert counts.transformer_config(size) == dict(WAN_1_3B)
    assert LONG.latent_shape == (16, 21, 60, 104) and LONG.tokens == 65_520
    counted = dict(counts.count(Setting(size, CPU, (LONG,), 1, 1)))
    flops = {name.removesuffix("_81x480x832"): record["flops"] / 955e12 for name, record in counted.items()}
    assert flops["forward"] == flops["forward_compiled"] == pytest.approx(1, rel=0.01)
    # Without the gradients of frozen weights.
    assert flops["update"] == pytest.approx(3.83, rel=0.01) and flops["update_none"] == pytest.approx(2.82, rel=0.01)
    assert flops["update_keep_attention"] == pytest.approx(3.83 - 0.82, rel=0.01)  # attention's share of a forward


@pytest.mark.parametrize(
    ("record", "video"),
    [
        ("h100_device_report", "81x480x832"),
        ("h100_device_report", "33x240x416"),
        ("h100_device_report_2026_11", "81x480x832"),
    ],
)
def test_planned_peaks_are_within_a_tenth_of_those_measured_on_an_h100(record, video) -> None:
    kept = json.loads((ROOT / "benchmarks" / f"{record}.json").read_text())["parts"]
    planned = dict(counts.count(Setting(SIZES["real"], CPU, (VideoSize.parse(video),), 1, 1)))
    for part in ("forward", "update", "update_keep_attention", "update_none", "decode"):
        if "peak_gib" in (measured := kept[f"{part}_{video}"]):
            assert planned[f"{part}_{video}"]["planned_gib"] == pytest.approx(measured["peak_gib"], rel=0.1), part


def test_tiles_cost_what_their_area_says() -> None:
    size = SIZES["self-test"]
    with FakeTensorMode(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        codec = AutoencoderKLWan(base_dim=size.codec_width).eval()
        codec.enable_tiling()
        codec.decode(torch.empty(1, *SHORT.latent_shape))
    estimate = counts.decoding_flops(size, SHORT) * counts.tiled_area(SHORT)
    assert estimate == pytest.approx(counter.get_total_flops(), rel=0.03)
    assert counts.tiled_area(LONG) == pytest.approx(454.016 / 274.096, rel=1e-4)


def test_random_weights_have_the_precision_of_loaded_ones_and_true_rotary_tables(tmp_path) -> None:
    ReCamTransformer3DModel(**SMALL).save_pretrained(tmp_path)
    loaded = load_transformer(ReCamTransformer3DModel, tmp_path, torch.bfloat16)
    built = networks.build_transformer(SMALL, torch.bfloat16, CPU)
    precision = {name: parameter.dtype for name, parameter in built.named_parameters()}
    assert precision == {name: parameter.dtype for name, parameter in loaded.named_parameters()}
    assert set(precision.values()) == {torch.bfloat16, torch.float32}
    tables = dict(built.named_buffers())
    assert tables.keys() == dict(loaded.named_buffers()).keys()
    for name, values in loaded.named_buffers():
        assert tables[name].dtype == values.dtype and torch.equal(tables[name], values), name
    assert not any(parameter.is_meta for parameter in built.parameters())
    assert all(parameter.isfinite().all() for parameter in built.parameters())


def test_an_update_moves_the_adapters_alone_in_fp32() -> None:
    size = SIZES["self-test"]
    built = networks.build_networks(size, counts.recipe(size), CPU)
    transformer = built.transformer
    trained = {name for name, parameter in transformer.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_" in name or "cam_encoder.modules_to_save" in name for name in trained)
    assert {transformer.get_parameter(name).dtype for name in trained} == {torch.float32}
    assert built.dtype == torch.bfloat16 and transformer.is_gradient_checkpointing
    assert next(built.codec.parameters()).dtype == torch.float32
    assert built.text_encoder.nbytes == size.text_encoder_bytes


def test_a_breakdown_names_the_longest_kernels_first() -> None:
    left = torch.randn(200, 200)
    found = timing.breakdown(lambda: [left @ left for _ in range(20)], CPU)
    assert found["kernels"][0][0] == "aten::mm" and 0 < found["busy_share"] <= 1.5
    assert sum(share for *_, share in found["kernels"]) == pytest.approx(1, abs=0.05)


def test_calls_take_turns_and_the_first_turn_only_warms_up(monkeypatch) -> None:
    clock, made = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def call(name: str, seconds: float) -> None:
        made.append(name)
        clock[0] += seconds if made.count(name) > 1 else 1000.0

    calls = {"a": lambda: call("a", 2.0), "b": lambda: call("b", 4.0)}
    seconds = timing.interleaved(calls, CPU, 3)
    assert made == ["a", "b"] * 4 and seconds == {"a": [2.0] * 3, "b": [4.0] * 3}
    assert timing.median_ratio({"a": [1.0, 9.0, 4.0], "b": [2.0, 3.0, 4.0]}, "a", "b") == 1.0
    assert len(timing.interleaved(calls, CPU, 9, slice_s=10.0)["a"]) == 2  # 6 s a turn: the second exceeds it

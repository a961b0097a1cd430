"""The benchmark at real size: its self-test runs whole, and no part's failure takes another part's figures along."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import real_size, real_size_parts
from benchmarks.real_size import Job
from benchmarks.real_size_kernels import SIZES, Setting
from flow_grpo.models.recam_transformer import ReCamTransformer3DModel, load_recam_transformer
from flow_grpo.preflight.footprint import WAN_1_3B

ROOT = Path(__file__).resolve().parents[2]
SMALL = real_size_parts.transformer_config(SIZES["self-test"])
CPU = torch.device("cpu")


def report(size: str = "real") -> dict:
    return real_size.new_report(size, CPU)


def figures(**records: dict) -> dict:
    return {"hardware": "a card", "memory_gib": 64.0, "sizes": {"rows": 1}, "records": records}


@pytest.mark.slow  # six processes, most of it imports: 50 s of one idle core
@pytest.mark.timeout(300)
def test_the_self_test_measures_every_part_and_keeps_it(tmp_path) -> None:
    file = tmp_path / "kept.json"
    command = [sys.executable, str(ROOT / "benchmarks/real_size.py"), "--device", "cpu", "--out", str(file)]
    done = subprocess.run([*command, "--repeat", "1"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads(file.read_text())
    parts = kept["parts"]
    expected = {"matmul", "forward_5", "update_5", "decode_5", "decode_tiled_5", "attention_native_5"}
    assert expected | {"attention_native_backward_5"} <= set(parts)
    measured = {name: record for name, record in parts.items() if "unavailable" not in record}
    for name, record in measured.items():
        assert record["seconds"] > 0 and record["flops"] > 0 and record["share_of_matmul_rate"] > 0, name
        assert record["peak_gib"] > 0 and record.get("finite", True), name
    assert parts["update_5"]["flops"] == pytest.approx(4 * parts["forward_5"]["flops"], rel=1e-4)
    assert parts["decode_tiled_5"]["flops"] > parts["decode_5"]["flops"]
    assert {found["verdict"] for found in kept["aims"].values()} == {"not judged at this size"}
    assert kept["hardware"] and kept["torch"] == torch.__version__ and kept["sizes"]["blocks"] == 2
    assert not list(tmp_path.glob("*.part"))
    assert "not judged at this size" in done.stdout and "forward_5" in done.stdout


def test_a_failing_part_leaves_the_figures_of_the_others() -> None:
    def runner(job: Job, limit: float) -> dict:
        if job.part == "forward":
            return {"records": {job.name: {"error": "OutOfMemoryError: no room"}}}
        return figures(**{job.name: {"seconds": 2.0, "flops": 4e12}})

    kept, saved = report(), []
    queue = [Job("matmul"), Job("forward", (81,)), Job("update", (81,))]
    real_size.collect(kept, queue, runner, 100.0, lambda: saved.append(set(kept["parts"])))
    assert saved == [{"matmul"}, {"matmul", "forward_81"}, {"matmul", "forward_81", "update_81"}]
    assert kept["parts"]["forward_81"]["error"] == "OutOfMemoryError: no room"
    assert kept["parts"]["update_81"]["tflops"] == pytest.approx(2.0)
    assert kept["parts"]["update_81"]["share_of_matmul_rate"] == pytest.approx(1.0)
    assert kept["hardware"] == "a card"
    assert "OutOfMemoryError: no room" in real_size.table(kept)


def test_what_no_time_is_left_for_is_marked_and_not_begun(monkeypatch) -> None:
    now, begun = [0.0], []
    monkeypatch.setattr(real_size.time, "monotonic", lambda: now[0])

    def runner(job: Job, limit: float) -> dict:
        begun.append((job.name, limit))
        now[0] += 150.0
        return figures(**{job.name: {"seconds": 1.0, "flops": 1e12}})

    kept = report()
    real_size.collect(kept, list(real_size.jobs(["matmul", "attention"], [81])) * 2, runner, 302.0, lambda: None)
    assert begun == [("matmul", 151.0), ("attention_81", 76.0)]
    assert "seconds" in kept["parts"]["attention_81"] or "error" in kept["parts"]["attention_81"]
    assert kept["parts"]["matmul"] == {"error": "skipped: no time left"}


def test_a_process_that_dies_or_hangs_leaves_what_it_had_printed(monkeypatch) -> None:
    answer = json.dumps(figures(decode_81={"seconds": 1.0}))
    cut = f"{answer}\nchatter\n" + answer[:40]
    errors = "Traceback\ntorch.OutOfMemoryError: no room\n[warning] at exit\n"
    run = real_size.in_a_process(["--size", "real"])

    def ends(code: int):
        return lambda command, **_: subprocess.CompletedProcess(command, code, cut, errors)

    def hangs(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"], output=cut.encode())

    found = {}
    for name, stand_in in {"dies": ends(1), "killed": ends(-9), "hangs": hangs}.items():
        monkeypatch.setattr(real_size.subprocess, "run", stand_in)
        found[name] = run(Job("attention", (81,)), 30.0)["records"]
        assert found[name]["decode_81"] == {"seconds": 1.0}
    assert found["dies"]["attention_81"] == {"error": "torch.OutOfMemoryError: no room"}
    assert found["killed"]["attention_81"] == {"error": "killed by signal 9"}
    assert found["hangs"]["attention_81"] == {"error": "no end within 30 s"}


def test_a_part_that_raises_is_reported_by_a_real_process() -> None:
    run = real_size.in_a_process(["--size", "self-test", "--device", "cpu"])
    assert "KeyError" in run(Job("nonsense", (5,)), 100.0)["records"]["nonsense_5"]["error"]


def test_the_aims_are_met_missed_or_not_measured() -> None:
    kept = report()
    records = {
        "matmul": {"seconds": 1.0, "flops": 1000e12},
        "forward_81": {"seconds": 1.0, "flops": 550e12},
        "update_81": {"seconds": 1.0, "flops": 499e12},
    }
    real_size.collect(kept, [Job("matmul")], lambda *_: figures(**records), 100.0, lambda: None)
    verdicts = [found["verdict"] for found in kept["aims"].values()]
    assert verdicts == ["met", "missed", "not measured"]
    for peak, verdict in ((60.0, "met"), (60.1, "missed")):
        records["update_81"]["peak_gib"] = peak
        real_size.collect(kept, [Job("matmul")], lambda *_: figures(**records), 100.0, lambda: None)
        assert kept["aims"]["update within 60 GiB"] == {"measured": peak, "verdict": verdict}


def test_the_most_important_parts_come_first() -> None:
    names = [job.name for job in real_size.jobs(real_size.PARTS, [81, 41])]
    first = ["matmul", "count", "forward_81", "update_81", "decode_81", "attention_81"]
    assert names == [*first, "forward_41", "update_41", "decode_41"]
    assert [job.name for job in real_size.jobs(["matmul", "attention"], [81, 41])] == ["matmul", "attention_81"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--size", "real", "--device", "cpu"], "use --size self-test"),
        (["--device", "cpu", "--frames", "80"], "--frames: got '80'"),
        (["--device", "cpu", "--frames", "all"], "--frames: got 'all'"),
        (["--device", "cpu", "--parts", "forward,sleep"], "--parts: got sleep"),
        (["--device", "cpu", "--repeat", "0"], "--repeat 0"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(words, told, capsys) -> None:
    assert real_size.main(words) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1


def test_a_forward_of_the_real_size_is_971_tflop() -> None:
    size = SIZES["real"]
    assert real_size_parts.transformer_config(size) == dict(WAN_1_3B)
    assert size.latent_shape(81) == (16, 21, 60, 104) and size.tokens(81) == 65_520
    counts = real_size_parts.count(Setting(size, CPU, (81,), 1, 1))
    assert dict([next(counts), next(counts)]) == {
        "forward_81": {"flops": pytest.approx(971e12, rel=0.01)},
        "update_81": {"flops": pytest.approx(4 * 971e12, rel=0.01)},
    }


def test_tiles_cost_what_their_area_says() -> None:
    size = SIZES["self-test"]
    with FakeTensorMode(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        codec = AutoencoderKLWan(base_dim=size.codec_width).eval()
        codec.enable_tiling()
        codec.decode(torch.empty(1, *size.latent_shape(5)))
    estimate = real_size_parts.decoding_flops(size, 5) * real_size_parts.tiled_area(size)
    assert estimate == pytest.approx(counter.get_total_flops(), rel=0.03)
    assert real_size_parts.tiled_area(SIZES["real"]) == pytest.approx(454.016 / 274.096, rel=1e-4)


def test_random_weights_have_the_precision_of_loaded_ones_and_true_rotary_tables(tmp_path) -> None:
    ReCamTransformer3DModel(**SMALL).save_pretrained(tmp_path)
    loaded = load_recam_transformer(tmp_path, torch.bfloat16)
    built = real_size_parts.build_transformer(SMALL, torch.bfloat16, CPU)
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
    networks = real_size_parts.build_networks(size, real_size_parts.recipe(size), CPU)
    transformer = networks.transformer
    trained = {name for name, parameter in transformer.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_" in name or "cam_encoder.modules_to_save" in name for name in trained)
    assert {transformer.get_parameter(name).dtype for name in trained} == {torch.float32}
    assert networks.dtype == torch.bfloat16 and transformer.is_gradient_checkpointing
    assert next(networks.codec.parameters()).dtype == torch.float32
    assert networks.text_encoder.nbytes == size.text_encoder_bytes


def test_a_rate_that_is_not_there_judges_nothing() -> None:
    kept = report()
    records = {"forward_81": {"seconds": 1.0, "flops": 1e15}}
    real_size.collect(kept, [Job("forward", (81,))], lambda *_: figures(**records), 100.0, lambda: None)
    assert kept["aims"]["forward at 55 % of the matrix rate"]["verdict"] == "not measured"
    assert math.isclose(kept["parts"]["forward_81"]["tflops"], 1000.0)

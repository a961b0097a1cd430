"""Measure this machine's device on the real model's sizes with random weights, in at most ten minutes.

    python tools/device_report.py                       # real size on an accelerator, the self-test on a CPU
    python tools/device_report.py --parts matmul,update --videos 41x480x832

A rollout step, an update micro-batch with LoRA, decoding and attention, at 81x480x832 and then at 33x240x416: seconds,
share of the measured matmul rate, peak memory measured and planned, three kinds of activation checkpointing, blocks
compiled or not, the first ratio, and a profile. Every part runs in its own process, the most important first, so that
one that fails, hangs or runs out of memory does not cost the others' figures. Needs torch, diffusers, peft,
safetensors, ml_collections, pydantic and einops with what these install along, no weights and no data. The JSON is
rewritten after every part; the last output is a row for docs/devices.md. Exit code: 0 when every part has figures, 1
when one has not, 2 for an unusable request.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from tools.common import fail, make_parser

VIDEOS = {"real": "81x480x832,33x240x416", "self-test": "5x32x272"}  # the latter the least decoded in two tiles
PARTS = ("matmul", "forward", "update", "decode", "attention")
PARSER = make_parser(__doc__)
PARSER.add_argument("--size", choices=list(VIDEOS), help="real, or self-test: that it runs, in small")
PARSER.add_argument("--device", default="auto", help="kind of device")
PARSER.add_argument("--videos", default="", help="FRAMESxHEIGHTxWIDTH, the most important first, commas between")
PARSER.add_argument("--parts", default=",".join(PARTS), help="of matmul, forward, update, decode, attention")
PARSER.add_argument("--rows", type=int, default=1, help="videos in one call")
PARSER.add_argument("--repeat", type=int, default=3, help="timed calls of each, at most")
PARSER.add_argument("--budget-s", type=float, default=570.0, help="seconds for everything")
PARSER.add_argument("--out", default="", help="JSON file; by default in benchmarks/, named by size and device")
PARSER.add_argument("--part", default="", help=argparse.SUPPRESS)  # the process of one part
if __name__ == "__main__":
    PARSER.parse_args()  # now: what follows takes seconds to import

import flow_grpo.models  # noqa: F401, I001 - before torch and diffusers, which load accelerator plug-ins unguarded

import torch

from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.atomic_file import write_atomically
from tools.device.kernels import VideoSize

ROOT = Path(__file__).resolve().parents[1]
Report = dict[str, Any]
Runner = Callable[["Job", float], dict[str, Any]]

AIMS = {
    "forward at 55 % of the matrix rate": ("forward_81x480x832", "share_of_matmul_rate", 0.55, True),
    "update at 50 % of the matrix rate": ("update_81x480x832", "share_of_matmul_rate", 0.50, True),
    "update within 60 GiB": ("update_81x480x832", "peak_gib", 60.0, False),
}
CONVENTIONS = {
    "flops": "operations of one call, a multiplication and an addition counted apart",
    "tflops": "1e12 operations a second",
    "seconds": "median of the repeats after one call to warm up, the device synchronised",
    "matmul": "best of several square bf16 products; 10 products are one call",
    "forward": "rollout step: transformer without gradients, draw, log-probability",
    "update": "one micro-batch and its optimizer step: forward, recomputation, and the gradients that LoRA needs",
    "update_keep_attention": "the same with attention's outputs kept: all is recomputed but attention",
    "update_none": "the same with nothing recomputed",
    "compiled": "the same with torch.compile of the repeated blocks",
    "ratio": "largest log-ratio between a rollout step and its replay with gradients, before any update",
    "kernels": "busy_share of the device in one call under the profiler; kernels: name, milliseconds, share of all",
    "decode": "codec in fp32; its share refers to the bf16 rate all the same",
    "decode_tf32": "the same with convolutions whose inputs are rounded, to HF32 on an NPU; decode_bf16: in bf16",
    "decode_tiled": "the same in overlapping tiles; operations estimated by the tiles' area",
    "attention": "4 B S^2 D operations forward, three times that with the backward",
    "peak_gib": "highest memory of all calls; codec, transformer and as many bytes as the text encoder's among it",
    "planned_gib": "what tools/plan.py says of it, optimizer state included",
}
ROW_HEAD = """\
| device | torch | video | bf16 TFLOP/s | rollout step s | update s | attention kept | compiled | decode s | \
peak / planned GiB: rollout | update | decode | first ratio |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""
SHORTEST_S = 5.0  # no part starts with less time left
FAIR_S = 120.0  # a part may take half of the time left, or this if it is more


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process measures: a part at some sizes of video."""

    part: str
    videos: tuple[VideoSize, ...] = ()

    @property
    def name(self) -> str:
        return "_".join([self.part, *(str(video) for video in self.videos if self.part != "count")])


def main(words: Sequence[str] | None = None) -> int:
    options = PARSER.parse_args(words)
    try:
        device = device_api.resolve(options.device)
        size = options.size or ("self-test" if device.type == "cpu" else "real")
        if size == "real" and device.type == "cpu":
            raise ValueError("--size real needs an accelerator, this is a CPU: use --size self-test")
        videos = tuple(VideoSize.parse(text) for text in (options.videos or VIDEOS[size]).split(","))
        parts = options.parts.split(",")
        if unknown := set(parts) - set(PARTS):
            raise ValueError(f"--parts: got {', '.join(sorted(unknown))}, must be of {', '.join(PARTS)}")
        if options.rows < 1 or options.repeat < 1:
            raise ValueError(f"--rows {options.rows}, --repeat {options.repeat}: must be at least 1")
        if options.part:  # this process measures; the one that waits for it leaves the device alone
            device_api.setup(device)
    except ValueError as error:
        return fail(error)
    if options.part:
        return run_part(options.part, size, device, videos, options)
    file = Path(options.out or ROOT / "benchmarks" / f"{size.replace('-', '_')}_{device.type}.json")
    report = new_report(size, device) | {"videos": [str(video) for video in videos]}
    passed_on = {"size": size, "device": device.type, "rows": options.rows, "repeat": options.repeat}
    runner = in_a_process([f"--{name}={value}" for name, value in passed_on.items()])

    def save() -> None:
        rounded = json.loads(json.dumps(report), parse_float=lambda text: float(f"{float(text):.5g}"))
        write_atomically(file, f"{json.dumps(rounded, indent=2)}\n")

    collect(report, list(jobs(parts, videos)), runner, options.budget_s, save)
    print(f"\n{table(report)}\n\n{ROW_HEAD}\n{row(report)}\n\nkept in {file}")
    return 1 if any("error" in record for record in report["parts"].values()) else 0


def jobs(parts: Sequence[str], videos: Sequence[VideoSize]) -> Iterator[Job]:
    networks = [part for part in ("forward", "update", "decode") if part in parts]
    if "matmul" in parts:
        yield Job("matmul")
    if networks:
        yield Job("count", tuple(videos))
    for video in videos:
        yield from (Job(part, (video,)) for part in networks)
        if "attention" in parts and video == videos[0]:
            yield Job("attention", (video,))


def new_report(size: str, device: torch.device) -> Report:
    return {
        "hardware": None,
        "device": device.type,
        "memory_gib": None,
        "torch": torch.__version__,
        "dtype": "bf16",
        "size": size,
        "sizes": {},
        "conventions": CONVENTIONS,
        "counted": {},
        "parts": {},
        "aims": {},
    }


def collect(report: Report, queue: Sequence[Job], runner: Runner, budget_s: float, save: Callable[[], None]) -> None:
    """Run the jobs in order and fill the report, saving it after each.

    `runner` measures one job within a number of seconds and returns its answer, see `run_part`. Jobs that no time is
    left for, of `budget_s` seconds, are recorded as skipped.
    """
    end = time.monotonic() + budget_s
    for job in queue:
        left = end - time.monotonic()
        if left < SHORTEST_S:
            answer: dict[str, Any] = {"records": {job.name: {"error": "skipped: no time left"}}}
        else:
            answer = runner(job, min(left, max(left / 2, FAIR_S)))
        records = answer.pop("records")
        report |= answer
        for name, record in records.items():
            if job.part == "count" and "error" not in record:
                report["counted"][name] = record
                continue
            report["parts"][name] = record
            print(f"{name}: {as_text(record)}", flush=True)
        _derive(report)
        save()


def _derive(report: Report) -> None:
    parts = report["parts"]
    for name, record in parts.items():
        if "seconds" in record:
            record |= {key: value for key, value in report["counted"].get(name, {}).items() if key not in record}
        flops = record.get("flops")
        if flops:
            record["tflops"] = flops / record["seconds"] / 1e12
    rate = parts.get("matmul", {}).get("tflops")
    for record in parts.values():
        if rate and "tflops" in record:
            record["share_of_matmul_rate"] = record["tflops"] / rate
    report["aims"] = {aim: _verdict(report, *wanted) for aim, wanted in AIMS.items()}


def _verdict(report: Report, name: str, figure: str, bound: float, at_least: bool) -> dict[str, Any]:
    found = report["parts"].get(name, {}).get(figure)
    if report["size"] != "real":
        return {"measured": None, "verdict": "not judged at this size"}
    if found is None:
        return {"measured": None, "verdict": "not measured"}
    met = found >= bound if at_least else found <= bound
    return {"measured": found, "verdict": "met" if met else "missed"}


def in_a_process(arguments: Sequence[str]) -> Runner:
    def run(job: Job, limit: float) -> dict[str, Any]:
        videos = ["--videos", ",".join(map(str, job.videos))] if job.videos else []
        command = [sys.executable, str(Path(__file__).resolve()), "--part", job.part, *videos, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
            answer, failure = _last_answer(done.stdout), _failure(done.returncode, done.stderr)
        except subprocess.TimeoutExpired as late:
            output = late.stdout or ""
            answer = _last_answer(output if isinstance(output, str) else output.decode(errors="replace"))
            failure = f"no end within {limit:.0f} s"
        if not answer["records"] and not failure:
            failure = "printed no figures"
        if failure:
            measured = "seconds" in answer["records"].get(job.name, {})
            answer["records"].setdefault(f"{job.name}_rest" if measured else job.name, {})["error"] = failure
        return answer

    return run


def _last_answer(output: str) -> dict[str, Any]:
    """Return the newest state that a part printed; libraries may have printed among it."""
    for line in reversed(output.splitlines()):
        if line.startswith('{"hardware"'):
            try:
                answer: dict[str, Any] = json.loads(line)
            except json.JSONDecodeError:  # cut off by the end of its process
                continue
            return answer
    return {"records": {}}


def _failure(code: int, errors: str) -> str:
    """Return why a process failed in one line, or ""; copy its whole stderr to this process's."""
    if code == 0:
        return ""
    sys.stderr.write(errors)
    if code < 0:
        return f"killed by signal {-code}"
    lines = [line for line in errors.splitlines() if line.strip()] or [f"exit code {code}"]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
    return (named or lines)[-1][:300]


def run_part(
    part: str, size: str, device: torch.device, videos: tuple[VideoSize, ...], options: argparse.Namespace
) -> int:
    """Measure one part in this process; after every figure, print all its figures so far as one line of JSON."""
    # Imported here: the waiting parent process needs no libraries, and the kernels' parts need no networks.
    from tools.device import kernels

    parts = kernels.PARTS
    if part not in parts:
        from tools.device.networks import PARTS as parts
    chosen = kernels.SIZES[size]
    setting = kernels.Setting(chosen, device, videos, options.rows, options.repeat)
    records: dict[str, Any] = {}
    for name, record in parts[part](setting):
        records[name] = record
        answer = {
            "hardware": device_api.name(device),
            "memory_gib": device_api.memory(device).get("total"),
            "sizes": {"rows": options.rows, **dataclasses.asdict(chosen)},
            "records": records,
        }
        print(json.dumps(answer), flush=True)
    return 0


def table(report: Report) -> str:
    lines = [
        f"{report['hardware']}, torch {report['torch']}, {report['dtype']}, {report['size']} size",
        f"{'':36s}{'seconds':>10s}{'TFLOP':>10s}{'TFLOP/s':>10s}{'of rate':>9s}{'peak GiB':>10s}{'planned':>9s}",
    ]
    for name, record in report["parts"].items():
        if "seconds" not in record:
            lines.append(f"{name:36s}{as_text(record)}")
            continue
        flops, share = record.get("flops"), record.get("share_of_matmul_rate")
        cells = (record["seconds"], flops and flops / 1e12, record.get("tflops"), share and 100 * share)
        row = "".join(f"{_cell(value):>{width}s}" for value, width in zip(cells, (10, 10, 10, 7), strict=True))
        doubt = "" if record.get("finite", True) and "error" not in record else f"  {as_text(record)}"
        lines.append(
            f"{name:36s}{row} %{_cell(record.get('peak_gib')):>10s}{_cell(record.get('planned_gib')):>9s}{doubt}"
        )
    for aim, found in report["aims"].items():
        measured = "" if found["measured"] is None else f" ({_cell(found['measured'])})"
        lines.append(f"{aim}: {found['verdict']}{measured}")
    return "\n".join(lines)


def row(report: Report) -> str:
    parts, (video, *_) = report["parts"], (report.get("videos") or [""])

    def seconds(name: str) -> str:
        record = parts.get(f"{name}_{video}", {})
        share = record.get("share_of_matmul_rate")
        return _cell(record.get("seconds")) + (f" ({100 * share:.0f} %)" if share else "")

    def peak(name: str) -> str:
        record = parts.get(f"{name}_{video}", {})
        return f"{_cell(record.get('peak_gib'))} / {_cell(record.get('planned_gib'))}"

    ratio = parts.get(f"forward_ratio_{video}", {}).get("max_abs_log")
    cells = [report["hardware"], report["torch"], video, _cell(parts.get("matmul", {}).get("tflops"))]
    cells += [seconds(name) for name in ("forward", "update", "update_keep_attention", "update_compiled", "decode")]
    cells += [peak(name) for name in ("forward", "update", "decode")]
    return f"| {' | '.join(map(str, cells))} | {'-' if ratio is None else f'{ratio:.1e}'} |"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def as_text(record: dict[str, Any]) -> str:
    for word in ("error", "unavailable"):
        if word in record:
            return f"{word}: {record[word]}"
    if "max_abs_log" in record:
        return f"first ratio off by {record['max_abs_log']:.2g}, at most {record['bound']:.2g}: {record['within']}"
    if "kernels" in record:
        longest = ", ".join(f"{name[:40]} {100 * share:.0f} %" for name, _, share in record["kernels"][:3])
        return f"device busy {100 * record['busy_share']:.0f} %: {longest}"
    return f"{record['seconds']:.4g} s" + ("" if record.get("finite", True) else ", result is not finite")


if __name__ == "__main__":
    sys.exit(main())

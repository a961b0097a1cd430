"""The device report as text: a table, and a row for docs/devices.md."""

from __future__ import annotations

from typing import Any

Report = dict[str, Any]
ROW_HEAD = """\
| device | torch | video | bf16 TFLOP/s | rollout step s | update s | attention kept | compiled | decode s | \
peak / planned GiB: rollout | update | decode | first ratio |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def table(report: Report) -> str:
    lines = [
        f"{report['hardware']}, torch {report['torch']}, {report['dtype']}, {report['size']} size",
        f"{'':36s}{'seconds':>10s}{'TFLOP':>10s}{'TFLOP/s':>10s}{'of rate':>9s}{'peak GiB':>10s}{'planned':>9s}",
    ]
    for name, record in report["parts"].items():
        if "seconds" not in record:
            lines.append(f"{name:36s}{said(record)}")
            continue
        flops, share = record.get("flops"), record.get("share_of_matmul_rate")
        cells = (record["seconds"], flops and flops / 1e12, record.get("tflops"), share and 100 * share)
        row = "".join(f"{_cell(value):>{width}s}" for value, width in zip(cells, (10, 10, 10, 7), strict=True))
        doubt = "" if record.get("finite", True) and "error" not in record else f"  {said(record)}"
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


def said(record: dict[str, Any]) -> str:
    for word in ("error", "unavailable"):
        if word in record:
            return f"{word}: {record[word]}"
    if "max_abs_log" in record:
        return f"first ratio off by {record['max_abs_log']:.2g}, at most {record['bound']:.2g}: {record['within']}"
    if "kernels" in record:
        longest = ", ".join(f"{name[:40]} {100 * share:.0f} %" for name, _, share in record["kernels"][:3])
        return f"device busy {100 * record['busy_share']:.0f} %: {longest}"
    return f"{record['seconds']:.4g} s" + ("" if record.get("finite", True) else ", result is not finite")

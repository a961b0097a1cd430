"""Check this project against a release of torch_npu, without an NPU: the wheel is read, never installed.

    python tools/dev/audit_npu.py                               # downloads the wheel that matches requirements.txt
    python tools/dev/audit_npu.py --wheel torch_npu-2.13.0-....whl --json audit.json

Checks that every torch_npu name used here exists and accepts the arguments it is called with; that every ATen operator
of a tiny training step has an NPU kernel or decomposes into such; and that no float64 or complex tensor is on the
device. docs/npu.md discusses how far that goes. Exit code: 0 all fits, 1 something does not, 2 the audit cannot run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script from anywhere

from flow_grpo.runtime import device as device_api
from tools.common import fail, make_parser
from tools.dev.audit import names, step
from tools.dev.audit.names import UnknownName
from tools.dev.audit.wheel import Wheel

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("flow_grpo", "config", "tools", "train_grpo.py")


def main(words: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--wheel", type=Path, help="local wheel; default: download it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all findings as JSON")
    parser.add_argument("--names-only", action="store_true", help="skip the training step, which takes a minute")
    known = parser.parse_args(words)
    try:
        with contextlib.ExitStack() as stack:
            wheel = Wheel(known.wheel or stack.enter_context(downloaded()))
            findings = audit(wheel, names_only=known.names_only)
            if known.json:
                rows = [dataclasses.asdict(finding) for finding in findings]
                known.json.write_text(json.dumps({"wheel": wheel.name, "findings": rows}, indent=1) + "\n")
    except (ValueError, OSError, RuntimeError) as error:  # the last from a step that its device refuses
        return fail(error)
    show(wheel.name, findings)
    return int(any(finding.status == "fail" for finding in findings))


def audit(wheel: Wheel, *, names_only: bool) -> list[UnknownName]:
    findings = names.check_names(wheel, names.uses([ROOT / source for source in SOURCES], ROOT))
    findings += names.check_environment(wheel, sorted(device_api.NPU_VARIABLES))
    if not names_only:
        registered, seen = wheel.operators, step.observe()
        findings += [step.check_operator(name, registered) for name in sorted(seen.operators)]
        findings += step.check_dtypes(seen.wide)
    return findings


@contextlib.contextmanager
def downloaded() -> Iterator[Path]:
    """Download the wheel that requirements-npu.txt pins to a temporary folder; ValueError if pip cannot."""
    file = ROOT / "requirements-npu.txt"
    pinned = re.search(r"^torch-npu==(\S+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    if pinned is None:
        raise ValueError(f"{file.name} pins no torch-npu; add a line torch-npu==VERSION")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run(
            [*command, "--dest", folder, f"torch-npu=={pinned[1]}"], capture_output=True, text=True, check=False
        )
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = done.stderr.strip().splitlines()[-1:] or ["no wheel came"]
            raise ValueError(f"pip cannot download torch-npu=={pinned[1]} ({reason[0]}); pass --wheel FILE")
        yield wheels[0]


def show(name: str, findings: Sequence[UnknownName]) -> None:
    print(f"{name}\n")
    for finding in findings:
        if (finding.check, finding.text) != ("operator", step.REGISTERED):
            print(f"{finding.status:4}  {finding.check:11}  {finding.subject}  {finding.text}")
    for check in dict.fromkeys(finding.check for finding in findings):
        counts = Counter(finding.status for finding in findings if finding.check == check)
        print(f"\n{check}: " + ", ".join(f"{counts[status]} {status}" for status in ("ok", "warn", "fail")), end="")
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())

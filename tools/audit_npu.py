"""Does this project fit a release of torch_npu? Found out without an NPU: the wheel is read, never installed.

    python tools/audit_npu.py                               # downloads the wheel that pairs with requirements.txt
    python tools/audit_npu.py --wheel torch_npu-2.13.0-....whl --json audit.json

Three questions: does every name of torch_npu that the sources use exist and take the arguments it is given; has every
ATen operator of a tiny training step a kernel for the NPU, or is it made of such; does nothing of 64-bit or complex
floating point live on the device. docs/npu.md says what the answers are worth. Exit code 0: all fits, 1: something does
not, 2: it cannot be audited.
"""

from __future__ import annotations

import argparse
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from flow_grpo.runtime import device as device_api
from tools.audit import names, step
from tools.audit.names import Finding
from tools.audit.wheel import Wheel

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("flow_grpo", "config", "tools", "train_grpo.py")


def main(words: Sequence[str] | None = None) -> int:
    """Audit, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="a wheel that is there already; else it is downloaded")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every finding there, too")
    parser.add_argument("--names-only", action="store_true", help="skip the training step, which takes a minute")
    known = parser.parse_args(words)
    try:
        with contextlib.ExitStack() as stack:
            wheel = Wheel(known.wheel or stack.enter_context(downloaded()))
            findings = audit(wheel, step=not known.names_only)
            if known.json:
                rows = [dataclasses.asdict(finding) for finding in findings]
                known.json.write_text(json.dumps({"wheel": wheel.name, "findings": rows}, indent=1) + "\n")
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr, flush=True)
        return 2
    show(wheel.name, findings)
    return int(any(finding.status == "fail" for finding in findings))


def audit(wheel: Wheel, *, step: bool) -> list[Finding]:
    """Return all findings; without `step` those about operators and number types are left out.

    Raises:
        ValueError: the wheel does not tell what is asked of it.
    """
    findings = names.check_names(wheel, project_uses())
    findings.append(names.check_backend(wheel))
    findings += names.check_environment(wheel, sorted(device_api.npu_environment()))
    if step:
        registered, seen = wheel.operators, step.observe()
        findings += step.check_operators(seen.operators, registered)
        findings += step.check_dtypes(seen.wide)
    return findings


def project_uses() -> list[names.Use]:
    """Return where this project's programs and library use torch_npu."""
    places = [ROOT / place for place in SOURCES]
    files = [file for place in places for file in ([place] if place.suffix else sorted(place.rglob("*.py")))]
    return names.uses(files, ROOT)


@contextlib.contextmanager
def downloaded() -> Iterator[Path]:
    """Download the wheel that pairs with the pinned torch into a folder that is removed afterwards.

    Raises:
        ValueError: pip finds none or reaches no index.
    """
    version = pinned((ROOT / "requirements-npu.txt").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run(
            [*command, "--dest", folder, f"torch-npu=={version}"], capture_output=True, text=True, check=False
        )
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = done.stderr.strip().splitlines()[-1:] or ["no wheel came"]
            raise ValueError(f"pip cannot download torch-npu=={version} ({reason[0]}); pass --wheel FILE")
        yield wheels[0]


def pinned(requirements: str) -> str:
    """Return the version of torch-npu that a requirements file asks for.

    Raises:
        ValueError: it pins none.
    """
    match = re.search(r"^torch-npu==(\S+)$", requirements, re.MULTILINE)
    if match is None:
        raise ValueError("requirements-npu.txt pins no torch-npu; add a line torch-npu==VERSION")
    return match[1]


def show(name: str, findings: Sequence[Finding]) -> None:
    """Print a table: every finding about names, of the operators those that are more than registered."""
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

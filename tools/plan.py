"""Estimate a recipe's memory and time on given devices, without loading a model.

    python tools/plan.py --config config/grpo.py:my_recam_8npu --devices 8 --memory 64GiB --tflops 300

--tflops is the device's sustained rate on this model, not the data sheet's; tools/device_report.py measures it.
Without a model folder, network and codec are those of Wan2.1-T2V-1.3B. flow_grpo/preflight/plan.py says what each line
counts; each knob that saves memory is listed with its GiB and seconds, and what does not fit ends with the fewest
knobs with which it does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from flow_grpo.preflight.checkpointing import settled
from flow_grpo.preflight.plan import make_plan
from flow_grpo.preflight.savings import report
from flow_grpo.settings.checks import check_world
from flow_grpo.settings.loading import ConfigError, load_config


def main(words: Sequence[str] | None = None) -> int:
    """Print the plan and return 0 if it fits, 1 if not, 2 for a setting that cannot work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE:RECIPE", help="its knobs may follow")
    parser.add_argument("--devices", type=int, default=8, help="ranks")
    parser.add_argument("--memory", default="64GiB", help="of one device, such as 64GiB")
    parser.add_argument(
        "--tflops", type=float, default=200.0, help="what a device sustains, in 1e12 operations a second"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    known, overrides = parser.parse_known_args(words)
    try:
        config = load_config(known.config, overrides)
        check_world(config, known.devices)
        limit, rate = parse_memory(known.memory), known.tflops * 1e12
        config, said = settled(config, known.devices, limit)
        if known.json:
            plan = make_plan(config, known.devices, rate)
            fits = plan.most_gib <= limit
            print(json.dumps(dataclasses.asdict(plan) | {"fits": fits}))
        else:
            print(f"counting the costs of {known.config}; nothing is allocated", flush=True)
            text, fits = report(config, known.devices, rate, limit)
            print(*([said] if said else []), text, sep="\n")
    except ConfigError as error:
        print("error:", error, file=sys.stderr)
        return 2
    return 0 if fits else 1


def parse_memory(text: str) -> float:
    """Return GiB of "64GiB", "64" or "65536MiB".

    Raises:
        ConfigError: another form.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|MiB)?", text)
    if match is None:
        raise ConfigError(f"--memory: got {text!r}, must be a number of GiB; for example --memory 64GiB")
    return float(match[1]) / (1024 if match[2] == "MiB" else 1)


if __name__ == "__main__":
    sys.exit(main())

r"""Export the trained weights of a checkpoint as an adapter folder, like the one a finished run writes.

    python tools/export_adapter.py --checkpoint outputs/first/checkpoints/checkpoint_000010 --out adapter_10

The folder is for `tools/generate.py`, plain diffusers and other users of adapters; the run may still be training. If
the run averages weights (EMA), the averages are exported. The model is that of the run, whose configuration is beside
its checkpoints; a knob can follow as --config.section.knob=value, such as a model.path that has moved. Exit code: 0,
or 2 for unusable arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from flow_grpo.run.at_once import answer_at_once
from tools.common import command, make_parser

PARSER = make_parser(__doc__)
PARSER.add_argument("--checkpoint", type=Path, required=True, help="folder of a checkpoint")
PARSER.add_argument("--out", type=Path, required=True, help="adapter folder to write; must not exist")
if __name__ == "__main__":
    answer_at_once(PARSER)  # now: what follows takes seconds to import

import torch

from flow_grpo.models.files.adapter_files import save_adapter
from flow_grpo.models.registry import build_policy
from flow_grpo.run.run_state import load_weights
from flow_grpo.run.starts import checkpoint_configuration
from flow_grpo.settings.schema import Config


@command
def main(words: Sequence[str] | None = None) -> int:
    args, overrides = PARSER.parse_known_args(words)
    if args.out.exists():
        raise ValueError(f"--out {args.out} exists, must be a new folder")
    config = checkpoint_configuration(args.checkpoint, overrides)
    print(f"exporting {args.checkpoint}", flush=True)
    export(config, args.checkpoint, args.out)
    print(f"{args.checkpoint} -> {args.out}", flush=True)
    return 0


def export(config: Config, checkpoint: Path, out: Path) -> None:
    """Write a checkpoint's weights as an adapter folder; ValueError for a missing model or an unusable checkpoint."""
    policy = build_policy(config, torch.device("cpu"))
    load_weights(checkpoint, policy, config.model.trained)
    save_adapter(policy, out)


if __name__ == "__main__":
    sys.exit(main())

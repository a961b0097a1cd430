"""Recipe in, trained adapter out: GRPO for a camera-controlled video-to-video model.

    torchrun --nproc_per_node=2 train_grpo.py --config config/grpo.py:tiny_recam --config.run_name=first

Any knob can follow as `--config.section.knob=value`; `--help` and docs/config.md list them.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence

if __name__ == "__main__":
    begun = time.perf_counter()  # before the imports, which take seconds
    gc.disable()  # until `launch`: walking what they make again and again took a fifth of them

import flow_grpo  # noqa: F401 - before torch, which otherwise loads any accelerator plug-in, unguarded
from flow_grpo.run.at_once import answer_at_once
from flow_grpo.settings.reference import command_line

if __name__ == "__main__":
    answer_at_once(command_line(__doc__))  # now: what follows takes seconds to import

from flow_grpo.preflight.doctor.examine import examine
from flow_grpo.preflight.dry_run import show_plan
from flow_grpo.run.assemble import assemble
from flow_grpo.run.command_line import read_command_line
from flow_grpo.run.starts import going_on, rewards_in_words
from flow_grpo.runtime.clock import Ledger
from flow_grpo.runtime.processes import launch
from flow_grpo.runtime.ranks.start_up import refuse, set_up_rank


def main(argv: Sequence[str] | None = None, begun: float | None = None) -> int:
    """Train and return the exit code: 0, or 2 when a setting, an input or a reward makes training impossible.

    Args:
        argv: words of the command line, by default the process's.
        begun: when the process began, by `time.perf_counter`; by default now.
    """
    ledger = Ledger(begun)
    try:
        config, spec = read_command_line(argv, __doc__)
        if os.environ.get("RANK", "0") == "0":
            print(rewards_in_words(spec, config), flush=True)
        if config.dry_run:
            show_plan(config, int(os.environ.get("WORLD_SIZE", "1")))
            return 0
        device, world = set_up_rank(config, watched=True)
    except ValueError as error:
        return refuse(error, None)
    with world.broadcast_failure():
        try:
            trainer = assemble(config, spec, device, world, ledger)
            examine(trainer)
            if world.all.heartbeat is not None:
                way_on = f"; go on with {going_on(trainer.run_folder)}, from the last checkpoint if any"
                world.all.heartbeat.way_on = way_on
        except ValueError as error:
            return refuse(error, world)
        return trainer.run()


if __name__ == "__main__":
    launch(main, begun)

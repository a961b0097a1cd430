"""Do the working tree's runs give the numbers of another commit's? Small runs, compared bit for bit.

    make same-numbers REF=HEAD
    python tools/dev/same_numbers.py --ref 0ac0199 --only tiny_recam,lora

Both sides run on this machine: the commit in a checkout of its own under `.work/same_numbers/`, whose results are kept
for the next call. Compared are metrics (times, rates and memory aside), the lines of the debug print, and every tensor
of the last checkpoint and of the adapter. One line a run. Exit code: 0 when all are equal, 1 when one is not.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script from anywhere

import flow_grpo  # noqa: F401, I001 - before torch, which otherwise loads any accelerator plug-in, unguarded

from safetensors.torch import load_file

from tools.common import launcher, make_parser

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / ".work" / "same_numbers"
MEASURED = re.compile(r"^(time/|system/|server/)|^dyn/time$|_s$")  # differs between two runs of one program
DEBUG_LINE = re.compile(r"样本|副本|prompt|latents|log_probs|cameras|group_size|DynSample", re.IGNORECASE)
LONGEST_S = 1200
FIRST = "first"  # folder of a run as it was before it was resumed


@dataclasses.dataclass(frozen=True)
class Case:
    """One run to compare."""

    name: str  # of its folder
    recipe: str  # of `config/grpo.py`
    ranks: int
    overrides: str  # words, each `section.knob=value`
    model: str = ""  # kind of a random model that the run loads, "" for the recipe's own
    resumed: str = ""  # changes with which the run is resumed once it has ended


RANDOM_MODEL = "--heads 2 --head-dim 16 --layers 2 --ffn 64 --text-dim 32 --dtype fp32 --codec small"
# A tiny model's whole life in seconds.
SMALL = (
    "sample.k=4 sample.train_batch_size=4 sample.num_batches_per_epoch=2 train.batch_size=4 train.copies=0 "
    "eval.num_conditions=4 eval.batch_size=4 eval.videos=0"
)
BARE_WORDS = (
    "max_minutes=0 log_videos_every=0 trackers= data.tiny_world=unit_test data.tune_scenes=0 eval.every=0 eval.gold= "
    f"{SMALL}"
)
BARE = dict(word.split("=") for word in BARE_WORDS.split())  # without trackers, videos and evaluations on the way
FORWARD = (
    "num_epochs=2 train.objective=forward train.step_weight=none sample.sde=ode sample.same_initial_noise=False "
    f"sample.share_prefix=False {SMALL}"
)
LORA = (
    "num_epochs=2 model.trained=lora model.lora_rank=4 model.lora_alpha=8 train.kl_coef=0.01 train.updates_per_epoch=2 "
    "train.batch_size=4 sample.guidance_scale=2.0 sample.num_batches_per_epoch=2 eval.num_conditions=16"
)
REDIRECTOR = (
    "num_epochs=2 data.height=32 data.width=32 data.reference=source model.kind=redirector "
    f"model.max_prompt_tokens=24 eval.signal_groups=0 {SMALL}"
)
SHARED_TOKENS = f"num_epochs=2 train.context_parallel=2 debug=True {SMALL}"
SHARDED = f"num_epochs=1 train.sharding=fsdp2 sample.share_prefix=False {SMALL}"
CASES = (
    Case("tiny_recam", "tiny_recam", 2, "num_epochs=3"),
    Case("debug", "my_recam_8npu_tiny", 8, "num_epochs=1 debug=True"),
    Case("dapo", "my_recam_8npu_dapo_tiny", 4, "num_epochs=2 debug=True"),
    Case("lora", "tiny_recam", 1, LORA),
    Case("forward", "tiny_recam", 1, FORWARD),
    Case("wan_t2v", "tiny_wan_t2v", 1, f"num_epochs=2 {SMALL}", model="wan_t2v"),
    Case("redirector", "tiny_recam", 1, REDIRECTOR, model="redirector"),
    Case("context_parallel", "my_recam_8npu_tiny", 2, SHARED_TOKENS),
    Case("resume", "tiny_recam", 2, SHARDED, resumed="num_epochs=3 resume=auto"),
)


def main(words: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--ref", default="HEAD", help="commit to compare with (default: HEAD)")
    parser.add_argument("--only", default="", help=f"some of {','.join(case.name for case in CASES)}")
    asked = parser.parse_args(words)
    names = asked.only.split(",") if asked.only else [case.name for case in CASES]
    unknown = set(names) - {case.name for case in CASES}
    if unknown:
        parser.error(f"--only: got {', '.join(sorted(unknown))}, known: {', '.join(case.name for case in CASES)}")
    reference = checked_out(asked.ref)
    equal = True
    for case in (case for case in CASES if case.name in names):
        there = run(case, reference, KEPT / "results" / reference.name, keep=True)
        here = run(case, ROOT, KEPT / "results" / "working_tree", keep=False)
        found = differences(there, here)
        if case.resumed:  # what the commit saved is resumed by the working tree, too
            begun = run(case, ROOT, KEPT / "results" / "begun_there", keep=False, begun=there)
            found += [f"resumed from {reference.name}: {text}" for text in differences(there, begun)]
        equal = equal and not found
        print(f"{case.name} ({case.recipe}, {case.ranks} ranks): {'; '.join(found) or 'equal'}", flush=True)
    return 0 if equal else 1


def checked_out(ref: str) -> Path:
    commit = _git("rev-parse", "--verify", f"{ref}^{{commit}}")
    folder = KEPT / "trees" / commit[:12]
    if not folder.is_dir():
        _git("worktree", "prune")
        _git("worktree", "add", "--detach", str(folder), commit)
    return folder


def run(case: Case, tree: Path, results: Path, *, keep: bool, begun: Path | None = None) -> Path:
    """Run a case with a tree's code, or with `keep` take the result that is there; return its folder in `results`.

    `begun` is a result of the same case, whose first part is resumed in place of one of this tree's own.
    """
    folder = results / case.name
    if keep and (folder / "output.txt").is_file():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = [f"config/grpo.py:{case.recipe}", f"--config.output_root={folder}", "--config.run_name=run"]
    size = tuple(word for word in case.overrides.split() if word.startswith(("data.height", "data.width")))
    words += [f"--config.data.root={results / '_'.join(('data', *size))}"]
    words += [] if case.model == "wan_t2v" else ["--config.data.tiny_world=tiny"]  # asked for beside another root
    words += ["--config.max_minutes=0.0", "--config.trackers=()"]
    words += [f"--config.{override}" for override in case.overrides.split()]
    if case.model:
        made = ["tools/random_model.py", "--kind", case.model, "--out", str(folder / "model"), *RANDOM_MODEL.split()]
        _call(case, tree, [sys.executable, *made])
        words.append(f"--config.model.path={folder / 'model'}")
    command = [*launcher(case.ranks), "train_grpo.py", "--config", *words]
    if begun is None:
        output = _call(case, tree, command)
    else:
        shutil.copytree(begun / FIRST, folder / "run")
        output = (begun / f"{FIRST}.txt").read_text(encoding="utf-8")
    if case.resumed:
        shutil.copytree(folder / "run", folder / FIRST)
        (folder / f"{FIRST}.txt").write_text(output, encoding="utf-8")
        output += _call(case, tree, [*command, *(f"--config.{change}" for change in case.resumed.split())])
    (folder / "output.txt").write_text(output, encoding="utf-8")
    return folder


def _call(case: Case, tree: Path, command: Sequence[str]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LONGEST_S)
    if done.returncode:
        raise SystemExit(f"{case.name} failed in {tree}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def differences(there: Path, here: Path) -> list[str]:
    """Return what differs between two runs of a case, in a few words each."""
    found = differing("metrics", metrics(there / "run"), metrics(here / "run"))
    found += differing("tensors", tensors(there / "run"), tensors(here / "run"))
    lines = []
    for folder in (there, here):
        text = (folder / "output.txt").read_text(encoding="utf-8").replace(str(folder), "")
        lines.append(Counter(line.strip() for line in text.splitlines() if DEBUG_LINE.search(line)))
    if lines[0] != lines[1]:
        other = [*(lines[0] - lines[1]), *(lines[1] - lines[0])]
        found.append(f"{len(other)} debug lines differ, such as {other[0]!r}")
    return found


def metrics(run_folder: Path) -> dict[str, float | None]:
    """Return every deterministic metric of a run (no times or memory), by name and row among those that have any."""
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [{name: value for name, value in row.items() if not MEASURED.search(name)} for row in rows]
    kept = [row for row in found if len(row) > 1]  # more than the step
    return {f"row {number}: {name}": value for number, row in enumerate(kept) for name, value in row.items()}


def tensors(run_folder: Path) -> dict[str, tuple[object, ...]]:
    """Return dtype, shape and bytes of every tensor of a run's newest checkpoint and adapter, by file and name."""
    newest = max((run_folder / "checkpoints").glob("checkpoint_*"))
    files = sorted([*newest.rglob("*.safetensors"), *(run_folder / "adapter").rglob("*.safetensors")])
    return {
        f"{file.parent.name}/{file.name}: {name}": (tensor.dtype, tensor.shape, tensor.numpy().tobytes())
        for file in files
        for name, tensor in load_file(file).items()
    }


def differing(what: str, there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Return in a few words which values of two runs differ, and which only one of them has."""
    names = [name for name in there if name in here and there[name] != here[name]]
    missing = sorted(set(there) ^ set(here))
    found = [f"{len(names)} of {len(there)} {what} differ, first {names[0]}"] if names else []
    return found + ([f"{len(missing)} {what} on one side only, such as {missing[0]}"] if missing else [])


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

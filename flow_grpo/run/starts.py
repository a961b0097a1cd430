"""Where and with which configuration a run starts, and goes on: every start is on record in the run's folder.

    outputs/first/config.json       the configuration of the latest start that began to train, or of the first one
    outputs/first/starts/001.json   every start: command line, recipe, configuration, checkpoint, commit, versions

A resumed run goes on with `config.json`, not with the recipe as it is now, and with the overrides on its command line.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from flow_grpo.runtime.atomic_file import write_atomically
from flow_grpo.runtime.checkpoints.resume import SUMMARY
from flow_grpo.runtime.json_files import read_json_object
from flow_grpo.settings import loading
from flow_grpo.settings.checks import check
from flow_grpo.settings.errors import ConfigError
from flow_grpo.settings.schema import KNOBS, Config

CONFIG, STARTS, CHECKPOINTS = "config.json", "starts", "checkpoints"
LEAST_ROWS = 96  # of videos that tools/evaluate.py can measure
ROOT = Path(__file__).resolve().parents[2]


def check_places(config: Config, run_folder: Path) -> None:
    """Refuse output folders that cannot be created or written to, before anything is loaded."""
    places = [("output_root", Path(config.output_root)), ("run_name", run_folder)]
    places += [("model.encodings", Path(config.model.encodings))] if config.model.encodings else []
    for knob, folder in places:
        existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        if not existing.is_dir():
            raise ValueError(f"config.{knob}: {existing} is a file, must be a folder; pass another --config.{knob}")
        if not os.access(existing, os.W_OK):
            raise ValueError(f"config.{knob}: {existing} cannot be written to; pass another --config.{knob}")


def configuration(spec: str, overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """Return the configuration of a start, and lines that say what it takes from where.

    A start that resumes takes the configuration of the checkpoint's run, with the overrides on top; only a new run that
    begins from another run's checkpoint may name another recipe, and then takes that recipe's.

    `spec`, overrides and errors are those of `load_config`.
    """
    config = loading.unchecked(spec, overrides)  # beside what a run keeps, these alone need not be valid
    own = Path(config.output_root) / config.run_name
    run = _resumed_run(config, own)
    if run is None or not (run / CONFIG).is_file():
        check(config)
        if run is not None and os.path.isdir(config.resume):
            return config, [f"{run} holds no {CONFIG}: the configuration is that of {spec}"]
        fresh = config.resume == "auto" and not (own / SUMMARY).exists()  # a complete run is refused later
        return config, [f"nothing to resume in {own}: starts afresh"] if fresh else []
    known = loading.knob_values(read_json_object(run / CONFIG, "restore it, or start afresh under another run_name"))
    recipe = str((_latest(run) or {}).get("recipe", ""))
    if recipe and Path(recipe).name != Path(spec).name:  # "FILE:RECIPE" without folders
        if run.resolve() == own.resolve():
            raise ConfigError(
                f"--config: got {spec}, must be {recipe}, from which the run {run} was started; pass that, and what is "
                "to change as --config.KNOB=VALUE, or another --config.run_name"
            )
        check(config)
        now = loading.knob_values(loading.to_dict(config))
        lines = _changes(known, now, f"differs from {run}, which was started from {recipe}")
        return config, [f"new run from a checkpoint of {run}, with the configuration of {spec}", *lines]
    kept = {path: value for path, value in known.items() if path in KNOBS and path not in loading.OF_EACH_START}
    config = loading.load_config(spec, overrides, kept)
    now, in_recipe = (loading.knob_values(loading.to_dict(each)) for each in (config, _recipe_alone(spec, config)))
    lines = [f"goes on with the configuration of {run}, started from {recipe or spec}"]
    of_then = {path: value for path, value in now.items() if path in known}
    new = {path: value for path, value in now.items() if path not in known}
    lines += _changes(known, of_then, "changed on the command line")
    lines += _changes(known, new, "no knob when the run was started, now as the recipe or the command line says")
    untouched = {path: value for path, value in now.items() if known.get(path) == value}
    lines += _changes(in_recipe, untouched, "kept from the run, where the recipe says otherwise now (recipe -> run)")
    lines += [f"  {path} is no knob any more: left out" for path in sorted(known.keys() - set(KNOBS))]
    return config, lines


def rewards_in_words(spec: str, config: Config) -> str:
    """Return one line: the rewards of a run with their weights, and which of them are not as the recipe has them."""
    recipe, parts = _recipe_alone(spec, config).reward.weights, []
    for name, weight in config.reward.weights.items():
        before = recipe.get(name)
        note = " (not in the recipe)" if before is None else "" if before == weight else f" (recipe: {before:g})"
        parts.append(f"{name} {weight:g}{note}")
    joined = recipe.keys() < config.reward.weights.keys()  # a whole table takes the recipe's place
    way_out = "; the recipe's stay: a weight of 0 takes one out of training" if joined else ""
    return f"rewards and their weights: {', '.join(parts)}{way_out}"


def record(run_folder: Path, config: Config, spec: str, checkpoint: Path | None, **facts: Any) -> list[str]:
    """Write the record of a start; for one process only.

    `spec` is "FILE:RECIPE". `facts` are `epoch`, the number of finished ones, `ranks`, `device`, that of rank 0 in
    words, `served`, reward -> model and version of its server, and `identity`, that of the state's checkpoints; how
    many nodes there are stands in the environment. Returned is a line for each reward that another model or version
    computed as the run began.
    """
    folder = run_folder / STARTS
    folder.mkdir(parents=True, exist_ok=True)
    ranks, nodes = facts["ranks"], "--standalone"
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if on_node < ranks:
        nodes = f"--nnodes={ranks // on_node} --node_rank=R --master_addr=HOST --master_port=29500"
    launcher = f"torchrun {nodes} --nproc_per_node={on_node}" if ranks > 1 else "python"
    start = {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(sys.argv),
        "recipe": spec,
        "go_on": f"{launcher} train_grpo.py --config {shlex.quote(spec)} {going_on(run_folder)}",
        "checkpoint": str(checkpoint or ""),
        **facts,
        "commit": commit(),
        "python": sys.version.split()[0],
        "versions": {facts["Name"]: facts["Version"] for facts in (found.metadata for found in distributions())},
        "config": loading.to_dict(config),
    }
    before: dict[str, str] = {}
    files = _start_files(run_folder)
    for file in files:
        before = _read(file).get("served", {}) | before
    number = int(files[-1].stem) + 1 if files else 1  # not their count: a damaged one may have been removed
    write_atomically(folder / f"{number:03d}.json", json.dumps(start, indent=1))
    return [
        f"warning: reward {name} is now computed by {now}, as the run began by {before[name]}: its values may differ"
        for name, now in facts["served"].items()
        if before.get(name, now) != now
    ]


def begin(run_folder: Path) -> None:
    """Make the latest start's configuration the run's: the next resume goes on with it. For one process only."""
    start = _latest(run_folder)
    if start is not None:
        write_atomically(run_folder / CONFIG, json.dumps(start["config"], indent=1))


def end(run_folder: Path, why: str) -> None:
    """Write into the record of the latest start why it ended, if there is one. For one process only."""
    if files := _start_files(run_folder):
        write_atomically(files[-1], json.dumps(_read(files[-1]) | {"ended_by": why}, indent=1))


def configuration_of(run_folder: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration that a run trained with last, with `overrides` as in `load_config` on top."""
    if not (run_folder / CONFIG).is_file():
        raise ValueError(f"{run_folder} has no {CONFIG}, must be the folder of a run, such as outputs/first")
    return loading.from_dict(read_json_object(run_folder / CONFIG, "restore it"), overrides)


def checkpoint_configuration(checkpoint: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of the run whose folder a checkpoint is in, as `configuration_of`."""
    if not checkpoint.is_dir():
        raise ValueError(f"--checkpoint {checkpoint} is no folder, must be one of outputs/NAME/{CHECKPOINTS}")
    return configuration_of(_run_of(str(checkpoint), checkpoint.parent.parent), overrides)


def other_parts(run_folder: Path, identity: Mapping[str, str]) -> str:
    """Return the warning that parts of a model are not those that a run was trained with; "" where they are."""
    trained = (_latest(run_folder) or {}).get("identity", {})
    others = [part for part, known in identity.items() if trained.get(part, known) != known]
    text = f"warning: not the {', '.join(others)} that {run_folder} was trained with: the results are not the run's"
    return text if others else ""


def next_commands(run_folder: Path, *, finished: int = 0, makes_videos: bool = True) -> list[str]:
    """Return lines with the commands that use, measure and continue a run; [] without a record of its start.

    `makes_videos` says whether tools/generate.py can make videos with its model, `finished` how many epochs it has,
    those of a run before included.
    """
    start = _latest(run_folder)
    if start is None:
        return []
    config, again = loading.from_dict(start["config"]), start["go_on"]
    further = f"{again} --config.max_minutes=0" if config.max_minutes else again
    if finished >= config.num_epochs:  # else the minutes ended it
        further += f" --config.num_epochs={2 * max(1, finished)}"
    place, evaluation = (shlex.quote(str(path)) for path in (run_folder, run_folder / "evaluation"))
    use = f"python tools/generate.py --run {place}"
    lines = []
    if makes_videos and config.data.prompts:
        lines = [f"  make a video:         {use} --prompts 'WHAT IT SHOWS'"]
    elif makes_videos:
        # The tiny world's cameras move less.
        camera = "arc_left:0.5" if config.data.tiny_world else "arc_left"
        lines = [f"  film your own video:  {use} --source VIDEO --camera {camera}"]
        # Structure from motion locates no frame in videos as small as the tiny world's; eval.gold does.
        by_motion = f"python tools/evaluate.py --run {place} --out {evaluation}"
        measured = by_motion if config.data.height >= LEAST_ROWS else again
        lines.append(f"  measure it again:     {measured}")
    lines += [f"  see what it did:      python tools/report.py {place}"]
    return [*lines, f"  train further:        {further}"]


def going_on(run_folder: Path) -> str:
    """Return the knobs with which a training command goes on with a run, quoted for a shell."""
    knobs = ["--config.resume=auto", f"--config.run_name={run_folder.name}"]
    elsewhere = str(run_folder.parent) != Config.output_root
    return shlex.join([*knobs, *([f"--config.output_root={run_folder.parent}"] if elsewhere else [])])


def commit() -> str:
    """Return the commit of the code, with `+` where files differ from it; "" outside of a git repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _resumed_run(config: Config, own: Path) -> Path | None:
    """Return the folder of the run that a start resumes from; None for a fresh start."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if config.resume not in ("", "auto"):
        return _run_of(config.resume, own)
    if config.run_name and (config.resume or restarted) and any((own / CHECKPOINTS).glob("checkpoint_*")):
        return own
    return None


def _run_of(checkpoint: str, own: Path) -> Path:
    """Return the folder of the run that a checkpoint belongs to, whose folder of checkpoints may be a link."""
    real, named = Path(os.path.realpath(checkpoint)), Path(os.path.abspath(checkpoint))  # Path.resolve raises at a loop
    if str(real.parent) == os.path.realpath(own / CHECKPOINTS):
        return own
    run = named.parent.parent
    # A link to the folder, not to a checkpoint of another run inside it.
    linked = named.parent.name == CHECKPOINTS and os.path.realpath(named.parent) == str(real.parent)
    return run if linked and (run / CONFIG).is_file() else real.parent.parent


def _start_files(run_folder: Path) -> list[Path]:
    files = (file for file in (run_folder / STARTS).glob("*.json") if file.stem.isdecimal())
    return sorted(files, key=lambda file: int(file.stem))


def _recipe_alone(spec: str, config: Config) -> Config:
    """Return the configuration of a recipe without overrides; `config` where a knob needs them."""
    try:
        return loading.unchecked(spec)
    except ConfigError:
        return config


def _latest(run_folder: Path) -> dict[str, Any] | None:
    files = _start_files(run_folder)
    return _read(files[-1]) if files else None


def _read(file: Path) -> dict[str, Any]:
    """Return the record of a start; `identity` and `served` may be missing."""
    found = read_json_object(file, "remove it")
    known = isinstance(found.get("config"), dict) and isinstance(found.get("go_on"), str)
    if not known or not all(isinstance(found.get(key, {}), dict) for key in ("identity", "served")):
        raise ValueError(f"{file} is no record of a start: config, go_on, identity or served is missing; remove it")
    return found


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], title: str) -> list[str]:
    """Return the title and a line "knob: before -> after" for every knob that differs; [] where none does."""
    found = sorted(loading.differences(loading.as_written(before), loading.as_written(after)).items())
    lines = [f"  {knob}: {was or 'not known'} -> {now}" for knob, (was, now) in found if now is not None]
    return [f"{title}:", *lines] if lines else []

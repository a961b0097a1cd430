"""Every command in the documents is one that its program takes, and those of a tour run on the tiny models."""

import argparse
import contextlib
import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest

from flow_grpo.rewards.base import check_name
from flow_grpo.settings.checks import check_world
from flow_grpo.settings.loading import load_config
from tests.scripted_server import serving
from tools import reward_server

ROOT = Path(__file__).resolve().parents[1]
PAGES = [file.relative_to(ROOT).as_posix() for place in (ROOT, ROOT / "docs") for file in sorted(place.glob("*.md"))]
PAGES.remove("CHANGELOG.md")  # of the versions that were
PROGRAM = (
    r"(?:\w+=\S+ )*(?:python3?|torchrun|train_grpo\.py|pytest|make|pip|sh|curl|vipe|hf|docker|apt-get|"
    r"wandb(?= sync| leet| login)) "
)
# Commands that no test can start, and why; of any other program a command fails the test.
NOT_STARTED = {
    r"pip (install|download)|hf download |(wandb|docker|apt-get) ": "asks another machine",
    r"make ": "make -n alone, and what its ARGS say: it installs, tests or trains for minutes",
    r"pytest ": "a part of this suite",
    r"source |tee |sh first\.sh": "a shell's own business",
    r"vipe |python scripts/evaluation/": "a program of others",
    r"curl http://127\.0\.0\.1": "asks the server of another terminal, as tests/tools/test_reward_server.py does",
    r"sh \w+/generate\.sh": "a file that the command above it writes, of calls of tools/generate.py",
    r"(python|torchrun --nproc_per_node=2) FILE": "a program that the page prints, as tests/test_library.py runs it",
    r"python -m flow_grpo\.": "make docs does it",
    r"python tools/dev/bench\.py transformer|python -c ": "what a figure was once measured with",
}
# Pages of which all Python commands run, in one process each, but for those that need what nobody has here.
TOUR = ("tutorial", "objectives", "own_data_tiny", "other_models", "report", "trackers")
LACKING = r"convert_|model\.path|outputs/t2v|--weights|holiday|--project|--config\.seed"
NAMES = {"outputs/RUN": "outputs/first", "outputs/second": "outputs/weights"}
# What makes a training command a matter of seconds, where it does not say otherwise itself.
SMALL = (
    "num_epochs=1 device=cpu device_tflops=1 doctor=off trackers= log_videos_every=0 data.tune_scenes=0 "
    "sample.k=2 sample.train_batch_size=2 sample.num_batches_per_epoch=1 sample.tail_steps=0 "
    "eval.num_conditions=2 eval.num_steps=2 eval.videos=0 eval.gold= eval.fixed_conditions=0 eval.signal_groups=0"
)
# Writes what bash would start, word by word. It finds no program, since it has no PATH.
RECORDER = r"""
exec 3>&1
command_not_found_handle() { printf -v record '%s\x1f' "${WORLD_SIZE-1}" "$@"; printf '%s\x1e' "$record" >&3; }
source() { command_not_found_handle source "$@"; }
"""


@pytest.fixture(scope="module")
def folder(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Work in a folder like the project's, with data of one's own and the files that pages tell to write."""
    place = tmp_path_factory.mktemp("project")
    for name in ("config", "assets", "tools", "train_grpo.py"):
        (place / name).symlink_to(ROOT / name)
    for name in ("data", "docs"):  # a command may write into docs/
        (place / name).mkdir()
    (place / "data" / "tiny_world").symlink_to(world)
    shutil.copytree(world, place / "DATA", ignore=shutil.ignore_patterns("world.json", "room.json", "presets.json"))
    for page in PAGES:
        for name, code in re.findall(r"^# (my_\w+\.py)\n(.*?)^```", read(page), re.MULTILINE | re.DOTALL):
            (place / name).write_text(code, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        yield place


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def commands(page: str, place: Path) -> list[list[str]]:
    """Return WORLD_SIZE and the words of each command of a page, in bash blocks or in a line of text."""
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", read(page), re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^ *```.*?^ *```", "", read(page), flags=re.MULTILINE | re.DOTALL)
    blocks += [found.replace("\n", " ") for found in re.findall(rf"`({PROGRAM}[^`]+)`", prose)]
    script = [shutil.which("bash") or "bash", "-c", RECORDER + "\n".join(blocks)]
    done = subprocess.run(script, cwd=place, env={"PATH": "/none"}, capture_output=True, text=True, timeout=60)
    assert not done.stderr, done.stderr
    return [found.replace(":RECIPE", ":tiny_recam").split("\x1f")[:-1] for found in done.stdout.split("\x1e")[:-1]]


def started(words: Sequence[str]) -> object:
    """Start a Python program with its words, in this process, and return its exit code."""
    place = next(number for number, word in enumerate(words) if word.endswith(".py"))
    module = importlib.import_module(words[place].removesuffix(".py").replace("/", "."))
    with mock.patch.object(sys, "argv", list(words[place:])):
        return module.main()


class ReadError(BaseException):  # passes every `except Exception` of main()
    pass


def check(ranks: int, words: Sequence[str]) -> None:
    """Let a Python program read its words, and check the recipe that they name; it goes no further."""
    read_words = argparse.ArgumentParser.parse_known_args

    def stop(parser: argparse.ArgumentParser, given: Sequence[str] | None = None, *_: object) -> None:
        with mock.patch.object(argparse.ArgumentParser, "parse_known_args", read_words):
            raise ReadError(*parser.parse_known_args(given))

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop), pytest.raises(ReadError) as reached:
        started(words)
    known, overrides = reached.value.args
    recipe = getattr(known, "config", None) or (getattr(known, "run", None) and "config/grpo.py:tiny_recam")
    assert not overrides or recipe, f"not understood: {overrides}"
    if recipe:
        config = load_config(recipe, overrides)
        if {"train_grpo.py", "tools/doctor.py"} & set(words):
            options = dict(word[2:].split("=") for word in words if re.match("--n(nodes|proc_per_node)=", word))
            check_world(config, ranks * int(options.get("nnodes", 1)) * int(options.get("nproc_per_node", 1)))
        for name in config.reward.weights:
            check_name(name, config.reward.remote)


@pytest.mark.parametrize("page", PAGES)
def test_a_program_takes_every_command_of_a_page(page: str, folder: Path):
    hidden = re.sub(r"^ *```bash\n.*?^ *```", "", read(page), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(rf"^(?: *```\w*\n|\s+)?{PROGRAM}.*", hidden, re.MULTILINE), "stands outside of bash blocks"
    refused = {}
    for ranks, *words in commands(page, folder):
        text = " ".join(words)
        try:
            if words[0] == "make":
                subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
                given = dict(word.split("=", 1) for word in words[2:])
                recipe = given.get("RECIPE", "config/grpo.py:tiny_recam")
                words = ["train_grpo.py", "--config", recipe, *given.get("ARGS", "").split()]
                ranks = "2"
            elif any(re.match(pattern, text) for pattern in NOT_STARTED):
                continue
            check(int(ranks), words)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - all refusals of a page at once
            if getattr(error, "code", 1):  # 0 after --help
                refused[text] = f"{type(error).__name__}: {error}"
    assert not refused, "\n".join(f"{command}\n    {why}" for command, why in refused.items())


def test_the_commands_of_a_tour_end_well_and_say_what_an_epoch_holds(folder, capfd, without_curves):
    failed, printed, judge = {}, "", ""
    with contextlib.ExitStack() as servers:
        for _, *given in [found for page in TOUR for found in commands(f"docs/{page}.md", folder)]:
            words = [NAMES.get(word, word) for word in given]
            text = " ".join(words)
            if re.search(LACKING, text) or any(re.match(pattern, text) for pattern in NOT_STARTED):
                continue
            if "tools/reward_server.py" in words:
                asked = reward_server.parse([*words[2:], "--port=0"])
                judge = servers.enter_context(serving(reward_server.build(asked))).url
                continue
            if "train_grpo.py" in words:
                small = SMALL + " data.tiny_world=unit_test" * ("tiny_recam" in text)
                small += f" reward.remote.judge={judge}" * ("remote:judge" in text)
                words += [f"--config.{knob}" for knob in small.split() if f"{knob.partition('=')[0]}=" not in text]
            try:
                code = started(words)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - all failures at once
                code = f"{type(error).__name__}: {error}"
            out, err = capfd.readouterr()
            printed += out
            failed |= {text: f"{code} {err[-500:]}"} if code else {}
    assert not failed, "\n".join(f"{command}\n    {why}" for command, why in failed.items())
    assert "an epoch on 1 rank(s): 2 samples, 1 conditions x 2 copies, in 1 update(s)" in printed


def test_two_processes_make_up_for_eight_as_the_readme_says():
    (batches,) = re.findall(r"8 processes, or 2 with `(--config\S+=\d+)`", read("README.md"))
    eight, two = (load_config("config/grpo.py:my_recam_8npu_tiny", knobs) for knobs in ([], [batches]))
    assert 8 * eight.sample.expanded_batch_size == 2 * two.sample.expanded_batch_size == 32


@pytest.mark.slow
def test_the_numbers_of_your_videos_are_the_planner_s(folder, capfd):
    page = "docs/your_videos.md"
    ((_, *command),) = [found for found in commands(page, folder) if "tools/plan.py" in found]
    for size, words in (("33x240", command), ("81x480", [word for word in command if "config.data" not in word])):
        started([*words, "--json"])
        plan = json.loads(capfd.readouterr().out)
        peak = max(plan[f"{part}_gib"] for part in ("update", "rollout", "decode"))
        seconds = f"{plan['epoch_s']:.3g}, of which the rewards {plan['reward_s']:.0f}"
        figures = f" {seconds} | {plan['run_hours']:.0f} hours | {plan['forward_tflop']:.3g} TFLOP |"
        assert re.search(rf"^\| {size}.*\| {peak:.1f} GiB; .*{re.escape(figures)}$", read(page), re.MULTILINE), figures


@pytest.mark.parametrize("driver", [True, False])
def test_setup_takes_torch_s_cpu_build_where_no_driver_is(driver: bool, tmp_path: Path):
    if driver:
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    make = [shutil.which("make") or "make", "-n", "-B", "setup"]
    said = subprocess.run(
        make, cwd=ROOT, env={"PATH": str(tmp_path)}, check=True, capture_output=True, text=True
    ).stdout
    (torch,) = [line for line in said.splitlines() if "^torch==" in line]
    assert ("--extra-index-url https://download.pytorch.org/whl/cpu" in torch) != driver

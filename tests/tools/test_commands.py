"""Every command can be imported, shows how it is called, and runs from any directory."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(
    file.relative_to(ROOT / "tools").with_suffix("").as_posix()
    for place in ("*.py", "dev/*.py")
    for file in (ROOT / "tools").glob(place)
    if "__main__" in file.read_text(encoding="utf-8")
)
FOR_USERS = [
    *("benchmark", "check_dataset", "check_sources", "convert_poses", "convert_recammaster", "convert_redirector"),
    *("device_report", "doctor", "estimate_depth", "evaluate"),
    *("export_adapter", "finetune_recam", "generate", "learning_study", "make_dashboard", "make_tiny_world"),
    *("measure_signal", "plan", "precompute", "prepare_clips", "random_model", "report", "reward_server", "watch"),
]
WITH_KNOBS = ["check_sources", "doctor", "evaluate", "finetune_recam", "measure_signal", "plan", "precompute", "report"]


def test_what_users_never_need_is_out_of_their_sight():
    assert [name for name in COMMANDS if not name.startswith("dev/")] == FOR_USERS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_an_example_in_its_help(name):
    module = importlib.import_module(f"tools.{name.replace('/', '.')}")
    assert f"python tools/{name}.py" in (module.__doc__ or "") or f" tools/{name}.py " in (module.__doc__ or "")


def without_torch(folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    run = "import runpy, sys; sys.modules['torch'] = None; del sys.argv[0]; runpy.run_path(sys.argv[0], {}, '__main__')"
    bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", run, f"{ROOT}/tools/{name}.py", *words]
    return subprocess.run(command, cwd=folder, env=bare, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", FOR_USERS)
def test_a_command_shows_its_help_from_any_directory_before_it_imports_torch(tmp_path, name):
    done = without_torch(tmp_path, name, "--help")
    assert done.returncode == 0 and "usage: " in done.stdout and f"tools/{name}.py" in done.stdout


@pytest.mark.parametrize("name", WITH_KNOBS)
def test_a_command_refuses_a_misspelt_knob_before_it_imports_torch(tmp_path, name):
    done = without_torch(tmp_path, name, f"--config={ROOT}/config/grpo.py:tiny_recam", "--config.sample.kk", "--out=x")
    assert done.returncode == 2 and "no such knob" in done.stderr


@pytest.mark.parametrize(
    ("name", "word", "meant"), [("watch", "--evry=3", "--every"), ("generate", "--cameras", "--camera")]
)
def test_a_command_names_the_option_that_a_misspelt_one_is_most_like(tmp_path, name, word, meant):
    done = without_torch(tmp_path, name, "run" if name == "watch" else "--model=x", word)
    assert done.returncode == 2 and f"(did you mean {meant}?)" in done.stderr

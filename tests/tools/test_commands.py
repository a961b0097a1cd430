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
    *("benchmark", "check_dataset", "check_sources", "convert_recammaster", "convert_redirector", "device_report"),
    *("doctor", "evaluate"),
    *("export_adapter", "finetune_recam", "generate", "learning_study", "make_dashboard", "make_tiny_world"),
    *("measure_signal", "plan", "precompute", "random_model", "report", "reward_server", "watch"),
]
PROGRAM_OF_ANOTHER = "dev/soak_rank"  # torchrun starts it for tools/dev/soak.py


def test_what_users_never_need_is_out_of_their_sight():
    assert [name for name in COMMANDS if not name.startswith("dev/")] == FOR_USERS


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != PROGRAM_OF_ANOTHER])
def test_a_command_has_an_example_in_its_help(name):
    module = importlib.import_module(f"tools.{name.replace('/', '.')}")
    assert f"python tools/{name}.py" in (module.__doc__ or "") or f" tools/{name}.py " in (module.__doc__ or "")


@pytest.mark.parametrize("name", ["export_adapter", "dev/soak", "generate"])  # without and with processes of their own
def test_a_command_runs_from_any_directory(tmp_path, name):
    bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True, check=True)
    assert f"tools/{name}.py" in done.stdout

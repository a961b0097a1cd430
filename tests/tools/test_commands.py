"""Every command can be imported, shows how it is called, and runs from any directory."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(file.stem for file in (ROOT / "tools").glob("*.py") if file.stem != "common")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_an_example_in_its_help(name):
    assert f"tools/{name}.py " in (importlib.import_module(f"tools.{name}").__doc__ or "")


@pytest.mark.parametrize("name", ["run_table", "soak"])  # one without and one with processes of its own
def test_a_command_runs_from_any_directory(tmp_path, name):
    bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True, check=True)
    assert f"tools/{name}.py" in done.stdout

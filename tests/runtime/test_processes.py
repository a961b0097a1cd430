"""Workers import what their work needs, and exit with their parent."""

import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from flow_grpo.rewards.process_pool import CallPool
from flow_grpo.runtime.processes import launch
from tests.limits import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import wave
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from flow_grpo.runtime.processes import start_program
if __name__ == "__main__":
    for lean in (False, True):
        if lean:
            start_program()
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            print(pool.submit(eval, "'wave' in __import__('sys').modules").result())
"""


def test_a_spawned_process_does_not_import_the_program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_training_spawns_without_its_program(monkeypatch):
    program = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", program)
    with pytest.raises(SystemExit):
        launch(lambda begun: 0)
    assert program.__spec__.name == "__main__"


ENDING = """
import atexit, gc, runpy, sys
atexit.register(lambda: print(gc.isenabled(), gc.get_freeze_count() > 500_000, gc.get_stats()[2]["collections"]))
# Refused by a rule between knobs, after the imports.
sys.argv = ["train_grpo.py", "--config", "config/grpo.py:tiny_recam", "--config.sample.sde=ode"]
runpy.run_path("train_grpo.py", run_name="__main__")
"""


def test_garbage_collection_walks_no_imports():
    command = [sys.executable, "-c", ENDING]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT_S, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout.split() == ["True", "True", "0"]


def test_what_reads_data_and_scores_needs_no_model_library():
    code = (
        "import flow_grpo.data.multicam, flow_grpo.rewards.camera.pose, tools.finetuning.items\n"
        "import sys\n"
        "print(*{'diffusers', 'transformers', 'peft', 'accelerate', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert not done.stdout.split()


START = """
import os, sys
import train_grpo
from flow_grpo.run.trainer import Trainer

def report(trainer):
    print("at the first rollout:", *{unwanted} & set(sys.modules), flush=True)
    os._exit(0)

Trainer.train = report
sys.exit(train_grpo.main())
"""


def test_what_plots_reports_or_serves_other_recipes_is_not_loaded_before_the_first_rollout(tmp_path):
    reports = {"matplotlib", "tensorboard", "torch.utils.tensorboard", "wandb", "swanlab", "trackio"}
    others = {"cv2", "pycolmap", "ftfy"}
    program = tmp_path / "start.py"
    program.write_text(START.format(unwanted=reports | others))
    knobs = {
        "device": "cpu",
        "doctor": "off",  # which plots the steps that it found sound
        "trackers": "",
        "data.root": tmp_path / "world",
        "data.tiny_world": "unit_test",
        "data.tune_scenes": 0,
        "eval.num_conditions": 4,
        "output_root": tmp_path,
    }
    command = [sys.executable, str(program), "--config", f"{ROOT}/config/grpo.py:tiny_recam"]
    command += [f"--config.{name}={value}" for name, value in knobs.items()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines()[-1] == "at the first rollout:"


def wait_until_gone(*processes: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while left := [pid for pid in processes if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.05)


HELPERS = """
import os, sys
from flow_grpo.rewards.process_pool import CallPool
if __name__ == "__main__":
    found = CallPool(2).run(os.getpgid, [(0,)] * 4, seconds=600, what="groups")
    print(*sorted({outcome.value for outcome in found}), flush=True)
    sys.stdin.read()
"""


def test_workers_leave_the_process_group_and_exit_when_their_parent_is_killed(tmp_path):
    (tmp_path / "helpers.py").write_text(HELPERS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    command, pipe = [sys.executable, str(tmp_path / "helpers.py")], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as parent:
        helpers = [int(word) for word in parent.stdout.readline().split()]
        assert helpers and os.getpgid(parent.pid) not in helpers
        parent.kill()
    wait_until_gone(*helpers)


def test_a_closed_pool_leaves_no_process():
    pool = CallPool(1)
    (found,) = pool.run(os.getpid, [()], seconds=LIMIT_S, what="process")
    pool.close()
    wait_until_gone(found.value)

"""`tools/dev/house.py`: what is counted in a small checkout."""

from pathlib import Path

from flow_grpo.runtime.atomic_file import write_atomically
from tools.dev.house import count

MODEL = '''
def velocity(): return one()
def one():
    """Small, with one caller."""
    return 1
def twice(): return twice()
def passed_on(): return twice() + twice() + sorted([], key=passed_on)
'''
TRAIN = """
import threading
from flow_grpo.models.model import velocity
def train_epoch(): step()
def step():
    velocity()
    thread = threading.Thread(target=velocity)
    thread.start()
    thread.join(9)
    assert not thread.is_alive()
velocity()
train_epoch()
"""


def test_a_small_checkout_is_counted(tmp_path: Path) -> None:
    texts = {"flow_grpo/models/model.py": MODEL, "train_grpo.py": TRAIN, "tests/test_it.py": "\n\n"}
    texts |= {f"flow_grpo/models/{name}.py": "" for name in ["__init__", *"abcdefghijklmn"]}
    for name, text in texts.items():
        write_atomically(tmp_path / name, text)
    # One caller have one, train_epoch and step, whose body has five lines; not twice, which is called three times.
    assert list(count(tmp_path).values()) == [19, 2, 12, 6, 3, 2, {"models": 15}]

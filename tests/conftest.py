"""Plain `pytest` needs no network, no account and no accelerator: this file sees to it."""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Read when the libraries are imported, so set before any test file is.
os.environ.update(
    HF_HUB_OFFLINE="1",
    MPLBACKEND="Agg",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

import flow_grpo.models  # noqa: F401 - before diffusers, which otherwise imports any installed torch_npu unguarded

# The same examples in every run: a suite that is green today is green tomorrow.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def only_this_machine() -> Iterator[None]:
    """Refuse connections to other machines."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        if self.family != socket.AF_UNIX and isinstance(address, tuple):
            host = str(address[0])
            assert host in ("localhost", "::1") or host.startswith("127."), f"a test reached for the network: {host}"
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        yield


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the smallest tiny world, not to be changed: 2 scenes to train on, 1 held out, 24x32, 5 frames."""
    from flow_grpo.data.tiny_world import ensure_tiny_world  # here: most tests load faster without it

    root = tmp_path_factory.mktemp("world") / "tiny"
    ensure_tiny_world(root, "unit_test")
    return root


@pytest.fixture
def without_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave curves.png out: drawing it costs more than a small run."""
    monkeypatch.setattr("flow_grpo.reporting.drawing.plots.draw_curves", lambda *_, **__: None)


@pytest.fixture(scope="session")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data, model and checkpoint that work, to be copied and spoiled."""
    from tests.bad_input_cases import make_valid  # here: most tests load faster without it

    return make_valid(tmp_path_factory.mktemp("valid"))


@pytest.fixture
def calls_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which every call of a scoring pool adds the names of the functions it runs."""
    from flow_grpo.rewards.process_pool import CallPool  # here: most tests load faster without it

    names: list[str] = []
    run = CallPool.run

    def counted(self: CallPool, function: Callable[..., Any], arguments: Sequence[Any], **named: Any) -> Any:
        names.extend([function.__name__] * len(arguments))
        return run(self, function, arguments, **named)

    monkeypatch.setattr(CallPool, "run", counted)
    return names

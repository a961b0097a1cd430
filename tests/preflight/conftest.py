"""What the tests of this room share."""

import pytest
import torch

from flow_grpo.models.wan_policy import WanPolicy
from flow_grpo.run.trainer import Trainer
from tests.doctor_cases import build_trainer, make_places, words


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_places(tmp_path_factory.mktemp("doctor"))


@pytest.fixture(scope="module")
def built(places: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Return a run as built, which no test may change."""
    return build_trainer(words(places, output_root=tmp_path_factory.mktemp("runs")))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool, float]]:
    """Return the (rows, gradients, sigma) of every call of the policy, to which calls are added."""
    seen, velocity = [], WanPolicy.velocity

    def noted(self, latents, sigma, conditioning):
        seen.append((len(latents), torch.is_grad_enabled(), float(sigma[0])))
        return velocity(self, latents, sigma, conditioning)

    monkeypatch.setattr(WanPolicy, "velocity", noted)
    return seen

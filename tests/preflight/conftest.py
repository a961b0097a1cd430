"""What the tests of this room share."""

from __future__ import annotations

import pytest

from tests.doctor_cases import make_places


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return a model folder and a data folder, which no test may change."""
    return make_places(tmp_path_factory.mktemp("doctor"))

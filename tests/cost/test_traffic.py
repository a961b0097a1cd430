"""The bytes of tokens that the plan counts are those that ranks send."""

import dataclasses

import pytest

from flow_grpo.cost.plan import tokens_sent
from flow_grpo.settings.schema import Config
from tests.models.test_context_parallel import case, compare
from tests.workers import run_ranks

DOUBLE = 2  # the ranks compute in float64, the recipe in fp32


@pytest.mark.parametrize(("kind", "videos"), [("recam", 2), ("wan_t2v", 1)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
def test_planned_tokens_are_those_that_were_sent(kind, videos, ranks, checkpointing):
    network, _, (latents, *_) = case(kind)
    length = latents.shape[2] * latents.shape[3] // 2 * latents.shape[4] // 2
    config = Config()
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, context_parallel=ranks))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="fp32"))
    rows = len(latents)
    again = 0 if checkpointing == "none" else rows
    planned = tokens_sent(config, network.config, length, videos, rows=2 * rows, recomputed=again)
    sent = [sent for *_, sent in run_ranks(compare, ranks, kind, ranks, checkpointing)]
    assert DOUBLE * planned == sum(sent) / ranks

"""Seeds are hashed: equal parts give equal draws everywhere, different parts unrelated ones."""

import torch

from flow_grpo.maths.keys import generator, key


def test_a_key_is_the_same_in_every_process_and_depends_on_every_part_and_their_order():
    assert key(0) == 4761921975702974394
    assert key(7, "xT", 12, 3) == 1213456913735053395
    keys = {key(a, "word", b) for a in range(100) for b in range(100)}
    assert len(keys) == 100 * 100 and key(1, 0) != key(0, 1)
    assert all(0 <= found < 2**63 for found in keys)  # a signed 64-bit seed


def test_a_generator_repeats_its_draws_whatever_was_drawn_before() -> None:
    first = torch.randn(16, generator=generator(3, "noise", 5, 1))
    torch.randn(100)
    assert torch.equal(first, torch.randn(16, generator=generator(3, "noise", 5, 1)))

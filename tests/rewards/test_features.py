"""Features and matches against pictures and descriptors that are known."""

import math

import numpy as np

from flow_grpo.rewards.camera.features import MOST_FEATURES, find_features, match
from tests.textured_room import film, grey


def directions(count: int, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed).normal(size=(count, 128))
    return (draw / np.linalg.norm(draw, axis=1, keepdims=True)).astype(np.float32)


def test_a_blob_is_found_where_it_is():
    """OpenCV's usual upscaling moves every point by a quarter of a pixel."""
    y, x = np.mgrid[:80, :120]
    picture = 60 + 150 * np.exp(-((x - 63.3) ** 2 + (y - 37.6) ** 2) / (2 * 3.0**2))
    found = find_features(picture.round().astype(np.uint8))
    assert len(found) > 0
    assert np.abs(found.points - [63.3, 37.6]).max(1).min() < 0.06


def test_descriptors_have_length_one_a_dark_picture_has_many_features_and_an_empty_one_none():
    picture = grey(film("source"))[0]
    found = find_features(picture)
    assert 500 < len(found) <= MOST_FEATURES + 5  # OpenCV keeps those that tie
    assert np.allclose(np.linalg.norm(found.descriptors, axis=1), 1, atol=1e-3)
    found = find_features(np.full((48, 64), 128, np.uint8))
    assert found.points.shape == (0, 2) and found.descriptors.shape == (0, 128)
    assert len(find_features((0.35 * picture).astype(np.uint8))) > 500


def test_matches_are_mutual_and_one_candidate_matches_nothing():
    known = directions(20)
    order = np.random.default_rng(1).permutation(20)
    first, second = match(known, known[order])
    assert len(first) == 20
    assert (order[second] == first).all()
    assert len(match(directions(1), directions(5))[0]) == 0
    assert len(match(directions(5), directions(0))[0]) == 0


def test_the_nearest_of_somebody_else_is_no_match():
    known = directions(3)
    like_the_first = 0.7 * known[0] + math.sqrt(1 - 0.7**2) * directions(1, seed=5)[0]
    first, second = match(np.stack([like_the_first, *known]).astype(np.float32), known)
    assert first.tolist() == [1, 2, 3] and second.tolist() == [0, 1, 2]


def test_an_ambiguous_match_is_none():
    known = directions(6)
    twice = np.concatenate([known, known[:2]])
    first, _ = match(known, twice)
    assert set(first) == {2, 3, 4, 5}
    first, second = match(twice, known)
    assert set(second) == {2, 3, 4, 5}

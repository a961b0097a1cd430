"""What the judge and the camera rewards of the tiny world share."""

import pytest
import torch

from flow_grpo.maths.poses import pose, rotation_matrix
from flow_grpo.rewards.room.room_fit import guess, make_view, make_viewpoints
from flow_grpo.rewards.room.room_pose import initial_poses
from tests.room_films import INTRINSICS, film, viewpoints

SHORT = film(["pan_right", "zoom_in", "arc_left"], frames=2)


def test_viewpoints_are_equal_when_room_reference_and_camera_are_of_which_there_must_be_as_many():
    same = film(["pan_right", "zoom_in"], rooms=2, frames=1)
    assert [rows.tolist() for rows in viewpoints(same).distinct()] == [[0, 1], [2, 3]]
    lenses = torch.stack([INTRINSICS, INTRINSICS, INTRINSICS, 1.1 * INTRINSICS])
    differing = make_viewpoints(same.rooms, same.references, lenses)
    assert [rows.tolist() for rows in differing.distinct()] == [[0, 1], [2], [3]]
    with pytest.raises(ValueError, match=r"3 rooms need as many reference poses \(4, 4\), got \(2, 4, 4\)"):
        make_viewpoints(SHORT.rooms, SHORT.references[:2], INTRINSICS)


def test_each_frame_gets_the_guess_that_it_was_filmed_from():
    """Two rooms, whose frames take turns: each is compared with renderings of its own room."""
    filmed = film(["pan_left", "zoom_in"], rooms=2, speed=1.5)
    turns = torch.tensor([(0.0, degrees, 0.0) for degrees in (-20.0, 0.0, 20.0)]).deg2rad()
    guesses = torch.cat([pose(rotation_matrix(turns), torch.zeros(3, 3)), filmed.true[1, -1:].float()])
    order = torch.tensor([0, 2, 1, 3])
    view = make_view(viewpoints(filmed).take(order), filmed.videos[order, :, -1], 8, 3)
    wanted = filmed.references[order].float() @ guesses[[0, 0, 3, 3]]
    assert torch.allclose(guess(view, guesses, 1)[:, 0], wanted, atol=1e-5)


def test_faded_and_garish_colours_do_not_change_the_guess():
    filmed = film(["pan_left", "zoom_out", "arc_right", "translate_up"], rooms=2)
    last = filmed.videos[:, :, -1]
    plain, *changed = (
        guess(make_view(viewpoints(filmed), 0.5 + contrast * (last - 0.5), 8, 3), initial_poses(), 1)
        for contrast in (1.0, 0.45, 2.0)
    )
    for found in changed:
        assert torch.allclose(found, plain, atol=1e-5)

"""Camera poses of a video's frames by structure from motion alone.

COLMAP's features and its global mapper (GLOMAP) with a fixed, known focal length. The input is the video alone, so the
result is in an arbitrary reference frame and unit. Incremental mapping finds nothing on dollies and pans. Where
pycolmap has no wheel, as on aarch64, `matched_motion.py` takes its place.

It is the evaluation's independent estimator, so rewards use it only for sources without poses (`unposed.py`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from flow_grpo.rewards.camera.features import Floats
from flow_grpo.rewards.camera.matched_motion import LEAST_POINTS, Estimate, find_motion, unit_rays, usual_angle

try:
    import pycolmap
except ImportError:  # no wheel for some platforms
    pycolmap = None  # type: ignore[assignment]

MOST_FEATURES = 2048  # of a frame
SMALL_ROWS = 360  # frames with fewer rows or columns are upscaled twice: three times more exact on dollies of 240x416
OVERLAP = 5  # a frame is matched with this many others: those 1, 2, 4, 8 and 16 after it
SEED = 0


def name() -> str:
    """Return the estimator's name and version; results of different ones are not comparable."""
    if pycolmap is None:
        return f"opencv {cv2.__version__} matched_motion"
    return f"pycolmap {pycolmap.__version__} global_mapping"


def reconstruct(pictures: NDArray[np.uint8], focal_px: float) -> Estimate:
    """Estimate the cameras of grey pictures (F, h, w); all NaN when they show no common scene.

    Pixels are taken to be square, with the principal point in the middle.
    """
    if pycolmap is None:
        return find_motion(pictures, focal_px)
    pycolmap.logging.minloglevel = pycolmap.logging.FATAL.value  # its errors on pictures without a scene are expected
    nothing = Estimate(np.full((len(pictures), 4, 4), np.nan))
    with tempfile.TemporaryDirectory() as folder:
        images, database = Path(folder) / "images", Path(folder) / "database.db"
        images.mkdir()
        for number, picture in enumerate(pictures):
            cv2.imwrite(str(images / f"{number:05d}.png"), picture)
        _match(images, database, pictures.shape[1:], focal_px)
        model = _map(images, database)
        points = model.num_points3D() if model else 0
        if points < LEAST_POINTS:
            # Without parallax the full mapper fails or keeps random points; rotations need no parallax.
            model = _map(images, database, rotations_only=True)
        if model is None:
            return nothing
        poses = nothing.poses.copy()
        for image in (model.images[number] for number in model.reg_image_ids()):
            pose = _camera_to_world(image)
            if points < LEAST_POINTS:
                pose[:3, 3] = 0.0
            poses[int(image.name.removesuffix(".png"))] = pose
        parallax = largest_parallax(model, database, focal_px, pictures.shape[1:])
        return Estimate(poses, points, points < LEAST_POINTS, parallax)


def _match(images: Path, database: Path, size: tuple[int, ...], focal_px: float) -> None:
    height, width = size
    pycolmap.set_random_seed(SEED)
    camera = pycolmap.ImageReaderOptions(
        # COLMAP, too, counts pixels from the outer corner of the first one.
        camera_model="PINHOLE",
        camera_params=f"{focal_px},{focal_px},{width / 2},{height / 2}",
    )
    features = pycolmap.FeatureExtractionOptions(num_threads=1, use_gpu=False)
    features.sift.first_octave = -1 if min(height, width) < SMALL_ROWS else 0
    features.sift.max_num_features = MOST_FEATURES
    mode, device = pycolmap.CameraMode.SINGLE, pycolmap.Device.cpu
    pycolmap.extract_features(
        database, images, camera_mode=mode, reader_options=camera, extraction_options=features, device=device
    )
    matching = pycolmap.FeatureMatchingOptions(num_threads=1, use_gpu=False)
    pairs = pycolmap.SequentialPairingOptions(overlap=OVERLAP, quadratic_overlap=True, num_threads=1)
    verification = pycolmap.TwoViewGeometryOptions()
    verification.ransac.random_seed = SEED
    verification.detect_watermark = False  # it would take a static video for one
    pycolmap.match_sequential(
        database, matching_options=matching, pairing_options=pairs, verification_options=verification, device=device
    )


def _map(images: Path, database: Path, *, rotations_only: bool = False) -> pycolmap.Reconstruction | None:
    # One thread, no GPU, a fixed seed and fixed intrinsics. After rotation averaging alone frames have no positions.
    options = pycolmap.GlobalPipelineOptions(num_threads=1, random_seed=SEED)
    mapper = options.mapper
    mapper.num_threads = 1
    for part in (mapper, mapper.rotation_averaging, mapper.global_positioning, mapper.retriangulation):
        part.random_seed = SEED
    mapper.global_positioning.use_gpu = False
    mapper.skip_track_establishment = mapper.skip_global_positioning = rotations_only
    mapper.skip_bundle_adjustment = mapper.skip_retriangulation = rotations_only
    adjustment = mapper.bundle_adjustment
    adjustment.refine_focal_length = adjustment.refine_principal_point = adjustment.refine_extra_params = False
    adjustment.ceres.use_gpu = False
    adjustment.ceres.solver_options.num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        models = pycolmap.global_mapping(database, images, folder, options)
    return max(models.values(), key=lambda model: model.num_reg_images(), default=None)


def largest_parallax(model: pycolmap.Reconstruction, database: Path, focal_px: float, size: tuple[int, ...]) -> float:
    """Return in degrees how far the view moved apart from rotation; NaN when no two registered frames match.

    The largest, over all pairs of frames with verified matches, of the median angle between their world-space rays to
    the same features. It is about 57 times the sideways distance over the distance to the scene, needs no triangulated
    point, and is near zero for a camera that only turns.
    """
    height, width = size
    poses = {number: _camera_to_world(model.images[number]) for number in model.reg_image_ids()}
    medians = []
    with pycolmap.Database.open(database) as opened:
        rays = {}
        for number, pose in poses.items():
            pixels = opened.read_keypoints(number)[:, :2].astype(np.float64)
            rays[number] = unit_rays(pixels, np.array([width / 2, height / 2]), focal_px) @ pose[:3, :3].T
        for pair, geometry in zip(*opened.read_two_view_geometries(), strict=True):
            first, second = pycolmap.pair_id_to_image_pair(pair)
            matches = geometry.inlier_matches
            if first in rays and second in rays and len(matches):
                medians.append(usual_angle(rays[first][matches[:, 0]], rays[second][matches[:, 1]]))
    return max(medians, default=float("nan"))


def _camera_to_world(image: pycolmap.Image) -> Floats:
    pose = np.eye(4)
    pose[:3] = image.cam_from_world().inverse().matrix()
    return pose

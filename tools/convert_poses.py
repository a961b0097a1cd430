r"""Convert camera poses of a video between the files that programs write: any of docs/camera_paths.md into any other.

    python tools/convert_poses.py vipe/pose/holiday.npz holiday.json
    python tools/convert_poses.py scene1/cameras/camera_extrinsics.json:cam03 colmap/   --focal-px 840 --size 832 480

The form of OUT follows its name: .json (this project's), cameras/camera_extrinsics.json (MultiCamVideo's), .txt (TUM),
pose/NAME.npz (ViPE), another .npz (MegaSaM), a folder (COLMAP as text). Poses count relative to the first frame and are
not resampled. What IN knows of the focal length goes along where OUT has a place for it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from tools.common import command, make_parser

PARSER = make_parser(__doc__)
PARSER.add_argument("given", metavar="IN", help="file or folder of poses")
PARSER.add_argument("out", metavar="OUT", type=Path, help="file or folder to write; must not exist")
PARSER.add_argument("--focal-px", type=float, help="focal length in pixels; default: as in IN")
PARSER.add_argument(
    "--size", type=int, nargs=2, metavar=("WIDTH", "HEIGHT"), help="of the video, for COLMAP and MegaSaM"
)
PARSER.add_argument("--unit", type=float, default=1.0, metavar="METRES", help="of IN (default: 1)")
if __name__ == "__main__":
    PARSER.parse_args()  # now: what follows takes seconds to import

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from flow_grpo.data.camera_files import write_cameras
from flow_grpo.data.pose_files import MULTICAM, read_poses
from flow_grpo.data.trajectories import fit_path
from flow_grpo.maths.poses import multicam_to_opencv


@command
def main(words: list[str] | None = None) -> int:
    args = PARSER.parse_args(words)
    found = read_poses(args.given)
    if args.out.exists():
        raise ValueError(f"{args.out} exists; choose another")
    poses = fit_path(found.poses, len(found.poses), from_first=True, name=args.given).numpy()
    poses[:, :3, 3] *= args.unit
    size = args.size or ([found.width, 0] if found.width else None)
    write(args.out, poses, args.focal_px or found.focal_px, size)
    print(f"{len(poses)} poses: {args.out}")
    return 0


def write(out: Path, poses: NDArray[np.float64], focal: float | None, size: list[int] | None) -> None:
    """Write poses (N, 4, 4) relative to the first frame in the form that a path's name tells."""
    lens = [focal, focal, *((edge / 2 for edge in size) if size else (0, 0))] if focal else []
    (out if not out.suffix else out.parent).mkdir(parents=True, exist_ok=True)
    if out.name == MULTICAM:
        if out.parent.name != "cameras":
            raise ValueError(f"{out} must lie in a folder cameras, as in a scene of MultiCamVideo")
        out.parent.rmdir()
        write_cameras(out.parent.parent, ["cam01"], multicam_to_opencv(torch.eye(4)) @ torch.from_numpy(poses)[None])
    elif out.suffix == ".json":
        known = {"focal_px": focal} if focal else {}
        out.write_text(json.dumps({"poses": poses.tolist(), "relative": True} | known))
    elif out.suffix == ".txt":
        turns = Rotation.from_matrix(poses[:, :3, :3]).as_quat()
        np.savetxt(out, np.column_stack([np.arange(len(poses)), poses[:, :3, 3], turns]), fmt="%.12g")
    elif out.suffix == ".npz" and out.parent.name == "pose":
        np.savez(out, data=poses, inds=np.arange(len(poses)))
        if lens:
            beside = out.parent.parent / "intrinsics"
            beside.mkdir(exist_ok=True)
            np.savez(beside / out.name, data=np.tile(lens, (len(poses), 1)), inds=np.arange(len(poses)))
    elif out.suffix == ".npz":
        matrix = {"intrinsic": np.array([[lens[0], 0, lens[2]], [0, lens[1], lens[3]], [0, 0, 1]])} if lens else {}
        pictures = {"images": np.zeros((0, size[1], size[0], 3), np.uint8)} if lens and size else {}
        np.savez(out, cam_c2w=poses, **matrix, **pictures)
    elif lens and size:
        write_colmap(out, poses, f"1 SIMPLE_PINHOLE {size[0]} {size[1]} {lens[0]:.12g} {lens[2]:g} {lens[3]:g}\n")
    else:
        raise ValueError(
            f"COLMAP's {out}/cameras.txt needs --focal-px and --size: {'size' if focal else 'no focal length'}"
        )


def write_colmap(folder: Path, poses: NDArray[np.float64], camera: str) -> None:
    """Write cameras.txt, images.txt and an empty points3D.txt; images are named by their frames."""
    turned = np.swapaxes(poses[:, :3, :3], 1, 2)  # world-to-camera
    moved = -np.einsum("nij,nj->ni", turned, poses[:, :3, 3])
    turns = Rotation.from_matrix(turned).as_quat()[:, [3, 0, 1, 2]]
    rows = np.column_stack([turns, moved]).tolist()
    lines = [
        f"{frame + 1} {' '.join(f'{value:.12g}' for value in row)} 1 {frame:05d}.png\n\n"
        for frame, row in enumerate(rows)
    ]
    (folder / "cameras.txt").write_text(camera)
    (folder / "images.txt").write_text("".join(lines))
    (folder / "points3D.txt").write_text("")


if __name__ == "__main__":
    sys.exit(main())

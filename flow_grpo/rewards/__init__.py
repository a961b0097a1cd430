"""Rewards: one file each; here their names, since help needs no torch."""

# Name in `reward.weights` -> module below flow_grpo.rewards and class, imported when the reward is built.
REWARDS = {
    "target_view": "target_view:TargetView",
    "target_psnr": "target_view:TargetPsnr",
    "source_match": "source_match:SourceMatch",
    "source_texture": "source_match:SourceTexture",
    "motion_mag": "motion_mag:MotionMag",
    "sharpness": "sharpness:Sharpness",
    "pose_rot": "camera.pose:PoseRot",
    "pose_trans": "camera.pose:PoseTrans",
    "pose_dir": "camera.pose:PoseDir",
    "view_disp": "camera.view_disp:ViewDisp",
    "smooth": "camera.smooth:Smooth",
    "exposure": "exposure:Exposure",
    "room_pose": "room.room_pose:RoomPose",
    "room_tracks": "room.room_tracks:RoomTracks",
    "room_rot": "room.room_path:RoomRot",
    "room_trans": "room.room_path:RoomTrans",
    "room_content": "room.room_path:RoomContent",
}

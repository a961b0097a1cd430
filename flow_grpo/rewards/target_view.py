"""interim"""

import torch
import torch.nn.functional as F

from flow_grpo.records import RewardResult


class TargetView:
    name = "target_view"
    floor = 1e-3

    def __call__(self, videos, conditions):
        target = torch.stack([c.target_video for c in conditions])
        mse = (videos - target).square().mean(dim=(1, 2, 3, 4))
        low = lambda v: F.avg_pool2d(v.transpose(1, 2).flatten(0, 1), 3, 1).unflatten(0, (len(v), -1))
        value = -(low(videos) - low(target)).square().mean(dim=(1, 2, 3, 4)).sqrt()
        ok = torch.ones(len(videos), dtype=torch.bool)
        return RewardResult(value, ok, ("",) * len(videos), {"psnr_db": -10 * mse.log10()})

"""A recipe that only the tests of the configuration use, so that tuning the real ones breaks none of them."""

from ml_collections import ConfigDict

from config.base import get_config


def toy() -> ConfigDict:
    config = get_config()
    config.data.num_frames = 9
    config.data.height = 24
    config.data.width = 32
    config.sample.k = 8
    config.sample.train_batch_size = 16
    config.sample.num_batches_per_epoch = 4
    config.sample.num_steps = 8
    config.sample.shift = 3.0
    config.sample.sde = "flow"
    config.sample.noise_level = 0.7
    config.sample.sde_steps = (0, 1, 2, 3)
    config.sample.sde_window = 2
    config.model.trained = "camera"
    config.train.batch_size = 16
    config.eval.gold = "room_pose"
    config.reward.weights = ConfigDict({"target_view": 1.0, "source_match": 0.1})
    return config

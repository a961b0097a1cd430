"""One file per tracker: wandb, tensorboard, swanlab, trackio."""

"""Online RL (GRPO for flow matching) for camera-controlled video-to-video diffusion."""

import os

# torch loads any installed accelerator plug-in while it is imported; with torch_npu installed but the vendor
# runtime missing, a plain `import torch` would raise. `runtime/device.py` loads the plug-in itself, guarded.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

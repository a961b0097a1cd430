"""Video models behind the Policy seam."""

from flow_grpo.runtime import device

# diffusers imports torch_npu whenever it is installed: first through the door, with its settings and its error.
device.load_plug_in()

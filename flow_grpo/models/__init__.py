"""Video models behind the `Policy` interface."""

from flow_grpo.runtime import device

# diffusers imports torch_npu if it is installed: load it first, with our environment defaults and error message.
device.load_plug_in()

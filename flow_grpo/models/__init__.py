"""Video models behind the `Policy` interface."""

from flow_grpo.runtime import device

# diffusers imports torch_npu, unguarded, if it is installed: load it first with our environment defaults, or hide it.
device.load_plug_in()

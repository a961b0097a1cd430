"""Pure functions on tensors: no model, no device, no state."""

"""Pure functions on tensors: no model, no device, no state; tests compare them with numbers computed by hand."""

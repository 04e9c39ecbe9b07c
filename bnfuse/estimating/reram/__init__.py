"""Training on a stack of ReRAM and GPU layers, as a pipeline (papers/002, sections IV and VI)."""

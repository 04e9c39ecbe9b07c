"""Training on a stack of ReRAM and GPU layers, as a pipeline ([Joardar22], sections IV and VI)."""

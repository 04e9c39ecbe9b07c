"""Training graphs: read, checked, written, with what their inputs and outputs are for."""

"""Programs on a CPU."""

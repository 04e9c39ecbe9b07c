"""Fuzzing of the command line: mutated inputs, one command each, and what must hold of it (benchmarks/fuzz.py)."""

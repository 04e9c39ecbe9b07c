"""Statistics and gradients that go through a concatenation (ICF)."""

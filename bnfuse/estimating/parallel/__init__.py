"""Data-parallel training over workers ([Iandola16], section 3.6)."""

"""Data-parallel training over workers (papers/003, section 3.6)."""

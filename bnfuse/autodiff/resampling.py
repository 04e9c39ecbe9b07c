"""Rules of a family that has none yet."""

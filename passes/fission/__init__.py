"""A BatchNorm in two halves, statistics and normalising, forward and backward."""

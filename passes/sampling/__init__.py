"""Statistics from a sample of the batch, from virtual samples, or from cheaper estimates (BS, FS, VDN)."""

"""From kernels to object code: the cache, workers, measured choices."""

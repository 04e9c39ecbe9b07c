"""Whether two training graphs compute the same."""

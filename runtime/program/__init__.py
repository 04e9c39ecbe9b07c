"""A compiled step as data, and where its memory lies."""

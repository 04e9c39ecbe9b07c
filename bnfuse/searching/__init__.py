"""The search for the BatchNorms that training needs (paper 002, section V; docs/search.md)."""

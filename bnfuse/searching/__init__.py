"""The search for the BatchNorms that training needs ([Joardar22], section V; docs/search.md)."""

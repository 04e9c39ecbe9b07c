"""Steps that move into the operator before or after them."""

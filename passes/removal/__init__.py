"""BatchNorms that are taken out, and biases that nothing needs."""

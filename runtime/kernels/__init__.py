"""What computes: each kind of kernel for each kind of target, as functions of a frozen problem."""

"""What experts do to their rows: two products, and the gate between them inside their kernels."""

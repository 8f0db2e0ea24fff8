"""Floor 0: the mathematics of block diffusion as functions on tensors. Imports nothing but torch."""

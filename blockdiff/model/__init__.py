"""Floor 1: the denoiser, its attention backends and its cache. Weights and nothing else: no state between calls."""

"""Floor 3: what a trained model is worth."""

"""Floor 2: the block loop, its step rules, infilling, streaming and reports. Knows nothing of training or of
configs' files."""

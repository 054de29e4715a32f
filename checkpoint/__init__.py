"""A model's files to weights: config.json, safetensors, GGUF, rotary frequencies, and the download."""

"""The files of a model to weights: config.json, safetensors, rotary frequencies, and where to get them."""

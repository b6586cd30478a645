"""Open models in, trained ones out: weights in Hugging Face's format."""

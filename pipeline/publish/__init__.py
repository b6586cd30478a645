"""Export and publish trained models in Hugging Face's format, and generate text with them."""

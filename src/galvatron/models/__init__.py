"""Stock Hugging Face models cut into layers, and their weights. Imports torch; knows nothing of ranks."""

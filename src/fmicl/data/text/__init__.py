"""Text data: files of sentences, their tokens, and batches for training."""

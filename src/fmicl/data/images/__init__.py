"""Image datasets: loading, splits, and batches for training and evaluation."""

"""Image data sets, and their batches of views."""

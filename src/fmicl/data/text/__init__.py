"""Text files as tokens, and their batches of views."""

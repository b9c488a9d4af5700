"""Evaluation of frozen features: k-NN, linear probe, STS, geometry of embeddings."""

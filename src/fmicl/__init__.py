"""Contrastive learning with any f-divergence."""

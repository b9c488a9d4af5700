"""Sweeps: many runs of one recipe over a grid of settings."""

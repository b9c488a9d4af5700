"""Encoders, heads and normalisation: what turns a view into an embedding."""

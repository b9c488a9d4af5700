"""Utilities without a domain: files, locks, machine facts, provenance, validation, numerics, Triton launching."""

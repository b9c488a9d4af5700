"""Losses for other libraries, one module for each library."""

"""Vision and text encoders, projection heads, normalisation."""

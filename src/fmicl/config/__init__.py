"""Settings of a training run, and the recipes that carry them."""

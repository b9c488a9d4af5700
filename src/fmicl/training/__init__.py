"""The training pipeline: from settings to a run folder."""

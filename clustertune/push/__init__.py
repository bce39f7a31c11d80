"""Uploads a run's adapter to the Hub: its files and its model card, and nothing else."""

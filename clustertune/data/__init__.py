"""Conversations: rows of any of the known formats -> a dataset on disk; and the models that are made locally."""

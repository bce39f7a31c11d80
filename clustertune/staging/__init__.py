"""Copies of models and data: on a disk of each node before ranks read them, and as one folder for machines without network."""

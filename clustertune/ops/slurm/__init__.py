"""Slurm's files from a cluster file: what each machine must have, how it differs, and what to do in which order."""

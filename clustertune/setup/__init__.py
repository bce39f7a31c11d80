"""Renders what a machine needs for storage and Slurm as files and a script, verified; an administrator applies them."""

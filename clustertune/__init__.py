"""clustertune: from a bare Slurm GPU cluster to an evaluated fine-tuned LLM."""

"""clustertune: from a bare Slurm GPU cluster to an evaluated fine-tuned LLM."""

__version__ = "0.1.0"

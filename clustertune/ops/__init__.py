"""What an operator sets up from the cluster file: storage, Slurm."""

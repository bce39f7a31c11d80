"""A temporary Slurm cluster on one machine: to rehearse a job before there is a cluster, and to test against."""

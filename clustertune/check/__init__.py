"""Rules and what they find: of a machine, a job's nodes, the links between GPUs, a recipe and its run, a batch script."""

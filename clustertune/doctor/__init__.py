"""Rules for what goes wrong on clusters, each with its remedy. Standard library only: login nodes are bare."""

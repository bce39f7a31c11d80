"""Recipes with a ``megatron`` section: the program of their ranks, in NVIDIA's image, and what it is given.

All names of NVIDIA's are those of Megatron-Bridge 0.5.1, the release of ``containers/megatron.def`` (NeMo 26.06.01), and of
Megatron-Core 0.18 below it.
"""

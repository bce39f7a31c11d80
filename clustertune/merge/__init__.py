"""A LoRA adapter merged into its base, streaming: bounded memory, the bytes of PEFT's ``merge_and_unload()``."""

from clustertune.merge.streaming import merge, plan

__all__ = ["merge", "plan"]

"""The folder that vLLM's Python finds :mod:`vllm_guard` in. It holds that module alone: vLLM's environment is its own."""

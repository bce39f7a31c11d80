"""One rank of a recipe at full size without a GPU: the project's own trainer and loading on fake tensors of ``cuda``."""

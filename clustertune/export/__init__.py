"""From the shards of a checkpoint to a checked PEFT adapter."""

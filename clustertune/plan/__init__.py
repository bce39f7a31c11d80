"""Memory, time and money of a run before it is started."""

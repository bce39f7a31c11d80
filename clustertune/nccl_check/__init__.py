"""What the links of a cluster carry: measured with the stack that trains, judged from the figures, the facts and NCCL's log."""

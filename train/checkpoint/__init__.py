"""Checkpoints: everything a run needs to go on as if it had never stopped.

Parameters, both moments, counters and guards (`tensors`, by torch.distributed.checkpoint, in shards
that any mesh can read), and checkpoint.json with step, position in the data, configuration,
versions and checksums (`manifest`). `store` knows the folder, `saver` writes beside the training,
`compatibility` tells which settings may change, `checkpointer` is what the loop calls; `pieces`
reads what is stored on a host without torch_xla.

One of the library's files is a pickle: take no checkpoint from those you do not trust.
"""

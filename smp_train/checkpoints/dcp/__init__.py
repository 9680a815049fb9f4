"""torch.distributed.checkpoint made strict: every file has a checksum, every key is compared, nothing runs code."""

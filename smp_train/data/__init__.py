"""Data: records of any kind, indexed in a cache or streamed, as batches in one order for the whole run."""

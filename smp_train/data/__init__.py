"""From token shards to batches, each sample exactly once.

`utils` finds shards, `rows` reads one line strictly, `token_writer` turns shards into token files (`token_file`) from
which any row is read at once, `token_cache` knows where those are, and `token_dataset` numbers their rows. `order`
computes which row comes at which position, and `pipelines.data_pipeline` reads each rank's positions as batches.
`open_data` opens all of it for a run. `prepare` makes shards from text. Only `pipelines` imports torch.
"""

"""From token shards to batches, each sample exactly once.

`utils` finds shards, `rows` reads one line strictly, `token_cache` and `index` turn shards into a file that
any row can be read from at once, `order` says which row comes at which position, and
`pipelines.data_pipeline` deals positions out to ranks as batches. `prepare` makes shards from text. Only
`pipelines` imports torch.
"""

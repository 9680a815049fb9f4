"""From token shards to batches, each sample exactly once.

`utils` finds shards, `rows` reads one line strictly, `token_writer` turns shards into token files (`token_file`) from
which any row is read at once, `token_cache` knows where those are, and `token_dataset` numbers their rows. `order` says
which row comes at which position, and `pipelines.data_pipeline` deals positions out to ranks as batches. `open_data`
puts it all together for a run. `prepare` makes shards from text. Only `pipelines` imports torch.
"""

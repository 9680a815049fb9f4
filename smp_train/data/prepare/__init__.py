"""From text to token shards.

`documents` reads, `tokenizer` trains or loads, `shards` writes, `cli` is the verb.
"""

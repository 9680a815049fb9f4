"""From text to token shards.

`packing` orders and packs documents, `tokenizer` trains or loads, `pipeline` writes shards, `cli` is the verb.
"""

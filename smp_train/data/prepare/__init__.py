"""``smp-train prepare``: converts records to token shards, with a validation split, a tokenizer and a manifest."""

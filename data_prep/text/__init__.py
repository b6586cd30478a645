"""Documents to shards of tokens: tokenizer, work units, shards, and the manifests that vouch for each step."""

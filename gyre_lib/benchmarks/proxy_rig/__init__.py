"""Parts of the proxy benchmark: a tokenizer without weights, and a load generator."""

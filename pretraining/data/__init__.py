"""From raw text to blocks of tokens in their global order: sources, tokenizer, shards, mixture, order, packing."""

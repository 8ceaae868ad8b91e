"""What grammars allow: compiled for a tokenizer, and followed token by token."""

"""Grammars that constrain answers: compiled for a tokenizer, and followed token by token."""

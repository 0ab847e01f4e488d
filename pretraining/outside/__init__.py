"""What comes from others and what leaves: files, addresses and words are checked and masked here (SECURITY.md)."""

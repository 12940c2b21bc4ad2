"""What each API key used."""

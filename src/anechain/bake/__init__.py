"""How a chain is made."""

"""Plays that users write around the roles: what must hold in each of them."""

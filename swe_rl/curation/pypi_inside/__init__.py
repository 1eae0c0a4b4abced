"""Scripts for the inside of a sandbox; read as text and written there, never imported."""

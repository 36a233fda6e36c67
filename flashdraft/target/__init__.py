"""What we ask of the large model, and where it comes from."""

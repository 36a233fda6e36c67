"""What proposes tokens: DFlash, prompt lookup."""

"""From a prompt to text: draft, verify, commit."""

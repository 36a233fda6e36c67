"""From prompts to a drafter: prompts, the target's own answers, rows, blocks, loss, loop."""

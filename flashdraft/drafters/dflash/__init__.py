"""DFlash (arXiv 2602.06036): a block of draft tokens in one pass of a small block-diffusion transformer."""

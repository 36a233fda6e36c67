"""`python -m flashdraft`."""

from flashdraft.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

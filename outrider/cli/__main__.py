"""`python -m outrider.cli`: the command, for launchers that start modules."""

from outrider.cli.app import main

if __name__ == "__main__":
    main()

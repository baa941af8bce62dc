"""``python -m devalloc``: the command line, also where no script ``devalloc`` is on the path."""

from devalloc.cli import main

if __name__ == "__main__":
    main()

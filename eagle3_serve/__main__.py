"""`python -m eagle3_serve`: the same as the `eagle3-serve` command."""

from eagle3_serve.cli import main

if __name__ == "__main__":
    main()

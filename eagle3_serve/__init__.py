"""eagle3-serve: SGLang with an EAGLE-3 drafter whose wiring is proven."""

__version__ = "0.1.0"

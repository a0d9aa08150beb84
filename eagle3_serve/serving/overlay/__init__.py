"""Patching SGLang without touching site-packages: unified diffs, a manifest of digests, a tree of symlinks."""

"""A name or a repository becomes files on this machine."""

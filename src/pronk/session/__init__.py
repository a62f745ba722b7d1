"""Requests under way on one backend."""

from pronk.session.handle import Handle
from pronk.session.load import Load
from pronk.session.session import Session

__all__ = ["Handle", "Load", "Session"]

"""What a model makes of a text, token by token: `llm.look(text)` gives a Look."""

from pronk.look.lens import Lens
from pronk.look.look import Alternative, Look, Token
from pronk.look.reading import Reading
from pronk.look.spelling import Spelling

__all__ = ["Alternative", "Lens", "Look", "Reading", "Spelling", "Token"]

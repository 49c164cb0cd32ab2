r"""`\boxed{...}`: where models of mathematics put their answers."""

from __future__ import annotations


def last_box(text: str) -> str | None:
    r"""Content of the last box that is closed, `\boxed{...}` or `\fbox{...}`; None where there is none.

    >>> last_box(r"so \boxed{1}, or rather \boxed{\frac{1}{2}}, and not \boxed{3")
    '\\frac{1}{2}'
    """
    end = len(text)
    while (start := max(text.rfind(r"\boxed", 0, end), text.rfind(r"\fbox", 0, end))) >= 0:
        inside = _braced(text[start:].removeprefix(r"\boxed").removeprefix(r"\fbox").lstrip())
        if inside is not None:
            return inside.strip()
        end = start
    return None


def _braced(text: str) -> str | None:
    r"""What the brace at the start of `text` encloses; None where none opens or it stays open. `\{` is no brace."""
    depth, i = 0, 0
    while i < len(text):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[1:i] if i else None
        i += 2 if text[i] == "\\" else 1
    return None

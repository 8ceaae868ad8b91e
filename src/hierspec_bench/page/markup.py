"""HTML with automatic escaping: everything that is not `Html` becomes escaped text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import TypeAlias

# Characters that no page may contain; a replacement character is shown instead.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufdd0-\ufdef\ufffe\uffff\ud800-\udfff]")
_VOID = frozenset({"meta", "link", "br"})


class Html(str):
    """Markup made by `element` or `joined`, never text from elsewhere."""

    __slots__ = ()


Child: TypeAlias = "str | float | Iterable[Child] | None"


def element(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """An element. `class_` becomes class, `aria_label` aria-label; None and False omit an attribute."""
    opening = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        opening += f" {key.rstrip('_').replace('_', '-')}"
        if value is not True:
            opening += f'="{clean(str(value))}"'
    if name in _VOID:
        return Html(f"<{opening}>")
    return Html(f"<{opening}>{joined(*children)}</{name}>")


def joined(*children: Child) -> Html:
    """Concatenates the children, with text escaped."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, str):
            parts.append(clean(child))
        elif isinstance(child, int | float):
            parts.append(str(child))
        else:
            parts.append(joined(*child))
    return Html("".join(parts))


def clean(text: str) -> str:
    """Text that is safe between tags and inside quotes."""
    return escape(_FORBIDDEN.sub("�", text), quote=True)

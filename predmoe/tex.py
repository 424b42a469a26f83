"""Plain text as LaTeX: what findings and claims say in words, set as a paper sets it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

from .strict import ConfigError

SPECIAL = {"\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}
SIGNS = {"–": "--", "−": "$-$", "×": r"$\times$", "→": r"$\rightarrow$", "λ": r"$\lambda$", "≥": r"$\ge$", "≤": r"$\le$", "±": r"$\pm$", "≻": r"$\succ$", "…": r"\dots{}",
         "’": "'", "“": "``", "”": "''", "·": r"$\cdot$", "µ": r"$\mu$", "®": r"\textregistered{}", "™": r"\texttrademark{}", "∞": r"$\infty$", "ß": r"\ss{}", "ø": r"\o{}", "ł": r"\l{}"}  # fmt: skip
ACCENTS = {"\u0300": "`", "\u0301": "'", "\u0302": "^", "\u0303": "~", "\u0308": '"', "\u030a": "r", "\u030c": "v", "\u0327": "c"}   # combining mark -> LaTeX's

CAPITAL = ("gamma", "delta", "theta", "lambda", "xi", "pi", "sigma", "upsilon", "phi", "psi", "omega")   # those that look like no Latin letter
SMALL = (*CAPITAL, "alpha", "beta", "epsilon", "zeta", "eta", "iota", "kappa", "mu", "nu", "rho", "tau", "chi")


def escape(text: str) -> str:
    """`text` with LaTeX's own characters made harmless. Raises ConfigError on a character that the paper's fonts may lack, so that no glyph is lost."""
    text = "".join(SPECIAL.get(c) or SIGNS.get(c) or _greek(c) or _accented(c) for c in text)
    if lost := sorted({c for c in text if ord(c) > 126 or ord(c) < 32 and c not in "\n\t"}):
        raise ConfigError(f"no LaTeX is known for the character {lost[0]!r} (U+{ord(lost[0]):04X}) in {text[:60]!r}: add it to tex.SIGNS")
    return text


def _greek(c: str) -> str | None:
    """A Greek letter that LaTeX has a name for, as a formula."""
    size, _, name = unicodedata.name(c, "").removeprefix("GREEK ").lower().replace("lamda", "lambda").partition(" letter ")
    return rf"$\{name}$" if size == "small" and name in SMALL else rf"$\{name.capitalize()}$" if size == "capital" and name in CAPITAL else None


def _accented(c: str) -> str:
    """A letter with an accent as LaTeX composes it; anything else as it is."""
    base, *marks = unicodedata.normalize("NFD", c)
    if len(marks) != 1 or marks[0] not in ACCENTS:
        return c
    return rf"\{ACCENTS[marks[0]]}{{{chr(92) + base if base in 'ij' else base}}}"


def prose(text: str) -> str:
    """A computed sentence as LaTeX: signs become minus signs, h = 1 and hit@k become formulas, intervals do not break, **bold** and `code` stay."""
    text = re.sub(r'"([^"]*)"', r"``\1''", escape(text))
    text = re.sub(r"(?<![\w.])-(?=\.?\d)", "$-$", text)
    text = text.replace(" - ", " $-$ ").replace(" x ", r" $\times$ ").replace("+-", r"$\pm$").replace("hit@k", "hit@$k$").replace("top-k", "top-$k$")
    text = re.sub(r"\bh ?= ?(\d+)(?! ?/)", r"$h=\1$", text)
    text = re.sub(r"\bh ?= ?(\d+(?: / \d+)+)", lambda m: f"$h={m[1].replace(' ', '')}$", text)
    text = re.sub(r"\bp = ", r"$p$~=~", text)
    text = re.sub(r"\blambda\b", r"$\\lambda$", text)
    text = re.sub(r"(\d) (points|nats|seeds?|GB/s|tok/s|ms|MB)\b", r"\1~\2", text)
    text = re.sub(r" \[([^][]*, [^][]*)\]", lambda m: f" \\mbox{{[{m[1]}]}}", text)
    text = re.sub(r"\bFAILS\b", r"\\emph{fails}", text)
    text = re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", text)
    text = re.sub(r"`([^`]+)`", r"\\code{\1}", text)
    return re.sub(r"\b(\d\d(?:\\_[a-z]+)+)\b", r"\\code{\1}", text)   # the names of experiments


def rows(lines: Iterable[Sequence[str]]) -> str:
    """The lines of a tabular; a line that is one string stands as it is (a rule)."""
    return "\n".join(line if isinstance(line, str) else " & ".join(line) + r" \\" for line in lines)


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    words = list(words)
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1] if words else "none"

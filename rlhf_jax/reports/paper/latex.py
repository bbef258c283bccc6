"""Plain text as LaTeX that every engine compiles with its own fonts."""

from __future__ import annotations

import re
import unicodedata

# Pairs: one or two characters, and their LaTeX.
TABLE = r"""
\ \textbackslash{}  ^ \textasciicircum{}  ~ \textasciitilde{}  -- -{}-  `` `{}`
# \#  $ \$  % \%  & \&  _ \_  { \{  } \}  < $<$  > $>$  | $|$  " ''
– --  — ---  ‘ `  ’ '  “ ``  ” ''  … \dots{}
‖ $\|$  → $\to$  ← $\leftarrow$  ± $\pm$  × $\times$  − $-$  · $\cdot$  ÷ $\div$
≤ $\le$  ≥ $\ge$  ≠ $\ne$  ≈ $\approx$  ∝ $\propto$  ∈ $\in$  ∞ $\infty$  ℓ $\ell$
√ $\surd$  ∇ $\nabla$  ∂ $\partial$  ∑ $\sum$  ∏ $\prod$  ° ${}^{\circ}$  ⁻ ${}^{-}$
"""
WORDS = TABLE.split()
LATEX = dict(zip(WORDS[::2], WORDS[1::2], strict=True)) | {
    **{char: f"${{}}^{{{n}}}$" for n, char in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    **{char: f"${{}}_{{{n}}}$" for n, char in enumerate("₀₁₂₃₄₅₆₇₈₉")},
}
GREEK = re.compile(r"(?:GREEK (SMALL|CAPITAL) LETTER|MICRO)( FINAL)? (\w+)")
RENAMED = {"lamda": "lambda", "epsilon": "varepsilon", "omicron": "o", "sign": "mu"}
CAPITALS = ("Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Upsilon")
CAPITALS += ("Phi", "Psi", "Omega")  # others look like Latin letters, without a command
LAST_LETTER = 0x17F  # end of Latin Extended-A, which LaTeX's fonts cover
MINUS = re.compile(r"(?<![\w-])-(?=\d)")
TOKEN = re.compile(r"--|``|\s+|.")


def escaped(text: str) -> str:
    """Returns text as LaTeX: π and ‖ in math mode, minus signs, escaped _ and %.

    A character that LaTeX's fonts lack is written by its number, such as U+4E2D.

    >>> print(escaped("kl_coef=-0.5 → 100%, π_ref"))
    kl\\_coef=$-$0.5 $\\to$ 100\\%, $\\pi$\\_ref
    """
    text = MINUS.sub("−", unicodedata.normalize("NFC", text))
    return "".join(map(_escaped, TOKEN.findall(text)))


def _escaped(token: str) -> str:
    if token in LATEX:
        return LATEX[token]
    if token.isspace():
        return " "
    if greek := GREEK.fullmatch(unicodedata.name(token, "")):
        name = RENAMED.get(greek[3].lower(), greek[3].lower())
        name = f"var{name}" if greek[2] else name
        if greek[1] != "CAPITAL":
            return f"$\\{name}$" if len(name) > 1 else f"${name}$"
        if name.capitalize() in CAPITALS:
            return f"$\\{name.capitalize()}$"
    if ord(token) <= LAST_LETTER and token.isprintable():
        return token
    return f"U+{ord(token):04X}"

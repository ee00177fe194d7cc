"""Takes secrets and people's text out of lines before they reach status, Events or storage.

Too much is taken out rather than too little: the line is for recognising a fault.
"""

from __future__ import annotations

import re

MAX_CHARACTERS = 300
_GONE = "[redacted]"

_NAMES = (
    r"[\w.-]*(?:api[_-]?key|access[_-]?key|token|secret|passw(?:or)?d|passphrase|credentials?"
    r"|signature|\bsig|session[_-]?id|cookie|private[_-]?key)"
)
# A name of a counter, not of a secret: "max_tokens=16", "num_tokens: 3".
_COUNTS = r"(?![\w.-]*tokens\b)(?!token[ _-]?(?:ids?|usage|count|throughput)\b)"
_REQUEST = re.compile(
    r"(?P<lead>\b(?:prompt|output|messages|content|input|text|query|completion|response|user"
    r"|assistant|prompt_token_ids|input_ids|generated_text|arguments|body|request body)"
    r"['\"]?\s*[:=]\s*)(?P<body>['\"\[{(].*)",
    re.IGNORECASE | re.DOTALL,
)
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [^-]*-----.*", re.DOTALL), _GONE),
    (re.compile(r"\bdata:[\w/.+-]+;base64,[\w+/=-]*"), _GONE),
    # scheme://user:password@host
    (re.compile(r"(?<=://)[^\s/@'\"]*@"), f"{_GONE}@"),
    # a URL's query: signed links carry their secret there
    (re.compile(r"(?<=\w)\?[^\s'\"]*=[^\s'\"]*"), f"?{_GONE}"),
    (
        re.compile(
            r"((?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?)(?:[A-Za-z]+ +)?[^\s,'\"}]+",
            re.IGNORECASE,
        ),
        rf"\1{_GONE}",
    ),
    (
        re.compile(r"\b(bearer|basic|digest|negotiate)\s+[\w.~+/=-]{6,}", re.IGNORECASE),
        rf"\1 {_GONE}",
    ),
    (
        re.compile(
            rf"(?<![\w.#-]){_COUNTS}((?:--)?{_NAMES}['\"]?(?:\s*[:=]\s*|\s+))"
            r"(?:[\[(][^\])]*[\])]?|'[^']*'?|\"[^\"]*\"?|[^\s,;'\"\])}]+)",
            re.IGNORECASE,
        ),
        rf"\1{_GONE}",
    ),
    (
        re.compile(
            r"\b(?:hf_|sk-|pk-|rk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza|ya29\."
            r"|nvapi-|npm_|dckr_pat_|pypi-)[\w.-]{6,}"
        ),
        _GONE,
    ),
    (re.compile(r"\beyJ[\w-]{5,}\.[\w-]+(?:\.[\w-]*)?"), _GONE),
)


def redact(line: str) -> str:
    """Return the line without secrets and request texts, in one line of at most 300 characters."""
    text = " ".join(line.split())
    text = _REQUEST.sub(lambda match: f"{match['lead']}{_GONE}", text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"

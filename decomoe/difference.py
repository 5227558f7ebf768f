"""Where two answers differ, word by word."""

import difflib


def differences(left: str, right: str) -> list[tuple[str, str, bool]]:
    """Pieces of both texts in order: (of `left`, of `right`, whether they are the same); words joined by spaces."""
    ours, theirs = left.split(), right.split()
    matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
    return [(" ".join(ours[a:b]), " ".join(theirs[c:d]), tag == "equal") for tag, a, b, c, d in matcher.get_opcodes()]

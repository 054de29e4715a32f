"""Special tokens come from the chat template alone: text of the request that spells one is text.

    ChatTemplate.render()     --> prompt    what Transformers renders, byte for byte
                       traced --> trace     the prompt again, the template's own text in its own alphabet
    prompt, trace --SpecialTokens.cut()--> the texts to tokenize, one after the other

A tokenizer takes `<|im_end|>` for a control token everywhere, also in a user's message or a tool's output:
the author of such a text could end the turn and begin one of the system (special token injection). So we cut
the prompt inside each special token that is not wholly the template's. T is the template's own alphabet,
which is printed here in capitals:

    prompt      <|im_start|>user\nSay <|im_end|><|im_end|>\n
    trace       <|IM_START|>USER\nSay <|im_end|><|IM_END|>\n        its < and | are capitals too
    cut()       "<|im_start|>user\nSay <", "|im_end|><|im_end|>\n"

Authority: huggingface/transformers#29279, and https://github.com/openai/tiktoken/blob/main/tiktoken/core.py,
`encode`: special tokens "can be used to trick a model into doing something we don't want it to do".

Rules of this file:
1. The alphabet is made of half surrogate pairs, which no request can hold: JSON text with one is put right
   before it is read (request/body.py).
2. The template's own texts are its constants, bos_token and its like, and the roles, which are words of ours:
   templates make `<|user|>` of one. Everything else is the request's, also if a template has made it of both
   in a way that is not followed here: then a token is text, which is the safe mistake.
3. If the trace is not the prompt in another alphabet, we cannot use it, and the whole prompt is text.

Why not marks in the strings of the request: a template that prints a tool by `{{ tool }}` escapes the marks,
and one that compares a string sees them. Here it sees the client's own text. The price is a second
rendering of each prompt.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

# Blanks have no letter of their own: templates trim them. Nor has what is not ASCII, such as DeepSeek's ｜.
ALPHABET = {character: 0xD800 + character for character in range(0x21, 0x7F)}  # for str.translate()
PLAIN = {own: character for character, own in ALPHABET.items()}
OWN_LETTERS = re.compile("[\ud800-\udfff]+")
REQUESTS_LETTER = re.compile("[!-~]")


class SpecialTokens:
    """The added tokens of a vocabulary, kept apart from text that spells them."""

    def cut(self, prompt: str, trace: str) -> list[str]:
        """Return the prompt, cut inside each special token that has a character of the request.

        A SentencePiece tokenizer puts a space before each text: its model sees `< |im_end|>`.
        """
        trace = str(trace) if Own.read(trace) == prompt else prompt  # rule 3
        texts = []
        start = position = 0
        while token := self._pattern.search(prompt, position):
            position = token.end()
            letter = REQUESTS_LETTER.search(trace, token.start(), position)
            if letter or not OWN_LETTERS.search(trace, token.start(), position):
                # The template's beginning stays whole, for it may be a token itself.
                position = max(letter.start() if letter else 0, token.start() + 1)
                texts.append(prompt[start:position])
                start = position
        texts.append(prompt[start:])
        return texts

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    def __init__(self, added: Iterable[str]) -> None:
        tokens = [token for token in added if len(token) > 1 and token.strip(BLANKS)]
        self._pattern = re.compile(longest_of(tokens) if tokens else "(?!)")


class Own(str):
    """A text of the template: it compares as it reads, and prints in the template's own alphabet."""

    printed: str

    def __new__(cls, text: str, printed: str = "") -> "Own":
        own = super().__new__(cls, text)
        own.printed = printed or text.translate(ALPHABET)
        return own

    @classmethod
    def read(cls, value: Any) -> Any:
        """Return a value of a template, Own if it is a text with something of the template in it."""
        if type(value) is str and OWN_LETTERS.search(value):
            return cls(OWN_LETTERS.sub(lambda own: own[0].translate(PLAIN), value), value)
        return value

    def __add__(self, other: Any) -> Any:
        return Own(super().__add__(other), self.printed + str(other))

    def __str__(self) -> str:  # Jinja prints this, and joins it with ~
        return self.printed

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    def __radd__(self, other: str) -> Any:
        return Own(str.__add__(other, self), other + self.printed)

    @staticmethod
    def _followed(name: str) -> Any:
        """Return a method of str for the printed text, in which the request's text alone is unchanged."""
        method = getattr(str, name)
        return lambda self, *arguments: Own.read(method(self.printed, *arguments))

    strip, lstrip, rstrip, replace = map(_followed, ("strip", "lstrip", "rstrip", "replace"))


# --- the fold: a plain streamed request passes what stands above --------------------------------------------

BLANKS = " \t\r\n▁"  # some vocabularies have runs of blanks as added tokens, which control nothing


def longest_of(words: Iterable[str]) -> str:
    """Return a pattern that matches the longest word at a place.

    Words that begin alike share that beginning (a trie): a thousand words cost no more than one.
    """
    endings: dict[str, list[str]] = defaultdict(list)  # the words without their first character, by that one
    for word in words:
        endings[word[:1]].append(word[1:])
    ends_here = endings.pop("", [])
    branches = [re.escape(character) + longest_of(longer) for character, longer in endings.items()]
    return f"(?:{'|'.join(branches + ends_here)})"  # the shortest word, "", comes last

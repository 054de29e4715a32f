"""Special tokens come from the chat template alone: what a request spells of them is text.

    messages, tools, kwargs --SpecialTokens.mark_all(), ...--> the same with marks, and so the prompt of them
    prompt                  --SpecialTokens.cut()------------> the texts to tokenize, one after the other

A tokenizer takes `<|im_end|>` for a control token wherever it stands, in a user's message or a tool's output
too: an author of such a text could end the turn and begin one of the system (special token injection). So the
strings of the request are marked before the template sees them; M is a mark:

    mark()      Say <M|im_end|>
    render()    <|im_start|>user\nSay <M|im_end|><|im_end|>\n
    cut()       "<|im_start|>user\nSay <", "|im_end|><|im_end|>\n"

Authority: huggingface/transformers#29279, and https://github.com/openai/tiktoken/blob/main/tiktoken/core.py,
`encode`: special tokens "can be used to trick a model into doing something we don't want it to do".

Rules of this file:
1. A special token that has a character of the request in it has a mark in it: there is one after each
   character that begins a special token, and one before each string that may go on with a token of the
   template's. Other strings have none, so that a template finds the words that it looks for.
2. A prompt is cut only at marks in a special token, so that any other has the ids that it would have without.
3. A template that looks for `</think>` in a message does not find what the request has spelled.
4. Roles, types and ids of calls are words of ours, as the names of a message's members are, and have no
   marks: templates make `<|user|>` of them.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

# "Noncharacters ... are intended for process-internal uses": https://www.unicode.org/faq/private_use.html
MARK = "\ufdd0"
BLANKS = " \t\r\n▁"  # some vocabularies have runs of them as added tokens, which control nothing
OURS = ("role", "type", "id", "tool_call_id")  # members of messages, calls and tools: rule 4


def without_marks(text: str) -> str:
    return text.replace(MARK, "")


class SpecialTokens:
    """The added tokens of a vocabulary, kept apart from text that spells them."""

    def __init__(self, added: Iterable[str]) -> None:
        tokens = [token for token in added if len(token) > 1 and token.strip(BLANKS)]
        self._first_characters = {token[0] for token in tokens}
        self._pattern = re.compile(longest_of(tokens) if tokens else "(?!)")
        self._max_length = max(map(len, tokens), default=0)
        # What a string of the request can add to a token that the template has begun: its end, or a part.
        self._endings = {token[n:] for token in tokens for n in range(1, len(token))}
        self._parts = MARK.join(token[1:] for token in tokens)

    # --- before the template ---

    def mark(self, text: str) -> str:
        """Return the text with its marks (rule 1); one that came is replaced, as Unicode allows."""
        marked = text.replace(MARK, "\N{REPLACEMENT CHARACTER}")
        stripped = marked.lstrip()  # as templates do
        beginnings = {stripped[:n] for n in range(1, self._max_length)}
        if stripped and (beginnings & self._endings or stripped in self._parts):
            marked = marked.replace(stripped, MARK + stripped, 1)
        for character in self._first_characters:
            marked = marked.replace(character, character + MARK)
        return marked

    def mark_all(self, value: Any) -> Any:
        """Mark all strings of a JSON value, the names of members too."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, list):
            return [self.mark_all(element) for element in value]
        if isinstance(value, dict):
            return {self.mark(name): self.mark_all(member) for name, member in value.items()}
        return value

    def mark_said(self, said: Any) -> Any:
        """Mark what messages say and call, or what tools are called and take: all but what rule 4 names."""
        if isinstance(said, list):
            return [self.mark_said(element) for element in said]
        marked = {}
        for name, member in said.items():
            if name in ("tool_calls", "function"):
                member = self.mark_said(member)
            elif name not in OURS:
                member = self.mark_all(member)
            marked[name] = member
        return marked

    # --- after it ---

    def cut(self, prompt: str) -> list[str]:
        """Return the prompt without its marks, cut at those that stand inside a special token.

        A SentencePiece tokenizer puts a space before each text: its model sees `< |im_end|>`.
        """
        texts = []
        start = 0
        for token in self._pattern.finditer(prompt):
            if MARK in token[0]:
                end = prompt.index(MARK, token.start())
                texts.append(without_marks(prompt[start:end]))
                start = end
        texts.append(without_marks(prompt[start:]))
        return texts


def longest_of(words: Iterable[str]) -> str:
    """Return a pattern for the longest of the words that stands at a place, with any marks inside.

    Words that begin alike share that beginning (a trie): a thousand words cost no more than one.
    """
    endings: dict[str, list[str]] = defaultdict(list)  # the words without their first character, by that one
    for word in words:
        endings[word[0]].append(word[1:])
    branches = []
    for character, endings_of_character in endings.items():
        branch = re.escape(character)
        longer = list(filter(None, endings_of_character))
        if longer:
            branch += f"(?:{MARK}*{longest_of(longer)})"
            if "" in endings_of_character:  # one of the words ends here
                branch += "?"
        branches.append(branch)
    return "(?:" + "|".join(branches) + ")"

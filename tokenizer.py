"""Text to token ids and back, never half a character.

    texts --Tokenizer.encode()--> [token_id, ...]
    token_id --Decoder.feed()--> [Piece, ...] --Decoder.close()--> the rest

Authority: the `tokenizers` library; the model's tokenizer.json, whose `decoder` says how tokens spell bytes.
- Byte-level BPE (GPT-2, Llama 3, Qwen): every character of a token stands for one byte.
  https://github.com/openai/gpt-2/blob/master/src/encoder.py, `bytes_to_unicode`
- SentencePiece (Llama 2, Mistral, Gemma): text, with `▁` for a space and `<0xNN>` for bytes.
  https://github.com/google/sentencepiece#whitespace-is-treated-as-a-basic-symbol

Rules of this file:
1. Bytes that are valid UTF-8 leave at once. A character that is still open waits for its next token.
2. Only bytes that can never become a character are replaced, a maximal part of one by one U+FFFD.
   https://www.unicode.org/versions/Unicode15.0.0/ch03.pdf, section 3.9
3. An added token ends what came before it: a character still open there will never be finished.
4. Joined, the pieces equal `tokenizers.decode(ids)` up to the first control token, which has no text.

Why not call the library's decode() after each token and send the difference, as many servers do: it decodes
the whole answer again each time, and its difference is wrong where a character ends later. Here a token is
turned into bytes once, and an incremental UTF-8 decoder keeps the open ones. The price is `Spelling`:
tokenizers spell bytes in a few ways, and an unknown way is refused at the start.
"""

import codecs
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from channels import Piece, TokenLogprob

# GPT-2's alphabet: a byte that prints as Latin-1 is that character; the others are, in order, U+0100 and up.
PRINTING = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = sorted(set(range(0x100)) - set(PRINTING))
BYTE_OF = {chr(byte): byte for byte in PRINTING} | {chr(0x100 + n): byte for n, byte in enumerate(OTHERS)}

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece: one byte of a character that has no token


# --- both directions ----------------------------------------------------------------------------------------


class Tokenizer:
    """The vocabulary of one model."""

    def encode(self, *texts: str) -> list[int]:
        """Return the ids of the texts, one after another. No token spans two texts.

        The chat template writes the bos and eos tokens that the model wants, so none is added here.
        """
        # encode() holds Python's lock, which stops all streams, and encode_batch() computes offsets too. The
        # library would encode several texts in its own threads, and there short prompts wait for long ones.
        return [
            token_id
            for text in texts
            for encoding in self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
            for token_id in encoding.ids
        ]

    def _token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token. The padding of the vocabulary, which may be sampled, has none."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.spelling.byte_level and token_id in self.added_by_id:
            return token.encode()  # spelled as text: its "é" is not a byte of GPT-2's alphabet
        return self.spelling.to_bytes(token)

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    def __init__(self, path: Path) -> None:
        """Read a tokenizer.json; raises ValueError."""
        try:
            fields = msgspec.json.decode(path.read_bytes())
            for token in fields.get("added_tokens") or []:
                # The library must match it as it is written, not in text that a normalizer has changed.
                token["normalized"] = False
            self._tokenizer = tokenizers.Tokenizer.from_buffer(msgspec.json.encode(fields))
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(f"no tokenizer at {path}: {error}") from error
        self._tokenizer.no_truncation()  # some files carry the settings of their training run
        self._tokenizer.no_padding()
        self.spelling = Spelling(fields.get("decoder"))
        # Added tokens are matched as a whole, beside the vocabulary; some are markers (channels.py).
        self.added_by_id = self._tokenizer.get_added_tokens_decoder()
        self.added = {token.content: token_id for token_id, token in self.added_by_id.items()}
        self.token_bytes = cache(self._token_bytes)  # bounded by the size of the vocabulary


class Decoder:
    """Turns the token ids of one response into pieces: a streaming, or incremental, detokenizer.

    A logprob leaves once, in order, with the piece that completes the last character of its token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end inside a character
        self._open_logprobs: tuple[TokenLogprob, ...] = ()  # of tokens whose text has not left yet
        self._prefix = tokenizer.spelling.prefix  # of the first text, until that has left

    def feed(self, token_id: int, logprobs: tuple[TokenLogprob, ...] = ()) -> list[Piece]:
        """Return the pieces that a token completes.

        While a character is incomplete the list is empty. If an added token cuts a character off, the list
        has two pieces: U+FFFD for that character comes first.
        """
        data = self._tokenizer.token_bytes(token_id)
        added = self._tokenizer.added_by_id.get(token_id)
        if added is not None:
            cut_off = self.close()
            text = ""
            if not added.special:  # else it is a control token, which has no text
                text = self._without_dummy_prefix(data.decode(errors="replace"))
            return [*cut_off, Piece(text, added.content, logprobs)]
        text = self._without_dummy_prefix(self._utf8.decode(data))
        if not text:
            self._open_logprobs += logprobs
            return []
        complete = self._open_logprobs
        if self._utf8.getstate()[0]:  # the next character has begun: the logprob waits for its end
            self._open_logprobs = logprobs
        else:
            complete += logprobs
            self._open_logprobs = ()
        return [Piece(text, "", complete)]

    def close(self) -> list[Piece]:
        """Return the rest: U+FFFD for an open character, and the logprobs of tokens without text."""
        text = self._without_dummy_prefix(self._utf8.decode(b"", final=True))
        complete = self._open_logprobs
        self._open_logprobs = ()
        if not text and not complete:
            return []
        return [Piece(text, "", complete)]

    def _without_dummy_prefix(self, text: str) -> str:
        """Remove the space that the encoder has put before the first text."""
        if text:
            text = text.removeprefix(self._prefix)
            self._prefix = ""
        return text


# --- how tokens spell bytes ---------------------------------------------------------------------------------


class Spelling:
    """How the tokens of a vocabulary spell bytes: the `decoder` section of its tokenizer.json."""

    def to_bytes(self, token: str) -> bytes:
        """Return the bytes that `token` stands for."""
        if self.byte_level and BYTE_OF.keys() >= set(token):
            return bytes(BYTE_OF[character] for character in token)
        if self.byte_tokens and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        if self.marks_spaces:
            token = token.replace("▁", " ")
        return token.encode()

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    byte_level = False
    byte_tokens = False  # <0xNN> is a byte
    marks_spaces = False  # ▁ is a space
    # A space if the encoder puts one before every text, so that the decoder takes it away:
    # `add_dummy_prefix`, https://github.com/google/sentencepiece/blob/master/doc/options.md
    prefix = ""

    def __init__(self, decoder: Any) -> None:
        steps = (decoder or {}).get("decoders", [decoder])
        for step in steps:
            match step:
                case {"type": "ByteLevel"} if len(steps) == 1:
                    self.byte_level = True
                case {"type": "ByteFallback"}:
                    self.byte_tokens = True
                case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
                    self.marks_spaces = True
                case {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme}:
                    self.marks_spaces = True
                    self.prefix = "" if scheme == "never" else " "
                case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                    self.prefix = " "
                case {"type": "Fuse"}:  # joins the tokens, as Decoder does
                    pass
                case _:
                    raise ValueError(f"decoder {json.dumps(step)} found; supported: {SUPPORTED_DECODERS}")


# --- the fold: a plain streamed request passes what stands above --------------------------------------------

SUPPORTED_DECODERS = (
    "ByteLevel alone, or of Replace ▁, Metaspace, ByteFallback, Fuse and Strip of one leading space"
)

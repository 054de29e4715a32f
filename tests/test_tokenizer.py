"""tokenizer.py against the `tokenizers` library: law first, then the cases that broke others.

The vocabularies are made here: all 256 bytes, words, and tokens that end inside characters.
"""

import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers

from channels import Piece, TokenLogprob
from helpers.tables import table
from tokenizer import BYTE_OF, Decoder, Tokenizer

FILE = Path(__file__).parent / "models" / "tiny" / "tokenizer.json"
TINY = Tokenizer(FILE)
LLAMA_2 = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
GEMMA = LLAMA_2[:-1]
SPELLED = {byte: character for character, byte in BYTE_OF.items()}
CUT = [b"\xe6\x97", b"\xa5\xe6", b"\x9c\xac"]  # 日本 in three tokens: the middle one ends 日 and begins 本
SMILE = b"\xf0\x9f"  # two of the four bytes of an emoji
TOKENS = [*(bytes([n]) for n in range(256)), b"Hi", b" there", b' "', SMILE, *CUT]
SENTENCEPIECE = [*(f"<0x{n:02X}>" for n in range(256)), "<unk>", "▁", "▁▁▁", "Hi", "▁there", "é", "日", "a▁b"]
PADDING = 9999  # an id after the vocabulary: models pad theirs

Pair = tuple[Tokenizer, tokenizers.Tokenizer]  # ours and the library's


def saved(library: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder / "tokenizer.json")


def build(folder: Path, vocab: list[str], decoder: decoders.Decoder, **bpe: object) -> Pair:
    """Of one vocabulary, with added tokens after it: two of text, then one of control."""
    library = tokenizers.Tokenizer(models.BPE({token: n for n, token in enumerate(vocab)}, [], **bpe))
    library.decoder = decoder
    library.add_tokens([AddedToken("<think>", normalized=False), AddedToken("▁▁", normalized=False)])
    library.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    return saved(library, folder), library


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    vocab = ["".join(SPELLED[byte] for byte in token) for token in TOKENS]
    return build(tmp_path_factory.mktemp("byte_level"), vocab, decoders.ByteLevel())


@pytest.fixture(scope="module", params=[LLAMA_2, GEMMA], ids=["llama 2", "gemma"])
def sentencepiece(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    decoder = decoders.Sequence(request.param)
    folder = tmp_path_factory.mktemp("sentencepiece")
    return build(folder, SENTENCEPIECE, decoder, byte_fallback=True, unk_token="<unk>")


def decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[Piece]:
    decoder = Decoder(tokenizer)
    return [piece for token_id in token_ids for piece in decoder.feed(token_id)] + decoder.close()


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


# --- laws ---------------------------------------------------------------------------------------------------

WITHOUT_CONTROL = st.lists(st.integers(0, len(TOKENS) + 1) | st.just(PADDING))
ANY = st.lists(st.integers(0, len(TOKENS) + 2) | st.just(PADDING))
CHARACTERS = st.characters(codec="utf-8").map(lambda character: [*character.encode()])
WORDS = st.integers(256, len(SENTENCEPIECE) + 2).map(lambda token_id: [token_id])


@given(runs=st.lists(WITHOUT_CONTROL), last=WITHOUT_CONTROL)
def test_pieces_join_to_what_the_library_decodes(
    byte_level: Pair, runs: list[list[int]], last: list[int]
) -> None:
    """D11, D13, D15: any ids, also of bytes that are not UTF-8. A control token has no text, and ends a run:
    the library would finish a character after it, but there another channel begins.
    """
    ours, library = byte_level
    end = ours.added["<|end|>"]
    pieces = decode(ours, [*(token_id for run in runs for token_id in [*run, end]), *last])
    assert text_of(pieces) == "".join(library.decode(run) for run in [*runs, last])
    assert sum(piece == Piece("", "<|end|>") for piece in pieces) == len(runs)


@given(units=st.lists(WORDS | CHARACTERS))
def test_sentencepiece_joins_to_what_the_library_decodes(sentencepiece: Pair, units: list[list[int]]) -> None:
    """Whole characters only: of other bytes each becomes one U+FFFD there, a maximal part one here."""
    ours, library = sentencepiece
    token_ids = [token_id for unit in units for token_id in unit]
    assert text_of(decode(ours, token_ids)) == library.decode(token_ids, skip_special_tokens=True)


@given(token_ids=ANY)
def test_every_logprob_comes_out_once_and_in_order(byte_level: Pair, token_ids: list[int]) -> None:
    ours, _ = byte_level
    logprobs = [TokenLogprob("", -float(n), ours.token_bytes(i)) for n, i in enumerate(token_ids)]
    decoder = Decoder(ours)
    fed = [decoder.feed(i, (logprob,)) for i, logprob in zip(token_ids, logprobs, strict=True)]
    pieces = [piece for pieces in [*fed, decoder.close()] for piece in pieces]
    assert [logprob for piece in pieces for logprob in piece.logprobs] == logprobs


@given(text=st.text())
def test_encode_then_decode_is_the_text(text: str) -> None:
    assert text_of(decode(TINY, TINY.encode(text))) == text
    assert b"".join(map(TINY.token_bytes, TINY.encode(text))) == text.encode()


def test_a_short_prompt_waits_for_no_long_one() -> None:
    """Bug: the parts of a text that spells a special token went to the library's threads, after the parts of
    others' prompts: the event loop stood still for 0.4 s.
    """
    long = [" a" * 100_000, "b", "c"]
    threads = [threading.Thread(target=TINY.encode, args=long) for _ in range(2 * (os.cpu_count() or 1))]
    for thread in threads:
        thread.start()
    TINY.encode("what is ", "<|im_end", "|>?")
    n_running = sum(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join()
    assert n_running == len(threads)


@pytest.mark.bug("K06")
def test_other_threads_run_while_a_text_is_encoded() -> None:
    """encode() of the library holds Python's lock all the while, so that no stream gets anything."""
    n_turns = 0
    encoding = threading.Thread(target=TINY.encode, args=["The quick brown fox. " * 30_000])
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        n_turns += 1
    assert n_turns > 5


# --- cases --------------------------------------------------------------------------------------------------


@pytest.mark.bug("K02")
def test_a_normalizer_makes_no_added_token_of_other_text(tmp_path: Path) -> None:
    """NFKC makes `<|end|>` of fullwidth characters; SentencePiece's would find it only after a space."""
    library = tokenizers.Tokenizer.from_file(str(FILE))
    prepend = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.add_special_tokens([AddedToken("<|end|>", normalized=True)])
    library.add_tokens([AddedToken("<call>", normalized=True)])
    for normalizer in (normalizers.NFKC(), prepend):
        library.normalizer = normalizer
        ours = saved(library, tmp_path)
        for token in ("<|end|>", "<call>"):
            wide = token.replace("<", "＜").replace(">", "＞")
            assert ours.added[token] in ours.encode(f"a{token}b")
            assert ours.added[token] not in ours.encode(f"a{wide}b")


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace_takes_the_prefix_by_its_scheme(tmp_path: Path, scheme: Any) -> None:
    ours, library = build(tmp_path, ["▁a", "b"], decoders.Metaspace(prepend_scheme=scheme))
    assert text_of(decode(ours, [0, 1, 0])) == library.decode([0, 1, 0])


def test_an_added_token_is_its_plain_text(tmp_path: Path) -> None:
    """The library reads the "é" of an added token as GPT-2's spelling of byte E9 and returns U+FFFD."""
    library = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    library.decoder = decoders.ByteLevel()
    library.add_tokens(["<é>"])
    ours = saved(library, tmp_path)
    assert decode(ours, ours.encode("<é>")) == [Piece("<é>", "<é>")]


def test_encode_adds_and_drops_nothing(tmp_path: Path) -> None:
    """A tokenizer.json may add bos by its post-processor, and cut and pad as its training run did."""
    library = tokenizers.Tokenizer.from_file(str(FILE))
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", library.token_to_id("<|im_start|>"))]
    )
    library.enable_truncation(2)
    library.enable_padding(length=8)
    text = "What is the weather in Tokyo?"
    assert saved(library, tmp_path).encode(text) == TINY.encode(text)


@pytest.mark.parametrize(("content", "message"), table("checkpoints")["tokenizers"])
def test_a_refusal_is_one_clear_line(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    if isinstance(content, str):
        path.write_text(content)
    elif content:
        path.write_text(json.dumps(json.loads(FILE.read_text()) | content))
    with pytest.raises(ValueError, match=r"tokenizer|decoder") as error:
        Tokenizer(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
